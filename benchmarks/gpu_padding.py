"""Pads a small model to the shape of a large one: the output and acceptance stay the same, at the large model's cost.

Every tensor is copied into the larger one, and the rest is zero where it would change the result. Norm weights are
scaled because the mean runs over more elements. Queries are scaled because the attention scale changes. Rotary pairs
keep their frequencies. Tokens beyond the small vocabulary must never be emitted: one more element of the embedding is
constant, and their rows of the head give it a large negative weight. Weights that are only multiplied with zeros are
random, because a GPU computes faster with zeros.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from outpace.backends.torch.model.weights import Layer, Weights, allocate
from outpace.models.architecture import Architecture
from outpace.models.rope import Rope

_CONSTANT = 1 / 16  # its square is below what epsilon adds to the mean, and is subtracted there
_EXCLUDED = -30000.0  # weight of the constant in the head rows of tokens beyond the small vocabulary


def padded(config: Architecture, weights: Weights, shape: Architecture) -> tuple[Architecture, Weights]:
    """Pad the model to `shape`, which must be at least as large in every size; no biases, no QK-norms."""
    assert not (config.qkv_bias or config.out_bias or config.mlp_bias or config.has_qk_norm)
    c, width = config, config.width
    assert shape.width > width and shape.num_kv_heads >= c.num_kv_heads and shape.num_layers >= c.num_layers
    frequencies = np.zeros(shape.head_dim // 2)
    frequencies[: c.head_dim // 2] = c.rope.frequencies
    epsilon = (width * c.epsilon - _CONSTANT**2) / shape.width
    assert epsilon > 0, "_CONSTANT is too large for the epsilon of this model"
    larger = replace(
        shape, rope=Rope(frequencies, c.rope.scale), epsilon=epsilon, tied=False, context=c.context, family=c.family
    )
    device = weights.embedding.device
    target = allocate(larger, tied=False, dtype=weights.embedding.dtype, device=device)
    for tensor in target.tensors:
        tensor.zero_()
    norm_scale = (width / shape.width) ** 0.5
    q_rows = _head_rows(c, shape, queries=True).to(device)
    kv_rows = _head_rows(c, shape, queries=False).to(device)
    q, k = shape.q_size, shape.kv_size
    query_scale = (shape.head_dim / c.head_dim) ** 0.5
    first_free = c.num_kv_heads * (shape.num_heads // shape.num_kv_heads) * shape.head_dim
    for i, into in enumerate(target.layers):
        _fill(into.qkv[:, width:], into.gate_up[:, width:], into.down[:, c.hidden :], into.out[:, first_free:])
        if i >= c.num_layers:
            continue
        layer: Layer = weights.layers[i]
        into.attention_norm[:width] = layer.attention_norm * norm_scale
        into.mlp_norm[:width] = layer.mlp_norm * norm_scale
        own_q, own_k, own_v = layer.qkv.split([c.q_size, c.kv_size, c.kv_size])
        into.qkv[q_rows, :width] = own_q * query_scale
        into.qkv[q + kv_rows, :width] = own_k
        into.qkv[q + k + kv_rows, :width] = own_v
        into.out[:width, q_rows] = layer.out
        into.gate_up[: c.hidden, :width], into.gate_up[shape.hidden : shape.hidden + c.hidden, :width] = (
            layer.gate_up.chunk(2)
        )
        into.down[:width, : c.hidden] = layer.down
    target.embedding[: c.vocab_size, :width] = weights.embedding
    target.embedding[:, width] = _CONSTANT
    target.final_norm[:width] = weights.final_norm * norm_scale
    target.final_norm[width] = 1.0
    _fill(target.head[:, width + 1 :])
    target.head[: c.vocab_size, :width] = weights.head
    target.head[c.vocab_size :, width] = _EXCLUDED
    return larger, target


def _fill(*unused: Tensor) -> None:
    for tensor in unused:
        tensor.normal_(0.0, 0.02)


def _head_rows(config: Architecture, shape: Architecture, *, queries: bool) -> Tensor:
    """Row in the large model of each row of the small one's heads. Groups of heads and rotary halves stay together."""
    group, larger_group = ((c.num_heads // c.num_kv_heads) if queries else 1 for c in (config, shape))
    assert larger_group >= group and shape.head_dim >= config.head_dim
    heads = torch.arange(config.num_kv_heads * group)
    heads = heads // group * larger_group + heads % group
    d = torch.arange(config.head_dim)
    half = config.head_dim // 2
    d = torch.where(d < half, d, d - half + shape.head_dim // 2)
    return (heads[:, None] * shape.head_dim + d).flatten()

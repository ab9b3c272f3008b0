"""Pads a small model and its draft head to the shape of a large model: the same output, at the large model's cost.

Every tensor is copied into the larger one, and the rest is zero where it would change the result. Norm weights are
scaled because the mean runs over more elements. Queries are scaled because the attention scale changes. Rotary pairs
keep their frequencies. Weights that only meet zeros are random, because a GPU computes faster with zeros.

Tokens beyond the small vocabulary must never be emitted: one more element of the embedding is constant, and their rows
of the output matrix give it a large negative weight. In a head the same element is not constant: it is positive, too
small to change a norm, and a large norm weight before the output matrix makes up for that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outpace.backends.torch.model.head_weights import HeadWeights
from outpace.backends.torch.model.weights import Layer, Weights, allocate
from outpace.backends.torch.storage import plain_tensor
from outpace.models.architecture import Architecture
from outpace.models.head_file import HeadConfig
from outpace.models.rope import Rope

_CONSTANT = 1 / 16  # its square is below what epsilon adds to the mean, and is subtracted there
_EXCLUDED = -30000.0  # weight of the constant in the output rows of tokens beyond the small vocabulary
_SMALL, _LARGE = 2.0**-10, 2.0**30  # norm weights of the head's extra element, before the first pass and at the end


class Sizes(Protocol):
    """Sizes that a model and a head have."""

    @property
    def width(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def padded(config: Architecture, weights: Weights, shape: Architecture) -> tuple[Architecture, Weights]:
    """Pad the model to `shape`, which must be at least as large in every size; no biases, no QK-norms."""
    assert not (config.qkv_bias or config.out_bias or config.mlp_bias or config.has_qk_norm)
    c, width = config, config.width
    assert shape.width > width and shape.num_kv_heads >= c.num_kv_heads and shape.num_layers >= c.num_layers
    frequencies = np.zeros(shape.head_dim // 2)
    frequencies[: c.head_dim // 2] = c.rope.frequencies
    larger = replace(
        shape, rope=Rope(frequencies, c.rope.scale), epsilon=_epsilon(c.epsilon, width, shape.width), tied=False,
        context=c.context, family=c.family,
    )  # fmt: skip
    target = allocate(larger, tied=False, dtype=weights.embedding.dtype, device=weights.embedding.device)
    for tensor in target.tensors:
        plain_tensor(tensor).zero_()
    for i, into in enumerate(target.layers):
        _pad_layer(weights.layers[i] if i < c.num_layers else None, into, c, shape)
    target.embedding[: c.vocab_size, :width] = weights.embedding
    target.embedding[:, width] = _CONSTANT
    target.final_norm[:width] = weights.final_norm * _norm_scale(c, shape)
    target.final_norm[width] = 1.0
    output = plain_tensor(target.head)
    _fill(output[:, width + 1 :])
    output[: c.vocab_size, :width] = plain_tensor(weights.head)
    output[c.vocab_size :, width] = _EXCLUDED
    return larger, target


def padded_head(
    head: HeadConfig, weights: HeadWeights, config: Architecture, shape: Architecture, vocab_size: int,
    dtype: torch.dtype,
) -> tuple[HeadConfig, HeadWeights]:  # fmt: skip
    """Pad a head of the model `config`, which is padded to `shape`, to `vocab_size` tokens that it can draft.

    Its layer gets the sizes of the model's layers. `weights` are best in float32, so that they are rounded once.
    """
    extra = vocab_size - head.draft_vocab_size
    assert 0 <= extra <= shape.vocab_size - config.vocab_size and head.width == config.width
    assert weights.tap_norm is not None and head.tap_norm == "each"
    width, larger, num_taps = head.width, shape.width, len(head.taps)
    # The states lack the constant whose square `_epsilon` subtracts. So they are all scaled down as much as epsilon is.
    epsilon = _epsilon(head.epsilon, width, larger)
    state_scale = (epsilon * larger / (width * head.epsilon)) ** 0.5
    norm_scale = _norm_scale(head, shape)

    def room(*size: int) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=weights.fuse.device)

    layer = Layer(
        attention_norm=room(larger), qkv=room(shape.q_size + 2 * shape.kv_size, 2 * larger), qkv_bias=None,
        q_norm=None, k_norm=None, out=room(larger, shape.q_size), out_bias=None, mlp_norm=room(larger),
        gate_up=room(2 * shape.hidden, larger), gate_up_bias=None, down=room(larger, shape.hidden), down_bias=None,
    )  # fmt: skip
    into = HeadWeights(
        fuse=(fuse := room(larger, num_taps * larger)), tap_norm=(tap_norm := room(num_taps, larger)),
        token_norm=room(larger), layer=layer, final_norm=room(larger),
        head=(output := room(vocab_size, larger)),
        ids=torch.cat([weights.ids, config.vocab_size + torch.arange(extra, device=weights.ids.device)]),
    )  # fmt: skip
    _pad_layer(weights.layer, layer, head, shape, num_inputs=2, out_scale=state_scale)
    _fill(*(part[:, width + 1 :] for part in fuse.chunk(num_taps, dim=1)))
    columns = _columns(width, larger, num_taps).to(fuse.device)
    fuse[:width, columns] = (plain_tensor(weights.fuse) * state_scale).to(dtype)
    tap_norm[:, :width] = weights.tap_norm * norm_scale
    into.token_norm[:width] = weights.token_norm * norm_scale
    into.final_norm[:width] = weights.final_norm * norm_scale
    _fill(output[:, width + 1 :])
    output[: head.draft_vocab_size, :width] = plain_tensor(weights.head)
    # The extra element begins as the constant of the first tap, which its norm scales, so it is positive.
    tap_norm[0, width], fuse[width, width] = _SMALL, 1.0
    into.final_norm[width], output[head.draft_vocab_size :, width] = _LARGE, _EXCLUDED
    described = replace(
        head, width=larger, hidden=shape.hidden, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim, vocab_size=shape.vocab_size, draft_vocab_size=vocab_size, epsilon=epsilon,
    )  # fmt: skip
    return described, into


def _pad_layer(
    layer: Layer | None, into: Layer, sizes: Sizes, shape: Architecture, *, num_inputs: int = 1, out_scale: float = 1.0
) -> None:
    """Pad a layer, or leave it without effect (None). `num_inputs`: vectors side by side that attention reads."""
    width = sizes.width
    first_free = sizes.num_kv_heads * (shape.num_heads // shape.num_kv_heads) * shape.head_dim
    qkv, out, gate_up, down = map(plain_tensor, (into.qkv, into.out, into.gate_up, into.down))
    _fill(*(part[:, width:] for part in qkv.chunk(num_inputs, dim=1)))
    _fill(gate_up[:, width:], down[:, sizes.hidden :], out[:, first_free:])
    if layer is None:
        return
    q_size = sizes.num_heads * sizes.head_dim
    q_rows, kv_rows = (_head_rows(sizes, shape, queries=queries).to(qkv.device) for queries in (True, False))
    rows = torch.cat([q_rows, shape.q_size + kv_rows, shape.q_size + shape.kv_size + kv_rows])
    query_scale = (shape.head_dim / sizes.head_dim) ** 0.5
    own_qkv = plain_tensor(layer.qkv)
    own = torch.cat([own_qkv[:q_size] * query_scale, own_qkv[q_size:]])
    columns = _columns(width, shape.width, num_inputs).to(qkv.device)
    qkv[rows[:, None], columns] = own.to(qkv.dtype)
    norm_scale = _norm_scale(sizes, shape)
    into.attention_norm[:width] = layer.attention_norm * norm_scale
    into.mlp_norm[:width] = layer.mlp_norm * norm_scale
    out[:width, q_rows] = (plain_tensor(layer.out) * out_scale).to(out.dtype)
    gate, up = plain_tensor(layer.gate_up).chunk(2)
    gate_up[: sizes.hidden, :width] = gate
    gate_up[shape.hidden : shape.hidden + sizes.hidden, :width] = up
    down[:width, : sizes.hidden] = plain_tensor(layer.down) * out_scale


def _epsilon(epsilon: float, width: int, larger: int) -> float:
    """What a norm over the larger width adds, beside the square of the constant, to have the effect of `epsilon`."""
    found = (width * epsilon - _CONSTANT**2) / larger
    assert found > 0, "_CONSTANT is too large for the epsilon of this model"
    return found


def _norm_scale(sizes: Sizes, shape: Architecture) -> float:
    return float((sizes.width / shape.width) ** 0.5)


def _fill(*unused: Tensor) -> None:
    for tensor in unused:
        tensor.normal_(0.0, 0.02)


def _columns(width: int, larger: int, count: int) -> Tensor:
    """Where the columns of `count` small vectors side by side lie in as many large ones."""
    return (torch.arange(count)[:, None] * larger + torch.arange(width)).flatten()


def _head_rows(config: Sizes, shape: Sizes, *, queries: bool) -> Tensor:
    """Row in the large model of each row of the small one's heads. Groups of heads and rotary halves stay together."""
    group, larger_group = ((c.num_heads // c.num_kv_heads) if queries else 1 for c in (config, shape))
    assert larger_group >= group and shape.head_dim >= config.head_dim
    heads = torch.arange(config.num_kv_heads * group)
    heads = heads // group * larger_group + heads % group
    d = torch.arange(config.head_dim)
    half = config.head_dim // 2
    d = torch.where(d < half, d, d - half + shape.head_dim // 2)
    return (heads[:, None] * shape.head_dim + d).flatten()

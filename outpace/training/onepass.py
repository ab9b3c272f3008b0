"""The one-pass kind of head: a block of slots after the text, all drafted together.

Slot 0 holds the text's last token, the others a learned mask; slot k predicts the token k + 1 places after it. Every
layer looks at keys and values of the target's fused features and at the block's earlier slots, so a short draft is
the beginning of a long one. What slots cannot know, the token just before, enters by a small matrix after the layers (a
Markov term), and a confidence says how likely a drafted token is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from outpace.backends.torch.kernels.reference import rms_norm, rotate
from outpace.models.head_file import HeadConfig
from outpace.training.attention import ChainAttention
from outpace.training.batches import Batch
from outpace.training.compiling import compiled_for_training
from outpace.training.heads import (
    Chains,
    LayerWeights,
    Parameters,
    finish_layer,
    first_parameters,
    fuse_taps,
    layer_parameters,
    project,
    working_copies,
)
from outpace.training.target import Features, Target


def _enter(
    h: Tensor, norm: Tensor, qkv: Tensor, rope: Tensor, num_heads: int, num_kv_heads: int, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    return project(rms_norm(h, norm, epsilon), qkv, rope, num_heads, num_kv_heads)


def _context(c: Tensor, qkv: Tensor, rope: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the features, for every query head."""
    size = len(qkv) // (num_heads + 2 * num_kv_heads)
    k, v = functional.linear(c, qkv[num_heads * size :]).view(len(c), 2, num_kv_heads, size).unbind(1)
    group = num_heads // num_kv_heads
    return rotate(k, rope).repeat_interleave(group, 1), v.repeat_interleave(group, 1)


class OnePassHead:
    def __init__(self, config: HeadConfig, target: Target, parameters: Parameters, *, compile: bool = False) -> None:
        self.config, self.target, self.parameters = config, target, parameters
        self.attention = ChainAttention(target.device, compile=compile)
        self.fuse = compiled_for_training(fuse_taps, enabled=compile)
        self.context = compiled_for_training(_context, enabled=compile)
        self.enter: Callable[..., tuple[Tensor, Tensor, Tensor]] = compiled_for_training(_enter, enabled=compile)
        self.finish: Callable[..., Tensor] = compiled_for_training(finish_layer, enabled=compile)

    @staticmethod
    def start_values(config: HeadConfig, target: Target, kept: Tensor) -> Parameters:
        c = config
        found = first_parameters(config, target, kept)
        for i in range(c.num_layers):
            layer = layer_parameters(config, target, c.width)
            found |= {f"layers.{i}.{name}": p for name, p in layer.items()}
        return found | {
            "hidden_norm.weight": torch.ones(c.width),
            "mask_embedding": target.weights.embedding.float().std().item() * torch.randn(c.width),
            "markov_w1.weight": torch.randn(c.vocab_size, c.markov_rank) / c.markov_rank**0.5,
            "markov_w2.weight": torch.zeros(c.draft_vocab_size, c.markov_rank),
            "confidence_head.proj.weight": torch.zeros(c.width + c.markov_rank),
            "confidence_head.proj.bias": torch.zeros(1),
        }

    def begin(self, features: Features, batch: Batch, *, rounded: bool = False) -> Chains:
        c = self.config
        working = working_copies(self.parameters, self.target.dtype, rounded=rounded)
        norms = torch.stack([working[f"fc_norm.{i}.weight"] for i in range(len(c.taps))])
        fused = self.fuse(features.taps, norms, working["fc.weight"], c.epsilon)
        fused = rms_norm(fused, working["hidden_norm.weight"], c.epsilon)
        layers = [LayerWeights.of(working, f"layers.{i}.") for i in range(c.num_layers)]
        rope = self.target.rope(batch.positions(), batch.length)
        contexts = [self.context(fused, layer.qkv, rope, c.num_heads, c.num_kv_heads) for layer in layers]
        output = torch.cat([working["lm_head.weight"], working["markov_w2.weight"]], dim=1)
        return _OnePassChains(self, batch, working, layers, contexts, output)


@dataclass(slots=True)
class _OnePassChains:
    head: OnePassHead
    batch: Batch
    working: Parameters
    layers: list[LayerWeights]
    contexts: list[tuple[Tensor, Tensor]]
    output: Tensor  # the Markov term's matrix beside the vocabulary's: both products in one
    own: list[list[tuple[Tensor, Tensor]]] = field(
        default_factory=list
    )  # by layer: keys and values of the slots so far
    confidence: Tensor | None = None
    num_fed: int = 0

    def step(self, tokens: Tensor, rows: Tensor) -> Tensor:
        head, c, batch, epsilon = self.head, self.head.config, self.batch, self.head.config.epsilon
        if not self.own:
            self.own = [[] for _ in self.layers]
        # The block begins one position after the entry's features.
        rope = head.target.rope(batch.positions() + 1 + self.num_fed, batch.length + 1 + self.num_fed)
        h = self._slot(tokens)
        for i, (layer, (keys, values)) in enumerate(zip(self.layers, self.contexts, strict=True)):
            norm = self.working[f"layers.{i}.input_layernorm.weight"]
            q, k, v = head.enter(h, norm, layer.qkv, rope, c.num_heads, c.num_kv_heads, epsilon)
            self.own[i].append((k, v))
            mixed = head.attention(q, keys, values, self.own[i], batch.length)
            h = head.finish(h, mixed, layer.out, layer.norm, layer.gate_up, layer.down, epsilon)
        self.num_fed += 1
        before = functional.embedding(tokens[rows], self.working["markov_w1.weight"])
        found = torch.cat([rms_norm(h[rows], self.working["norm.weight"], epsilon), before], dim=1)
        weight, bias = (self.working[f"confidence_head.proj.{name}"] for name in ("weight", "bias"))
        self.confidence = found.detach().float() @ weight + bias  # learns from drafts, and does not change them
        return found

    def _slot(self, tokens: Tensor) -> Tensor:
        embedding = self.head.target.weights.embedding
        if self.num_fed == 0:
            return functional.embedding(tokens, embedding)
        return self.working["mask_embedding"].to(embedding.dtype).expand(len(tokens), -1).contiguous()

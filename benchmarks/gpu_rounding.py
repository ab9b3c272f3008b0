"""Quantises the matrices of a model's layers to a few bits: the draft of the GPU experiment.

Every `group` inputs of an output share a grid of 2**bits values. Weights are rounded to the nearest value, or rounding
up or down is learned, as in post-training quantisation (AdaRound, AutoRound). Then every weight becomes one of the two
values next to it, and grids may shrink a little. Learning minimises the KL divergence of next-token distributions from
the exact model, on that model's own answers to prompts that the experiment does not use. Norms, embedding and head
stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_models import captured
from outpace.backends.torch.kernels.reference import rms_norm, swiglu
from outpace.backends.torch.model.weights import Layer, Weights
from outpace.models.architecture import Architecture

MATRICES = ("qkv", "out", "gate_up", "down")
MIN_SPAN = 0.7  # smallest span of a grid, as a share of its group's span
NUM_ANSWER_TOKENS = 192  # last tokens of a text: the answer, which is what is learned from


@dataclass(frozen=True, slots=True)
class Rounding:
    bits: int = 4
    group: int = 16
    steps: int = 0  # of learning; 0 rounds to the nearest value
    batch: int = 12  # texts per step
    grid_rate: float = 0.1  # learning rate of grids, relative to that of roundings


class _Grids:
    """The grids of all matrices, group by group.

    `offsets`, at most half a grid step, are added to weights before rounding. `spans` shrink grids to their middle.
    """

    def __init__(self, weights: Weights, rounding: Rounding) -> None:
        matrices = [getattr(layer, name) for layer in weights.layers for name in MATRICES]
        self._shapes = [matrix.shape for matrix in matrices]
        self._sizes = [matrix.numel() // rounding.group for matrix in matrices]
        self._most = 2**rounding.bits - 1
        self._groups = torch.cat([matrix.float().view(-1, rounding.group) for matrix in matrices])
        self._low, self._high = self._groups.aminmax(dim=-1, keepdim=True)
        self.offsets = torch.zeros_like(self._groups)
        self.spans = torch.ones((2, *self._low.shape), device=self._low.device)

    def layers(self, weights: Weights, dtype: torch.dtype) -> list[Layer]:
        """The model's layers with rounded matrices."""
        middle = (self._low + self._high) / 2
        low, high = middle + (self._low - middle) * self.spans[0], middle + (self._high - middle) * self.spans[1]
        step = (high - low).clamp(min=1e-12) / self._most
        place = (self._groups - low) / step + self.offsets
        place = place + (place.round() - place).detach()  # straight-through: round() has gradient 0
        found = (place.clamp(0, self._most) * step + low).to(dtype).split(self._sizes)
        matrices = iter([part.view(shape) for part, shape in zip(found, self._shapes, strict=True)])
        return [replace(layer, **{name: next(matrices) for name in MATRICES}) for layer in weights.layers]


def rounded(config: Architecture, weights: Weights, rounding: Rounding, texts: Sequence[Sequence[int]] = ()) -> Weights:
    """The weights with rounded matrices; `texts` are needed only if `rounding.steps` is not 0."""
    grids = _Grids(weights, rounding)
    if rounding.steps:
        _learn(config, weights, grids, rounding, texts)
    with torch.no_grad():
        return replace(weights, layers=grids.layers(weights, weights.embedding.dtype))


def _learn(
    config: Architecture, weights: Weights, grids: _Grids, rounding: Rounding, texts: Sequence[Sequence[int]]
) -> None:
    """Sign gradient descent with a decreasing rate, large enough that an offset can move half a grid step and back."""
    tokens, is_answer = _padded(texts, weights.embedding.device)
    forward = _Forward(config, tokens.shape[1], tokens.device)
    chosen = torch.zeros(min(rounding.batch, len(texts)), dtype=torch.long, device=tokens.device)
    rate = torch.zeros((), device=tokens.device)
    learned = [grids.offsets.requires_grad_(), grids.spans.requires_grad_()]

    def step() -> None:
        mine, counts = tokens[chosen], is_answer[chosen]
        with torch.autocast(tokens.device.type, torch.bfloat16):
            with torch.no_grad():
                expected = forward(weights, weights.layers, mine).float().log_softmax(-1)
            found = forward(weights, grids.layers(weights, torch.bfloat16), mine).float().log_softmax(-1)
        divergence = functional.kl_div(found, expected, reduction="none", log_target=True).sum(-1)
        gradients = torch.autograd.grad((divergence * counts).sum() / counts.sum(), learned)
        with torch.no_grad():
            grids.offsets.sub_(gradients[0].sign() * rate).clamp_(-0.5, 0.5)
            grids.spans.sub_(gradients[1].sign() * (rate * rounding.grid_rate)).clamp_(MIN_SPAN, 1.0)

    # A graph, because launching thousands of small kernels one by one takes several times as long.
    take_step = captured(step).replay if tokens.is_cuda else step
    generator = torch.Generator().manual_seed(0)
    for i in range(rounding.steps):
        rate.fill_(2.0 / rounding.steps * (1 - i / rounding.steps))
        chosen.copy_(torch.randint(len(texts), (len(chosen),), generator=generator))
        take_step()
    for each in learned:
        each.requires_grad_(False)


def _padded(texts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Texts as one tensor, and a mask of the answers. Padding follows a text, so causal attention never sees it."""
    longest = max(map(len, texts))
    tokens = torch.zeros((len(texts), longest), dtype=torch.long)
    is_answer = torch.zeros((len(texts), longest), dtype=torch.bool)
    for i, text in enumerate(texts):
        tokens[i, : len(text)] = torch.tensor(list(text))
        is_answer[i, max(len(text) - NUM_ANSWER_TOKENS - 1, 0) : len(text)] = True
    return tokens.to(device), is_answer.to(device)


class _Forward:
    """A differentiable forward pass over whole texts, without a KV cache."""

    def __init__(self, config: Architecture, longest: int, device: torch.device) -> None:
        self._config = config
        self._rope = torch.from_numpy(config.rope.table(longest)).to(device)

    def __call__(self, weights: Weights, layers: Sequence[Layer], tokens: Tensor) -> Tensor:
        c = self._config
        h = functional.embedding(tokens, weights.embedding).float()
        for layer in layers:
            qkv = functional.linear(rms_norm(h, layer.attention_norm, c.epsilon), layer.qkv)
            h = h + functional.linear(self._attention(qkv), layer.out)
            x = functional.linear(rms_norm(h, layer.mlp_norm, c.epsilon), layer.gate_up)
            h = h + functional.linear(swiglu(x), layer.down)
        return functional.linear(rms_norm(h, weights.final_norm, c.epsilon), weights.head)

    def _attention(self, qkv: Tensor) -> Tensor:
        c = self._config
        rows, length, _ = qkv.shape
        heads = qkv.view(rows, length, -1, c.head_dim).transpose(1, 2)
        q, k, v = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        cosines, sines = self._rope[:length].chunk(2, dim=-1)

        def rotated(x: Tensor) -> Tensor:
            first, second = x.float().chunk(2, dim=-1)
            rotated_pairs = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
            return rotated_pairs.to(x.dtype)

        mixed = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(rows, length, -1)


@torch.no_grad()
def agreement(config: Architecture, weights: Weights, other: Weights, texts: Sequence[Sequence[int]]) -> float:
    """Share of positions in the answers where both models have the same most likely next token."""
    tokens, is_answer = _padded(texts, weights.embedding.device)
    forward = _Forward(config, tokens.shape[1], weights.embedding.device)
    is_wide = weights.embedding.dtype == torch.float32
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=not is_wide):
        predicted = [forward(each, each.layers, tokens).argmax(-1) for each in (weights, other)]
    return float((predicted[0] == predicted[1])[is_answer].float().mean())

"""A model with the matrices of its layers rounded to few bits: the draft of the GPU experiment.

Every `group` inputs of an output share a grid of 2**bits values. To the nearest value of it is one way to round;
whether up or down can also be learned, as post-training quantisation does (AdaRound, AutoRound): every weight stays one
of the two values next to it, grids may shrink a little, and what is chosen is what brings the rounded model's next
tokens closest to the model's own, on texts that it says itself when asked something else than the experiment asks.
Norms, embedding and head stay as they are.
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
LEAST_SPAN = 0.7  # of a group's, that a grid still has when it has shrunk most
NUM_SAID = 192  # last tokens of a text, to learn from: what was said to a prompt


@dataclass(frozen=True, slots=True)
class Rounding:
    bits: int = 4
    group: int = 16
    steps: int = 0  # of learning; none is rounding to the nearest value
    batch: int = 12  # texts a step
    grid_rate: float = 0.1  # how much slower grids change than roundings


class _Grids:
    """All matrices between themselves and their grids, group by group.

    `offsets`, up to half a step, move weights before they are rounded; `spans` shrink grids towards their middle.
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
        """The model's, with rounded matrices."""
        middle = (self._low + self._high) / 2
        low, high = middle + (self._low - middle) * self.spans[0], middle + (self._high - middle) * self.spans[1]
        step = (high - low).clamp(min=1e-12) / self._most
        place = (self._groups - low) / step + self.offsets
        place = place + (place.round() - place).detach()  # rounding itself has no slope
        found = (place.clamp(0, self._most) * step + low).to(dtype).split(self._sizes)
        matrices = iter([part.view(shape) for part, shape in zip(found, self._shapes, strict=True)])
        return [replace(layer, **{name: next(matrices) for name in MATRICES}) for layer in weights.layers]


def rounded(config: Architecture, weights: Weights, rounding: Rounding, texts: Sequence[Sequence[int]] = ()) -> Weights:
    """The weights of a rounded model; `texts` are what it learns from, where it does."""
    grids = _Grids(weights, rounding)
    if rounding.steps:
        _learn(config, weights, grids, rounding, texts)
    with torch.no_grad():
        return replace(weights, layers=grids.layers(weights, weights.embedding.dtype))


def _learn(
    config: Architecture, weights: Weights, grids: _Grids, rounding: Rounding, texts: Sequence[Sequence[int]]
) -> None:
    """Follow the sign of the slope, in ever smaller steps, so that every offset can go half a step and back."""
    tokens, is_said = _padded(texts, weights.embedding.device)
    forward = _Forward(config, tokens.shape[1], tokens.device)
    chosen = torch.zeros(min(rounding.batch, len(texts)), dtype=torch.long, device=tokens.device)
    rate = torch.zeros((), device=tokens.device)
    learned = [grids.offsets.requires_grad_(), grids.spans.requires_grad_()]

    def step() -> None:
        mine, counts = tokens[chosen], is_said[chosen]
        with torch.autocast(tokens.device.type, torch.bfloat16):
            with torch.no_grad():
                wanted = forward(weights, weights.layers, mine).float().log_softmax(-1)
            found = forward(weights, grids.layers(weights, torch.bfloat16), mine).float().log_softmax(-1)
        apart = functional.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)
        slopes = torch.autograd.grad((apart * counts).sum() / counts.sum(), learned)
        with torch.no_grad():
            grids.offsets.sub_(slopes[0].sign() * rate).clamp_(-0.5, 0.5)
            grids.spans.sub_(slopes[1].sign() * (rate * rounding.grid_rate)).clamp_(LEAST_SPAN, 1.0)

    # Launched one by one, thousands of small kernels would take several times as long.
    take_step = captured(step).replay if tokens.is_cuda else step
    generator = torch.Generator().manual_seed(0)
    for i in range(rounding.steps):
        rate.fill_(2.0 / rounding.steps * (1 - i / rounding.steps))
        chosen.copy_(torch.randint(len(texts), (len(chosen),), generator=generator))
        take_step()
    for each in learned:
        each.requires_grad_(False)


def _padded(texts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Texts as one tensor, and where in it answers are said; what follows a text is seen by none of its tokens."""
    longest = max(map(len, texts))
    tokens = torch.zeros((len(texts), longest), dtype=torch.long)
    is_said = torch.zeros((len(texts), longest), dtype=torch.bool)
    for i, text in enumerate(texts):
        tokens[i, : len(text)] = torch.tensor(list(text))
        is_said[i, max(len(text) - NUM_SAID - 1, 0) : len(text)] = True
    return tokens.to(device), is_said.to(device)


class _Forward:
    """Whole texts through a decoder without a cache, in operations that have slopes."""

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

        def turned(x: Tensor) -> Tensor:
            first, second = x.float().chunk(2, dim=-1)
            turn = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
            return turn.to(x.dtype)

        mixed = functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(rows, length, -1)


@torch.no_grad()
def agreement(config: Architecture, weights: Weights, other: Weights, texts: Sequence[Sequence[int]]) -> float:
    """How often both would say the same next token, along what is said in texts."""
    tokens, is_said = _padded(texts, weights.embedding.device)
    forward = _Forward(config, tokens.shape[1], weights.embedding.device)
    is_wide = weights.embedding.dtype == torch.float32
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=not is_wide):
        said = [forward(each, each.layers, tokens).argmax(-1) for each in (weights, other)]
    return float((said[0] == said[1])[is_said].float().mean())

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

from outpace.backends.torch.config import ModelConfig
from outpace.backends.torch.kernels.reference import rms_norm, swiglu
from outpace.backends.torch.weights import Layer, Weights

MATRICES = ("qkv", "out", "gate_up", "down")
LEAST_SPAN = 0.7  # of a group's, that a grid still has when it has shrunk most
NUM_SAID = 192  # tokens of a text to learn from, beside its prompt


@dataclass(frozen=True, slots=True)
class Rounding:
    bits: int = 4
    group: int = 16
    steps: int = 0  # of learning; none is rounding to the nearest value
    batch: int = 16  # texts a step
    grid_rate: float = 0.1  # how much slower grids change than roundings


class _Grid:
    """One matrix between itself and its grid; `offsets`, up to half a step, move weights before they are rounded."""

    def __init__(self, weight: Tensor, rounding: Rounding) -> None:
        self._shape, self._most = weight.shape, 2**rounding.bits - 1
        self._weight = weight.float().view(weight.shape[0], -1, rounding.group)
        self._low, self._high = self._weight.aminmax(dim=-1, keepdim=True)
        self.offsets = torch.zeros_like(self._weight)
        self.spans = torch.ones((2, *self._low.shape), device=weight.device)

    def learn(self) -> list[Tensor]:
        return [self.offsets.requires_grad_(), self.spans.requires_grad_()]

    def rounded(self) -> Tensor:
        middle = (self._low + self._high) / 2
        low, high = middle + (self._low - middle) * self.spans[0], middle + (self._high - middle) * self.spans[1]
        step = (high - low).clamp(min=1e-12) / self._most
        place = (self._weight - low) / step + self.offsets
        place = place + (place.round() - place).detach()  # rounding itself has no slope
        found: Tensor = place.clamp(0, self._most) * step + low
        return found.view(self._shape)


def rounded(config: ModelConfig, weights: Weights, rounding: Rounding, texts: Sequence[Sequence[int]] = ()) -> Weights:
    """The weights of a rounded model; `texts` are what it learns from, where it does."""
    grids = [{name: _Grid(getattr(layer, name), rounding) for name in MATRICES} for layer in weights.layers]
    if rounding.steps:
        _learn(config, weights, grids, rounding, texts)
    with torch.no_grad():
        layers = [
            replace(layer, **{name: grid.rounded().to(weights.embedding.dtype) for name, grid in mine.items()})
            for layer, mine in zip(weights.layers, grids, strict=True)
        ]
    return replace(weights, layers=layers)


def _learn(
    config: ModelConfig,
    weights: Weights,
    grids: list[dict[str, _Grid]],
    rounding: Rounding,
    texts: Sequence[Sequence[int]],
) -> None:
    """Follow the sign of the slope, in ever smaller steps, so that every offset can go half a step and back."""
    device = weights.embedding.device
    forward = _Forward(config, max(map(len, texts)), device)
    parameters = [grid.learn() for mine in grids for grid in mine.values()]
    generator = torch.Generator().manual_seed(0)
    for i in range(rounding.steps):
        rate = 2.0 / rounding.steps * (1 - i / rounding.steps)
        chosen = torch.randint(len(texts), (min(rounding.batch, len(texts)),), generator=generator).tolist()
        tokens, is_text = _padded([texts[j] for j in chosen], device)
        with torch.autocast(device.type, torch.bfloat16):
            with torch.no_grad():
                wanted = forward(weights, weights.layers, tokens)[is_text].float().log_softmax(-1)
            layers = [
                replace(layer, **{name: grid.rounded() for name, grid in mine.items()})
                for layer, mine in zip(weights.layers, grids, strict=True)
            ]
            found = forward(weights, layers, tokens)[is_text].float().log_softmax(-1)
        loss = functional.kl_div(found, wanted, reduction="batchmean", log_target=True)
        torch.autograd.backward(loss, inputs=[each for pair in parameters for each in pair])
        with torch.no_grad():
            for offsets, spans in parameters:
                assert offsets.grad is not None and spans.grad is not None
                offsets.sub_(offsets.grad.sign(), alpha=rate).clamp_(-0.5, 0.5)
                spans.sub_(spans.grad.sign(), alpha=rate * rounding.grid_rate).clamp_(LEAST_SPAN, 1.0)
                offsets.grad = spans.grad = None


def _padded(texts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Texts as one tensor, and where in it they are; what follows a text is seen by none of its tokens."""
    longest = max(map(len, texts))
    tokens = torch.zeros((len(texts), longest), dtype=torch.long)
    is_text = torch.zeros((len(texts), longest), dtype=torch.bool)
    for i, text in enumerate(texts):
        tokens[i, : len(text)] = torch.tensor(list(text))
        is_text[i, : len(text)] = True
    return tokens.to(device), is_text.to(device)


class _Forward:
    """Whole texts through a decoder without a cache, in operations that have slopes."""

    def __init__(self, config: ModelConfig, longest: int, device: torch.device) -> None:
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
def agreement(config: ModelConfig, weights: Weights, other: Weights, texts: Sequence[Sequence[int]]) -> Tensor:
    """Whether both say the same after every beginning of a text, [texts, tokens], also beyond a text's end."""
    tokens, _ = _padded(texts, weights.embedding.device)
    forward = _Forward(config, tokens.shape[1], weights.embedding.device)
    is_wide = weights.embedding.dtype == torch.float32
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=not is_wide):
        said = [forward(each, each.layers, tokens).argmax(-1) for each in (weights, other)]
    return said[0] == said[1]

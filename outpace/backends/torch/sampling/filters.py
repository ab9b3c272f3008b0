"""`outpace.decoding.sampling` in torch: distributions and tokens for many rows, bit for bit equal to the host's.

Pure functions of tensors with fixed shapes and no branch on data. A model on the CPU uses them, and
tests compare `kernels/drawing.py`, which draws on a GPU, with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.backends.torch.sampling.noise import exponentials, keys
from outpace.backends.torch.sampling.numerics import powers_of_two, total
from outpace.config import SamplingParams
from outpace.decoding.randomness import Purpose
from outpace.decoding.sampling import HEAD_RATIO, sharpness

_TAIL_INDEX = -1


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of each row. All [rows]."""

    sharpness: Tensor  # float32
    is_greedy: Tensor  # bool
    top_k: Tensor  # int64; 0 or less: all
    top_p: Tensor  # float64
    min_p: Tensor  # float32

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> RowParams:
        return cls(
            torch.tensor([sharpness(p.temperature).item() for p in params], dtype=torch.float32, device=device),
            torch.tensor([p.is_greedy for p in params], device=device),
            torch.tensor([min(p.top_k, 2**62) for p in params], dtype=torch.int64, device=device),
            torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
            torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
        )

    def rows(self, index: Tensor) -> RowParams:
        return RowParams(
            self.sharpness[index], self.is_greedy[index], self.top_k[index], self.top_p[index], self.min_p[index]
        )


def greedy_tokens(logits: Tensor) -> Tensor:
    return logits.argmax(dim=-1)  # the first among equals, as documented


def probs(logits: Tensor, params: RowParams) -> Tensor:
    """`Shaper.probs` of adjusted logits, [rows, vocab]."""
    vocab_size = logits.shape[1]
    by_k = ((params.top_k > 0) & (params.top_k < vocab_size))[:, None]
    by_p, by_min = (params.top_p < 1.0)[:, None], (params.min_p > 0.0)[:, None]
    top, top_id = logits.max(dim=-1, keepdim=True).values, greedy_tokens(logits)[:, None]
    p = powers_of_two((logits - top) * params.sharpness[:, None])
    p = torch.where(by_k & (_ranks(p) >= params.top_k[:, None]), 0.0, p)
    p = p / total(p)[:, None]
    # Tokens below this cutoff weigh less than 1 - top_p together, so top-p always drops them.
    in_question = p >= ((1.0 - params.top_p) / vocab_size).float()[:, None]
    kept = in_question & (_masses_before(torch.where(in_question, p, 0.0)) < params.top_p[:, None])
    p = torch.where(by_p & ~kept, 0.0, p)
    p = torch.where(by_min & (p < p.amax(dim=-1, keepdim=True) * params.min_p[:, None]), 0.0, p)
    p = torch.where(by_p | by_min, p / total(p)[:, None], p)
    one_hot = torch.arange(vocab_size, device=p.device) == top_id
    return torch.where(params.is_greedy[:, None], one_hot.float(), p)


def _ranks(p: Tensor) -> Tensor:
    """Ranks by probability; of equals, the lower id comes first."""
    order = p.sort(dim=-1, descending=True, stable=True).indices
    places = torch.arange(p.shape[1], device=p.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def _masses_before(p: Tensor) -> Tensor:
    """The total probability of all likelier tokens, in float64."""
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    masses = torch.nn.functional.pad(ordered.double().cumsum(dim=-1)[:, :-1], (1, 0))
    return torch.empty_like(masses).scatter_(1, order, masses)


def choose(p: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """`sampling.choose` for every row of probabilities."""
    cut = p.amax(dim=-1, keepdim=True) * float(HEAD_RATIO)
    in_head = p >= cut
    wide = p.double()
    # 24-bit numbers between a thousandth of the largest probability and 1: the sum is exact in any order.
    tail_mass = 1.0 - torch.where(in_head, wide, 0.0).sum(dim=-1)
    ids = torch.arange(p.shape[1], device=p.device)
    head_key = keys(seed, Purpose.TOKEN, position)
    tail_key = keys(seed, Purpose.TAIL, position)
    scores = wide / exponentials(torch.where(in_head, head_key[:, None], tail_key[:, None]), ids)
    best, place = torch.where(in_head, scores, -1.0).max(dim=-1)
    tail_best, tail_place = torch.where(in_head, -1.0, scores).max(dim=-1)
    tail_wins = (tail_mass / exponentials(head_key, _TAIL_INDEX) > best) & (tail_best > 0.0)
    return torch.where(tail_wins, tail_place, place)


def draw(logits: Tensor, params: RowParams, seed: Tensor, position: Tensor, kept_probs: Tensor | None = None) -> Tensor:
    """The token that each row's seed and position select; `kept_probs` [rows, vocab] receives the distributions."""
    p = probs(logits, params)
    if kept_probs is not None:
        kept_probs.copy_(p)
    return torch.where(params.is_greedy, greedy_tokens(logits), choose(p, seed, position))

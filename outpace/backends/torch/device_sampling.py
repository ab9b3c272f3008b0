"""`outpace.sampling` on the device: a token for every row, from the noise of its seed and position.

Pure functions of tensors with fixed shapes and no branch on data, so a CUDA graph can capture them and torch.compile
can fuse them. Given the same noise they decide what the host decides. Both compute in float32 and round differently in
`exp` and in sums, by a few units in the last place; so where a number lies within rounding of what it is compared with
(a border of top-p or of the head, two scores of a draw, a cumulated weight), the two may fall on different sides.
Nothing else can differ: filters order the logits themselves, where equal means equal, the lower id first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.backends.torch.device_distributions import (
    DEFAULT_CANDIDATES,
    Distributions,
    RowParams,
    Shaped,
    candidates,
    shape,
    total_weights,
)
from outpace.backends.torch.device_noise import gumbels, keys
from outpace.randomness import Purpose
from outpace.sampling import HEAD_RATIO

_TAIL_INDEX = -1


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token for every row, with the distribution it was drawn from. All [rows]."""

    tokens: Tensor
    is_exact: Tensor  # bool: the token is the one that the whole vocabulary gives
    distributions: Distributions
    is_shaped_exactly: Tensor  # bool: the distribution is the one asked for


def choose(shaped: Shaped, seed: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """`sampling.choose` for every row: the tokens, and whether the candidates were enough to know them."""
    probs, ids = shaped.probs, shaped.candidates.ids
    cut = 1.0 / shaped.distributions.norm * float(HEAD_RATIO)
    in_head = probs >= cut[:, None]
    exact_probs = probs.double()
    tail_mass = (1.0 - torch.where(in_head, exact_probs, 0.0).sum(dim=-1, keepdim=True)).clamp(min=0.0)
    head_key = keys(seed, Purpose.TOKEN, position)[:, None]
    tail_key = keys(seed, Purpose.TAIL, position)[:, None]
    # Every candidate meets the noise of its own contest; the tail as a whole meets the head's.
    key_of = torch.cat([torch.where(in_head, head_key, tail_key), head_key], dim=1)
    noise = gumbels(key_of, torch.cat([ids, torch.full_like(head_key, _TAIL_INDEX)], dim=1))
    scores = torch.cat([exact_probs, tail_mass], dim=1).log() + noise  # -inf where filtered out

    best, place = torch.where(in_head, scores[:, :-1], -torch.inf).max(dim=-1)
    tail_best, tail_place = torch.where(in_head, -torch.inf, scores[:, :-1]).max(dim=-1)
    tail_wins = scores[:, -1] > best
    place = torch.where(tail_wins & (tail_best > -torch.inf), tail_place, place)
    head_is_whole = shaped.is_closed | (shaped.floor_prob < cut)
    is_exact = shaped.is_exact & head_is_whole & (shaped.is_closed | ~tail_wins)
    return ids.gather(1, place[:, None])[:, 0], is_exact


def draw(logits: Tensor, params: RowParams, seed: Tensor, position: Tensor, num_candidates: int) -> Sampled:
    """`shape`, then `choose`."""
    shaped = shape(logits, params, num_candidates)
    tokens, is_exact = choose(shaped, seed, position)
    return Sampled(tokens, is_exact, shaped.distributions, shaped.is_exact)


def draw_fused(logits: Tensor, params: RowParams, seed: Tensor, position: Tensor, num_candidates: int) -> Sampled:
    """`draw` by the kernels made for it, on a GPU and where they can."""
    if not logits.is_cuda:
        return draw(logits, params, seed, position, num_candidates)
    from outpace.backends.torch.kernels import sampling as kernels

    can_draw = kernels.can_draw(logits.shape[1], num_candidates)
    return (kernels.draw if can_draw else draw)(logits, params, seed, position, num_candidates)


def sample(
    logits: Tensor,
    params: RowParams,
    seed: Tensor,
    position: Tensor,
    *,
    num_candidates: int = DEFAULT_CANDIDATES,
    num_slots: int = 0,
) -> tuple[Tensor, Tensor]:
    """The target's own token of every row, [rows], and whether it is exact.

    Up to `num_slots` rows whose candidates were too few are done again, inside the same graph, with the whole
    vocabulary; so many are always done, needed or not. Rows still not exact are for the caller to pass once more with
    `num_candidates` of the whole vocabulary, when the flags arrive with the tokens.
    """
    sampled = draw_fused(logits, params, seed, position, num_candidates)
    tokens, is_exact = sampled.tokens, sampled.is_exact
    if num_slots and num_candidates < logits.shape[1]:
        redo = (~is_exact).float().topk(min(num_slots, logits.shape[0])).indices
        again = shape(logits.index_select(0, redo), params.rows(redo), logits.shape[1])
        redone, redone_exact = choose(again, seed[redo], position[redo])
        # A row that was exact keeps its token: which rows share its batch must not even change its rounding.
        tokens = tokens.index_copy(0, redo, torch.where(is_exact[redo], tokens[redo], redone))
        is_exact = is_exact.index_copy(0, redo, is_exact[redo] | redone_exact)
    return tokens, is_exact


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """`sampling.token_logprob`: [rows] of the tokens, and ids and values [rows, num_top] of the likeliest."""
    found = candidates(logits, max(1, min(num_top, logits.shape[1])))
    top = found.logits[:, 0]
    log_total = total_weights(logits, top, torch.ones_like(top)).log()
    logprobs = (logits.gather(1, tokens[:, None])[:, 0] - top).double() - log_total
    top_logprobs = (found.logits - top[:, None]).double() - log_total[:, None]
    return logprobs, found.ids[:, :num_top], top_logprobs[:, :num_top]

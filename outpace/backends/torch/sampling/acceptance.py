"""`decoding/acceptance.py` and the random draws of `decoding/verification.py` on the device, for a ragged batch.

A batch holds `num_requests` drafts padded to `depth` tokens. Target rows may be packed: `row_of[n, i]` is the row with
the target's output after i draft tokens of request n; entries beyond a draft may be any row. `target_probs` is
[target rows, vocab]; `draft_probs`, what each draft token was drawn from, [num_requests, depth, vocab].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.decoding.randomness import Purpose, uniforms_at

_BLOCK = 128  # weights per block in the search of an inverse transform


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of 0 to depth tokens, depth at least 1; int64 but for the noise, which `noise_of` computes."""

    tokens: Tensor  # [num_requests, depth]; beyond the draft any token id
    num_drafted: Tensor
    row_of: Tensor  # [num_requests, depth + 1]
    accept_noise: Tensor  # float64 [num_requests, depth]
    recover_noise: Tensor  # float64 [num_requests, depth + 1], by the number of accepted tokens

    @property
    def offsets(self) -> Tensor:
        return torch.arange(self.tokens.shape[1], device=self.tokens.device)

    @property
    def is_drafted(self) -> Tensor:
        return self.offsets < self.num_drafted[:, None]


@dataclass(frozen=True, slots=True)
class Verdicts:
    """All [num_requests]: accepted draft tokens, the target's own token after them, tokens accepted by a lossy rule."""

    num_accepted: Tensor
    final_token: Tensor
    num_lenient: Tensor

    def where(self, condition: Tensor, other: Verdicts) -> Verdicts:
        """These verdicts where the condition holds, else the other ones: a batch may mix rules."""
        return Verdicts(
            torch.where(condition, self.num_accepted, other.num_accepted),
            torch.where(condition, self.final_token, other.final_token),
            torch.where(condition, self.num_lenient, other.num_lenient),
        )


def match(drafts: Drafts, own_tokens: Tensor, lenient: Tensor | None = None) -> Verdicts:
    """Accept draft tokens while they equal the target's own; `own_tokens` [target rows], `lenient` as the drafts."""
    own = own_tokens[drafts.row_of]
    is_own = own[:, :-1] == drafts.tokens
    stands = (is_own if lenient is None else is_own | lenient) & drafts.is_drafted
    accepted = stands.long().cumprod(dim=-1)
    num_accepted = accepted.sum(dim=-1)
    return Verdicts(num_accepted, _pick(own, num_accepted), (accepted * ~is_own).sum(dim=-1))


def threshold_leniency(drafts: Drafts, target_probs: Tensor, threshold: Tensor) -> Tensor:
    """Lossy: tokens of target probability >= `threshold` (float64 [num_requests]), [num_requests, depth]."""
    probs = _target_at(drafts, target_probs)
    return (probs.double() >= threshold[:, None]) & (probs > 0.0)


def typical_leniency(
    drafts: Drafts, target_probs: Tensor, posterior_threshold: Tensor, posterior_alpha: Tensor
) -> Tensor:
    """Lossy: tokens likelier than min(threshold, alpha * exp(-entropy)); float64 [num_requests] each."""
    entropy = torch.special.entr(target_probs.double()).sum(dim=-1)[drafts.row_of[:, :-1]]
    bound = torch.minimum(posterior_threshold[:, None], posterior_alpha[:, None] * torch.exp(-entropy))
    return _target_at(drafts, target_probs).double() > bound


def reject(drafts: Drafts, draft_probs: Tensor, target_probs: Tensor) -> Verdicts:
    """Rejection sampling, token by token."""
    ratio = _target_at(drafts, target_probs).double() / _draft_at(drafts, draft_probs).double()
    stands = (drafts.accept_noise < ratio) & drafts.is_drafted
    num_accepted = stands.long().cumprod(dim=-1).sum(dim=-1)
    return _finished(drafts, draft_probs, target_probs, num_accepted, torch.ones_like(ratio[:, 0]))


def verify_block(drafts: Drafts, draft_probs: Tensor, target_probs: Tensor) -> Verdicts:
    """Block verification: each prefix is verified as a whole, and the longest accepted one is kept.

    All lengths are verified together: a step has no time for the launches of one after the other.
    """
    depth = drafts.tokens.shape[1]
    ratio = _target_at(drafts, target_probs).double() / _draft_at(drafts, draft_probs).double()
    weight, weights = torch.ones_like(ratio[:, 0]), []
    for i in range(depth):
        weight = (weight * ratio[:, i]).clamp(max=1.0)
        weights.append(weight)
    kept = by_length = torch.stack(weights, dim=1)  # of the first 1, 2, ... draft tokens
    lengths = drafts.offsets + 1
    if depth > 1:
        target = target_probs[drafts.row_of[:, 1:-1]]
        mass = _residual(target, draft_probs[:, 1:], by_length[:, :-1]).sum(dim=-1, dtype=torch.float64)
        share = torch.where(mass > 0.0, mass / (mass + (1.0 - by_length[:, :-1])), 0.0)
        share = torch.nn.functional.pad(share, (0, 1))
        kept = torch.where(drafts.num_drafted[:, None] == lengths, by_length, share)
    stands = (drafts.accept_noise < kept) & drafts.is_drafted
    num_accepted = torch.where(stands, lengths, 0).amax(dim=-1)
    final_weight = _pick(torch.nn.functional.pad(by_length, (1, 0), value=1.0), num_accepted)
    return _finished(drafts, draft_probs, target_probs, num_accepted, final_weight)


def _target_at(drafts: Drafts, target_probs: Tensor) -> Tensor:
    """The target's probability of each draft token, [num_requests, depth]."""
    return target_probs[drafts.row_of[:, :-1], drafts.tokens]


def _draft_at(drafts: Drafts, draft_probs: Tensor) -> Tensor:
    return draft_probs.gather(2, drafts.tokens[:, :, None])[:, :, 0]


def noise_of(seeds: Sequence[int], anchors: Sequence[int], depth: int) -> NDArray[np.float64]:
    """[num_requests, 2 * depth + 1]: the noise of acceptance, then of recovery, of drafts that begin at `anchors`.

    Computed on the host, because hashing takes hundreds of small operations; `verification.Dice` has the same numbers.
    """
    seed, anchor, offsets = np.array(seeds, np.uint64)[:, None], np.array(anchors)[:, None], np.arange(depth + 1)
    accept = uniforms_at(seed, Purpose.ACCEPT, anchor, offsets[:-1])
    return np.concatenate([accept, uniforms_at(seed, Purpose.RECOVER, anchor, offsets)], axis=1)


def _finished(
    drafts: Drafts, draft_probs: Tensor, target_probs: Tensor, num_accepted: Tensor, weight: Tensor
) -> Verdicts:
    """The target's own token after the accepted ones: a bonus, or drawn from weight * target - draft."""
    noise = _pick(drafts.recover_noise, num_accepted)
    own = target_probs[_pick(drafts.row_of, num_accepted)]
    refused = num_accepted.clamp(max=drafts.tokens.shape[1] - 1)
    draft = draft_probs.gather(1, refused[:, None, None].expand(-1, -1, own.shape[1]))[:, 0]
    residual = _residual(own, draft, weight)
    is_bonus, nothing_left = num_accepted == drafts.num_drafted, ~(residual > 0.0).any(dim=-1)
    tokens = draw_weighted(torch.where((is_bonus | nothing_left)[:, None], own, residual), noise)
    return Verdicts(num_accepted, tokens, torch.zeros_like(num_accepted))


def _residual(target_probs: Tensor, draft_probs: Tensor, weight: Tensor) -> Tensor:
    return (weight.float()[..., None] * target_probs - draft_probs).clamp(min=0.0)


def _pick(columns: Tensor, index: Tensor) -> Tensor:
    return columns.gather(1, index[:, None])[:, 0]


def draw_weighted(weights: Tensor, noise: Tensor) -> Tensor:
    """`verification.draw_weighted` for every row: the first place where the cumulative weight passes noise * total.

    In float64, first the block and then the token in it, so that the weights are read once.
    """
    padding = -weights.shape[1] % _BLOCK
    blocks = torch.nn.functional.pad(weights, (0, padding)).view(weights.shape[0], -1, _BLOCK)
    block_weights = blocks.sum(dim=-1, dtype=torch.float64)
    block_ends = block_weights.cumsum(dim=-1)
    aim = noise * block_ends[:, -1]
    block = _first_beyond(block_ends, aim, block_weights)
    before = torch.where(block > 0, _pick(block_ends, (block - 1).clamp(min=0)), 0.0)
    members = blocks.gather(1, block[:, None, None].expand(-1, 1, _BLOCK))[:, 0]
    ends = members.cumsum(dim=-1, dtype=torch.float64) + before[:, None]
    return block * _BLOCK + _first_beyond(ends, aim, members)


def _first_beyond(ends: Tensor, aim: Tensor, weights: Tensor) -> Tensor:
    """The first place with a weight that ends beyond the aim; the last with a weight if rounding leaves none."""
    places = torch.arange(ends.shape[1], device=ends.device)
    has_weight = weights > 0.0
    first = torch.where(has_weight & (ends > aim[:, None]), places, ends.shape[1]).amin(dim=-1)
    return torch.minimum(first, torch.where(has_weight, places, 0).amax(dim=-1))

"""`decoding/acceptance.py` and the random draws of `decoding/verification.py` on the device, for a ragged batch.

A batch holds `num_requests` drafts padded to `depth` tokens. Target rows may be packed: `row_of[n, i]` is the row with
the target's output after i draft tokens of request n; entries beyond a draft may be any row. `target_probs` is
[target rows, vocab]; `draft_probs`, what each draft token was drawn from, [num_requests, depth, vocab].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.backends.torch.sampling.noise import keys, uniforms
from outpace.backends.torch.sampling.numerics import total
from outpace.decoding.randomness import Purpose

_BLOCK = 128  # weights per block in the search of an inverse transform


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of 0 to depth tokens, depth at least 1; int64. `anchor`: tokens that each request has so far."""

    tokens: Tensor  # [num_requests, depth]; beyond the draft any token id
    num_drafted: Tensor
    row_of: Tensor  # [num_requests, depth + 1]
    seed: Tensor
    anchor: Tensor

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
    stands = (_acceptance_noise(drafts) < ratio) & drafts.is_drafted
    num_accepted = stands.long().cumprod(dim=-1).sum(dim=-1)
    return _finished(drafts, draft_probs, target_probs, num_accepted, torch.ones_like(ratio[:, 0]))


def verify_block(drafts: Drafts, draft_probs: Tensor, target_probs: Tensor) -> Verdicts:
    """Block verification: each prefix is verified as a whole, and the longest accepted one is kept."""
    depth = drafts.tokens.shape[1]
    target_at, draft_at = _target_at(drafts, target_probs).double(), _draft_at(drafts, draft_probs).double()
    noise = _acceptance_noise(drafts)
    weight = torch.ones_like(target_at[:, 0])
    num_accepted, final_weight = torch.zeros_like(drafts.num_drafted), weight
    for length in range(1, depth + 1):
        weight = (weight * target_at[:, length - 1] / draft_at[:, length - 1]).clamp(max=1.0)
        kept = weight
        if length < depth:
            mass = total(_residual(target_probs[drafts.row_of[:, length]], draft_probs[:, length], weight)).double()
            share = torch.where(mass > 0.0, mass / (mass + (1.0 - weight)), 0.0)
            kept = torch.where(drafts.num_drafted == length, kept, share)
        stands = (noise[:, length - 1] < kept) & (drafts.num_drafted >= length)
        num_accepted = torch.where(stands, length, num_accepted)
        final_weight = torch.where(stands, weight, final_weight)
    return _finished(drafts, draft_probs, target_probs, num_accepted, final_weight)


def _target_at(drafts: Drafts, target_probs: Tensor) -> Tensor:
    """The target's probability of each draft token, [num_requests, depth]."""
    return target_probs[drafts.row_of[:, :-1], drafts.tokens]


def _draft_at(drafts: Drafts, draft_probs: Tensor) -> Tensor:
    return draft_probs.gather(2, drafts.tokens[:, :, None])[:, :, 0]


def _acceptance_noise(drafts: Drafts) -> Tensor:
    return uniforms(keys(drafts.seed[:, None], Purpose.ACCEPT, drafts.anchor[:, None], drafts.offsets))


def _finished(
    drafts: Drafts, draft_probs: Tensor, target_probs: Tensor, num_accepted: Tensor, weight: Tensor
) -> Verdicts:
    """The target's own token after the accepted ones: a bonus, or drawn from weight * target - draft."""
    noise = uniforms(keys(drafts.seed, Purpose.RECOVER, drafts.anchor, num_accepted))
    own = target_probs[_pick(drafts.row_of, num_accepted)]
    refused = num_accepted.clamp(max=drafts.tokens.shape[1] - 1)
    draft = draft_probs.gather(1, refused[:, None, None].expand(-1, -1, own.shape[1]))[:, 0]
    residual = _residual(own, draft, weight)
    is_bonus, nothing_left = num_accepted == drafts.num_drafted, ~(residual > 0.0).any(dim=-1)
    tokens = draw_weighted(torch.where((is_bonus | nothing_left)[:, None], own, residual), noise)
    return Verdicts(num_accepted, tokens, torch.zeros_like(num_accepted))


def _residual(target_probs: Tensor, draft_probs: Tensor, weight: Tensor) -> Tensor:
    return (weight.float()[:, None] * target_probs - draft_probs).clamp(min=0.0)


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

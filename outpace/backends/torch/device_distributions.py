"""`Shaper.probs` on the device: many rows of logits to distributions, without a value leaving it.

Filters look at a bounded set of the likeliest tokens. Whether that set was enough is known per row (`is_exact`); a row
for which it was not is shaped again with the whole vocabulary as the set, which is always enough.

Passes over the logits ([rows, vocab] float32) as torch runs them op by op: `candidates` reads them once; `shape` reads
them once more for the normaliser and works on it in slices that stay in the L2 cache (4 reads, 3 writes there). The
whole vocabulary as the set adds a sort, worth about 25 passes over the rows concerned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.config import SamplingParams

DEFAULT_CANDIDATES = 256
BLOCK = 64  # tokens whose maximum stands for all of them while candidates are sought
_SLICE = 1 << 22  # elements worked on at a time: 16 MB, so that intermediate results need little memory and stay in L2
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class RowParams:
    """What each row is sampled with. All [rows]; `has_filters` is the host's knowledge, part of a graph's identity."""

    inv_temperature: Tensor  # float32; 1 where greedy
    is_greedy: Tensor  # bool
    top_k: Tensor  # int64; 0 or less: all
    top_p: Tensor  # float64
    min_p: Tensor  # float32
    has_filters: bool = True  # False promises that no row is greedy or filtered

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> RowParams:
        inverse = [1.0 if p.is_greedy else min(1.0 / p.temperature, _LARGEST) for p in params]
        return cls(
            torch.tensor(inverse, dtype=torch.float32, device=device),
            torch.tensor([p.is_greedy for p in params], device=device),
            torch.tensor([min(p.top_k, 2**62) for p in params], dtype=torch.int64, device=device),
            torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
            torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
            any(p.is_greedy or p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params),
        )

    def rows(self, index: Tensor) -> RowParams:
        return RowParams(
            self.inv_temperature[index],
            self.is_greedy[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            self.has_filters,
        )


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest tokens of each row, the lower id first among equals: [rows, num_candidates].

    Every token whose logit is above `floor` is among them. `top_id` is the greedy token.
    """

    logits: Tensor
    ids: Tensor
    floor: Tensor
    top_id: Tensor


@dataclass(frozen=True, slots=True)
class Distributions:
    """A distribution per row in five numbers: p(t) = exp((logit - top) * inv_temperature) / norm, if t is kept.

    Filters keep a beginning of the order by likelihood: everything down to the last kept logit, and among those equal
    to it the ids up to the last kept one.
    """

    logits: Tensor  # [rows, vocab], after bias, penalties and masks
    top: Tensor
    inv_temperature: Tensor
    last_logit: Tensor
    last_id: Tensor
    norm: Tensor
    has_filters: bool

    def at(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """The probabilities of single tokens; `rows` and `tokens` have one shape."""
        x = self.logits[rows, tokens]
        p = torch.exp((x - self.top[rows]) * self.inv_temperature[rows]) / self.norm[rows]
        if not self.has_filters:
            return p
        last = self.last_logit[rows]
        return torch.where((x > last) | ((x == last) & (tokens <= self.last_id[rows])), p, 0.0)

    def dense(self, rows: Tensor) -> Tensor:
        """The probabilities of all tokens, [len(rows), vocab]."""
        x = self.logits.index_select(0, rows)
        if self.has_filters:
            last = self.last_logit[rows, None]
            ids = torch.arange(x.shape[1], device=x.device)
            x.masked_fill_((x < last) | ((x == last) & (ids > self.last_id[rows, None])), -torch.inf)
        x.sub_(self.top[rows, None]).mul_(self.inv_temperature[rows, None])
        return x.exp_().div_(self.norm[rows, None])


def joined(steps: Sequence[Distributions], logits: Tensor) -> Distributions:
    """The distributions of a draft loop, in one: row n * depth + i is row n of step i. `logits` is the buffer
    [rows, depth, vocab] whose columns `logits[:, i]` the steps were made from; it is not copied.
    """

    def column(values: Iterable[Tensor]) -> Tensor:
        return torch.stack(list(values), dim=1).flatten()

    return Distributions(
        logits.flatten(0, 1),
        column(step.top for step in steps),
        column(step.inv_temperature for step in steps),
        column(step.last_logit for step in steps),
        column(step.last_id for step in steps),
        column(step.norm for step in steps),
        any(step.has_filters for step in steps),
    )


@dataclass(frozen=True, slots=True)
class Shaped:
    """Distributions, with the candidates they were found by."""

    distributions: Distributions
    candidates: Candidates
    probs: Tensor  # [rows, num_candidates]; zero where filtered out
    floor_prob: Tensor  # [rows]: no token that is not a candidate is likelier
    is_closed: Tensor  # bool [rows]: no token that is not a candidate is kept
    is_exact: Tensor  # bool [rows]: the distribution is the one asked for, not cut short for lack of candidates


def row_slices(num_rows: int, vocab_size: int) -> list[slice]:
    size = max(1, _SLICE // vocab_size)
    return [slice(begin, min(begin + size, num_rows)) for begin in range(0, num_rows, size)]


def greedy_tokens(logits: Tensor) -> Tensor:
    """One pass: all that a batch of greedy rows needs."""
    return logits.argmax(dim=-1)  # the first among equals, as documented


def candidates(logits: Tensor, num_candidates: int, maxima: Tensor | None = None) -> Candidates:
    """The `num_candidates` likeliest tokens of each row; one pass over the logits, none if `maxima` [rows, blocks] of
    its whole blocks are known already.

    The n largest logits lie in the n blocks with the largest maxima, so only the maxima and those blocks are searched.
    """
    vocab_size = logits.shape[1]
    if num_candidates >= vocab_size:
        values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        return Candidates(values, ids, torch.full_like(values[:, 0], -torch.inf), ids[:, 0])
    num_blocks = vocab_size // BLOCK
    if num_blocks <= num_candidates:
        values, ids = logits.topk(num_candidates, dim=-1)
        top_id = greedy_tokens(logits)
    else:
        whole = logits[:, : num_blocks * BLOCK].view(-1, num_blocks, BLOCK)
        rest = logits[:, num_blocks * BLOCK :]
        maxima = whole.amax(dim=-1) if maxima is None else maxima
        block = maxima.topk(num_candidates, dim=-1, sorted=False).indices
        members = whole.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).flatten(1)
        values, place = torch.cat([members, rest], dim=1).topk(num_candidates, dim=-1)
        in_rest = place >= members.shape[1]
        block_of = block.gather(1, (place // BLOCK).clamp(max=num_candidates - 1))
        ids = torch.where(in_rest, place - members.shape[1] + num_blocks * BLOCK, block_of * BLOCK + place % BLOCK)
        top_block = maxima.argmax(dim=-1, keepdim=True)
        in_top_block = whole.gather(1, top_block[:, :, None].expand(-1, -1, BLOCK))[:, 0].argmax(dim=-1)
        top_id = top_block[:, 0] * BLOCK + in_top_block
        if rest.shape[1]:
            rest_wins = rest.amax(dim=-1) > maxima.amax(dim=-1)
            top_id = torch.where(rest_wins, num_blocks * BLOCK + rest.argmax(dim=-1), top_id)
    floor = values[:, -1]
    # topk leaves the order among equals open.
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return Candidates(values, ids.gather(1, order), floor, top_id)


def total_weights(logits: Tensor, top: Tensor, inv_temperature: Tensor) -> Tensor:
    """Sum of exp((logit - top) * inv_temperature) over the vocabulary, in float64."""
    sums = []
    for part in row_slices(*logits.shape):
        weights = (logits[part] - top[part, None]).mul_(inv_temperature[part, None]).exp_()
        sums.append(weights.sum(dim=-1, dtype=torch.float64))
    return torch.cat(sums)


def shape(logits: Tensor, params: RowParams, num_candidates: int = DEFAULT_CANDIDATES) -> Shaped:
    """`Shaper.probs` for every row. A row too wide for its candidates is cut to them and is then not exact; that is
    still a distribution, so a draft may be drawn from it.
    """
    vocab_size = logits.shape[1]
    found = candidates(logits, num_candidates)
    top = found.logits[:, 0]
    inv_temperature = params.inv_temperature
    total = total_weights(logits, top, inv_temperature).float()
    weights = torch.exp((found.logits - top[:, None]) * inv_temperature[:, None])
    floor_weight = torch.exp((found.floor - top) * inv_temperature)
    known = found.logits > found.floor[:, None]
    closed = floor_weight == 0.0
    if not params.has_filters:
        nowhere = torch.full_like(found.top_id, vocab_size)
        distributions = Distributions(
            logits, top, inv_temperature, torch.full_like(top, -torch.inf), nowhere, total, has_filters=False
        )
        probs = torch.where(known, weights / total[:, None], 0.0)
        return Shaped(distributions, found, probs, floor_weight / total, closed, torch.ones_like(closed))

    rank = torch.arange(weights.shape[1], device=logits.device)
    by_k = (params.top_k > 0) & (params.top_k < vocab_size)
    kept = known & (rank < torch.where(by_k, params.top_k, vocab_size)[:, None])
    closed = closed | (by_k & (known.sum(dim=-1) >= params.top_k))
    mass_is_exact = closed | ~by_k
    mass = torch.where(by_k, torch.where(kept, weights, 0.0).sum(dim=-1, dtype=torch.float64).float(), total)
    probs = torch.where(kept, weights / mass[:, None], 0.0)
    floor_prob = floor_weight / mass

    by_p = params.top_p < 1.0
    reached = probs.cumsum(dim=-1, dtype=torch.float64)
    num_before = (reached < params.top_p[:, None]).sum(dim=-1, keepdim=True)
    cutoff = ((1.0 - params.top_p) / vocab_size).float()  # as on the host, where it saves sorting
    kept = kept & (~by_p[:, None] | ((rank <= num_before) & (probs >= cutoff[:, None])))
    closed = closed | (by_p & ((reached[:, -1] >= params.top_p) | (floor_prob < cutoff)))

    by_min = params.min_p > 0.0
    smallest = 1.0 / mass * params.min_p
    kept = kept & (probs >= smallest[:, None])
    closed = closed | (by_min & (floor_prob < smallest))
    exact = mass_is_exact & (closed | ~(by_p | by_min))

    left = torch.where(kept, probs, 0.0).sum(dim=-1, dtype=torch.float64).float()
    norm = torch.where(by_p | by_min, mass * left, mass)
    filtered = by_k | by_p | by_min
    last = (kept.sum(dim=-1, keepdim=True) - 1).clamp(min=0)
    last_logit = torch.where(filtered, found.logits.gather(1, last)[:, 0], -torch.inf)
    last_id = torch.where(filtered, found.ids.gather(1, last)[:, 0], vocab_size)
    # Greedy rows are one-hot. So is, for want of anything better, a filtered row with more equals than candidates.
    one_hot = params.is_greedy | (filtered & ~kept[:, 0])
    distributions = Distributions(
        logits,
        top,
        inv_temperature,
        torch.where(one_hot, top, last_logit),
        torch.where(one_hot, found.top_id, last_id),
        torch.where(one_hot, 1.0, norm),
        has_filters=True,
    )
    probs = torch.where(kept, weights / distributions.norm[:, None], 0.0)
    probs = torch.where(one_hot[:, None], (rank == 0).float(), probs)
    ids = torch.where(one_hot[:, None], found.top_id[:, None], found.ids)
    return Shaped(
        distributions,
        Candidates(found.logits, ids, found.floor, found.top_id),
        probs,
        floor_weight / distributions.norm,
        closed | one_hot,
        exact | params.is_greedy,
    )

"""Applies bias, penalties and masks to logits on the device, as `Shaper` does on the host.

Sparse, except for the masks of grammars: a row lists the tokens it changes, padded with -1, and no other token is
touched. The results equal the host's bit for bit. A row inside a draft also counts the draft tokens before it, which
only the device may know.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_PADDING = -1


@dataclass(frozen=True, slots=True)
class Adjustments:
    """What changes each row's logits. Ids are int64, distinct within a row of a list, and padded with -1."""

    bias_ids: Tensor  # [rows, num_biased]
    bias: Tensor  # float32 [rows, num_biased]
    seen_ids: Tensor  # [rows, num_seen]: in the output or, with a repetition penalty, in the prompt
    output_counts: Tensor  # int64 [rows, num_seen]: times in the output; 0 for tokens only in the prompt
    prefix: Tensor  # [rows, depth]: the draft tokens before the row, repeats included
    repetition_penalty: Tensor  # float32 [rows]; 1: off
    presence_penalty: Tensor  # float32 [rows]
    frequency_penalty: Tensor  # float32 [rows]
    stop_ids: Tensor  # [rows, num_stops]
    num_forbidden: Tensor  # int64 [rows]: stop tokens are masked while fewer prefix tokens than this precede the row
    masks: Tensor | None = None  # int32 [rows, words]: a bit per token that a grammar allows, the lowest first


def adjust(logits: Tensor, adjustments: Adjustments) -> Tensor:
    """An adjusted copy."""
    a = adjustments
    x = logits.clone()
    _write(x, a.bias_ids, _values(x, a.bias_ids) + a.bias)
    ids, counts = _seen_with_prefix(a)
    _write(x, ids, _penalised(_values(x, ids), counts, a))
    forbids = (a.prefix != _PADDING).sum(dim=-1) < a.num_forbidden
    stops = torch.where(forbids[:, None], a.stop_ids, _PADDING)
    _write(x, stops, torch.full(stops.shape, -torch.inf, device=x.device))
    return x if a.masks is None else x.masked_fill_(~_members(a.masks, x.shape[1]), -torch.inf)


def _members(masks: Tensor, vocab_size: int) -> Tensor:
    """Which tokens each row allows, [rows, vocab_size]."""
    bits = masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=masks.device)
    return (bits & 1).bool().flatten(1)[:, :vocab_size]


def _seen_with_prefix(a: Adjustments) -> tuple[Tensor, Tensor]:
    """Distinct tokens before each row, [rows, num_seen + depth], and their counts in output and prefix."""
    prefix, depth = a.prefix, a.prefix.shape[1]
    again = a.seen_ids[:, :, None] == prefix[:, None, :]  # [rows, num_seen, depth]
    counts = a.output_counts + (again & (prefix != _PADDING)[:, None, :]).sum(dim=-1)
    equal = prefix[:, :, None] == prefix[:, None, :]
    earlier = torch.ones(depth, depth, dtype=torch.bool, device=prefix.device).tril(-1)
    is_new = ~again.any(dim=1) & ~(equal & earlier).any(dim=-1)
    ids = torch.cat([a.seen_ids, torch.where(is_new, prefix, _PADDING)], dim=1)
    return ids, torch.cat([counts, equal.sum(dim=-1)], dim=1)


def _penalised(values: Tensor, counts: Tensor, a: Adjustments) -> Tensor:
    repetition = a.repetition_penalty[:, None]
    values = torch.where(values > 0, values / repetition, values * repetition)
    penalty = a.presence_penalty[:, None] + a.frequency_penalty[:, None] * counts.float()
    return torch.where(counts > 0, values - penalty, values)


def _values(x: Tensor, ids: Tensor) -> Tensor:
    return x.gather(1, ids.clamp(min=0))


def _write(x: Tensor, ids: Tensor, values: Tensor) -> None:
    """x[row, id] = value in place. A padded entry repeats another write of its row, or changes nothing."""
    if ids.shape[1] == 0:
        return
    is_real = ids != _PADDING
    first = is_real.long().argmax(dim=-1, keepdim=True)
    any_id = ids.gather(1, first).clamp(min=0)
    any_value = torch.where(is_real.any(dim=-1, keepdim=True), values.gather(1, first), x.gather(1, any_id))
    x.scatter_(1, torch.where(is_real, ids, any_id), torch.where(is_real, values, any_value))

"""Begins the next draft behind a verification, before the host knows what that accepts.

    device   verify k | draft k+1 |              | verify k+1 | draft k+2 | ..
    host              | commit k, schedule, decide |

Between two steps the host commits tokens, schedules and decides, and the device would wait for it. A head's next draft
needs nothing from the host: the accepted tokens are on the device. So it runs in that gap. If the plan is as expected,
its tokens are there when they are asked for; if not, they are dropped, and the gap would have been idle anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.backends.torch.execution.step import PADDING, StepInputs
from outpace.backends.torch.sampling.noise import keys
from outpace.decoding.randomness import Purpose

UNUSED = -1  # instead of the number of drafted tokens, for a row that verifies nothing
SEEDS, POSITIONS = 0, 1  # fields of the words of draws


@dataclass(frozen=True, slots=True)
class Verified:
    """A launched verification of drafts, by row."""

    first_lines: list[int]  # of the target's tokens
    counts: list[int]  # drafted tokens
    drafted: Tensor  # int32 [depth, rows]
    own: Tensor  # int32 [2, lines]: the target's own tokens, which `match` compares
    found: Tensor | None  # int64 [rows, 3] of a `RejectionPass`, which decides instead
    vocab_size: int


def follow(
    verified: Verified,
    lines: Tensor,
    first: StepInputs,
    later: StepInputs,
    draw_words: Tensor,
    fed: Tensor,
    *,
    is_independent: bool,
) -> None:
    """Turn a draft loop's words into those of the draft after the accepted tokens.

    `lines` [2, rows] are the first lines and counts on the device. The words hold, for every row, the first position
    that may be accepted; `fed` [2, rows] receives the number of accepted draft tokens, and the token after them.
    """
    if fed.is_cuda:
        from outpace.backends.torch.kernels import following

        following.follow(verified, lines, first, later, draw_words, fed, is_independent)
        return
    width, (first_lines, counts) = first.shape.max_row_tokens, lines.long()
    is_used = counts >= 0
    rows = torch.arange(len(counts))[is_used]
    place, counts, first_lines = torch.arange(width), counts[rows], first_lines[rows]
    drafted = torch.nn.functional.pad(verified.drafted.T.long(), (0, width - len(verified.drafted)))[rows]
    if verified.found is not None:
        accepted, last = verified.found[rows, 0], verified.found[rows, 1]
    else:
        own = verified.own[0].long()[first_lines[:, None] + torch.minimum(place, counts[:, None])]
        is_right = (own == drafted) & (place < counts[:, None])
        accepted = is_right.long().cumprod(dim=1).sum(dim=1)
        last = own.gather(1, accepted[:, None])[:, 0]
    last = last.clamp(max=verified.vocab_size - 1)  # the size itself means no token: logits were NaN
    tokens = torch.where(place < accepted[:, None], drafted, 0)
    tokens = torch.where(place == accepted[:, None], last[:, None], tokens)
    starts = first.positions.view(-1, width)[rows, 0].long()
    ends = starts + accepted + 1
    is_fed = place <= accepted[:, None]
    first.tokens.view(-1, width)[rows] = tokens.int()
    first.positions.view(-1, width)[rows] = torch.where(is_fed, starts[:, None] + place, PADDING).int()
    first.lengths[rows] = (accepted + 1).int()
    first.outputs[rows] = (rows * width + accepted).int()
    first.contexts[rows] = later.contexts[rows] = ends.int()
    later.positions[rows] = (ends - 1).int()
    draw_words[POSITIONS, rows] = ends
    if is_independent:
        draw_words[SEEDS, rows] = keys(draw_words[SEEDS, rows], Purpose.DRAFT, ends)
    fed[:, rows] = torch.stack([accepted, last]).int()

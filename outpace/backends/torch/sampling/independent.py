"""Drafts that are drawn independently of the target's noise, for verification by rejection (`rejection.py`).

For unseeded requests this accepts more than comparing tokens drawn with shared noise: per token 1 - TV instead of
little more than (1 - TV) / (1 + TV), where TV is the distance of the two distributions. The distributions stay on the
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outpace.config import MAX_DEPTH
from outpace.core import Request
from outpace.decoding.randomness import Purpose, key
from outpace.decoding.verification import matches_own_tokens

_MAX_KEPT = 256  # distributions of one step's drafts that are kept: 131 MB for a vocabulary of 128,000 tokens


def max_kept(max_rows: int) -> int:
    """Distributions of one step's drafts that are kept; a larger batch is drafted with the target's noise."""
    return min(_MAX_KEPT, MAX_DEPTH * max_rows)


def draws_independently(requests: Sequence[Request]) -> bool:
    """Whether a batch's drafts are drawn independently: some request is verified by rejection, and none needs the
    target's noise, or its logits on the host."""
    sampled = [request for request in requests if not request.params.is_greedy]
    return bool(sampled) and not any(
        matches_own_tokens(request.params) or request.shaper.may_adjust or request.params.logprobs is not None
        for request in sampled
    )


def draft_seed(request: Request) -> int:
    """The seed of one draft. The position where it begins is part of it, as in `verification.Dice`."""
    return key(request.seed, Purpose.DRAFT, len(request.tokens))


@dataclass(frozen=True, slots=True)
class DeviceProbs(Sequence[NDArray[np.float32]]):
    """What the tokens of one draft were drawn from; valid until the next draft."""

    buffer: Tensor  # [rows, depth, vocab]
    row: int
    length: int

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, at: int) -> NDArray[np.float32]: ...

    @overload
    def __getitem__(self, at: slice) -> DeviceProbs: ...

    def __getitem__(self, at: int | slice) -> NDArray[np.float32] | DeviceProbs:
        if isinstance(at, slice):
            begin, end, step = at.indices(self.length)
            assert begin == 0 and step == 1, "only the begin of a draft can be kept"
            return DeviceProbs(self.buffer, self.row, end)
        found: NDArray[np.float32] = self.tensor[at].cpu().numpy()
        return found

    @property
    def tensor(self) -> Tensor:
        return self.buffer[self.row, : self.length]

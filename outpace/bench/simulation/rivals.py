"""The policies of other engines: fixed depths, a table by batch size, an average per bucket, permanent switch-off.

Each chooses one depth for the whole batch and takes no time to decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from outpace.bench.simulation.deciders import make_drafts
from outpace.bench.simulation.proposers import MODEL, TEXT, Running
from outpace.core import StepStats
from outpace.speculation.policy.state import Choice, Outcome
from outpace.speculation.proposers.base import DraftAsk, NoDraft


class Rival(Protocol):
    name: str

    def depth(self, batch_size: int) -> int: ...

    def observe(self, batch_size: int, num_drafts: int, num_drafted: int, num_accepted: int) -> None: ...


class Fixed:
    """`--num-speculative-tokens K`, as most servers run. K = 0 is plain decoding."""

    def __init__(self, depth: int) -> None:
        self.name = f"fixed-{depth}" if depth else "plain"
        self._depth = depth

    def depth(self, batch_size: int) -> int:
        return self._depth

    def observe(self, batch_size: int, num_drafts: int, num_drafted: int, num_accepted: int) -> None:
        pass


class TableByBatch(Fixed):
    """A hand-written table: the larger the batch, the smaller the depth."""

    TABLE = ((4, 5), (16, 3), (32, 2), (64, 1))

    def __init__(self) -> None:
        super().__init__(0)
        self.name = "table-by-batch"

    def depth(self, batch_size: int) -> int:
        return next((depth for limit, depth in self.TABLE if batch_size <= limit), 0)


class AveragePerBucket:
    """The smoothed mean accepted length of each bucket of batch sizes sets its depth, at least 1."""

    name = "average-per-bucket"
    CANDIDATES = (1, 3, 7)
    SMOOTHING = 0.2

    def __init__(self) -> None:
        self._accepted: dict[int, float] = {}

    def _bucket(self, batch_size: int) -> int:
        return batch_size.bit_length()

    def depth(self, batch_size: int) -> int:
        mean = self._accepted.get(self._bucket(batch_size), 2.0)
        return next((depth for depth in self.CANDIDATES if depth >= mean + 0.5), self.CANDIDATES[-1])

    def observe(self, batch_size: int, num_drafts: int, num_drafted: int, num_accepted: int) -> None:
        if num_drafts:
            bucket = self._bucket(batch_size)
            known = self._accepted.get(bucket, 2.0)
            self._accepted[bucket] = known + self.SMOOTHING * (num_accepted / num_drafts - known)


class SwitchOff:
    """A fixed depth until the acceptance of a window falls below a threshold; then plain decoding to the end."""

    name = "switch-off"
    DEPTH, WINDOW, THRESHOLD = 4, 200, 0.4

    def __init__(self) -> None:
        self._drafted = self._accepted = 0
        self._is_off = False

    def depth(self, batch_size: int) -> int:
        return 0 if self._is_off else self.DEPTH

    def observe(self, batch_size: int, num_drafts: int, num_drafted: int, num_accepted: int) -> None:
        self._drafted += num_drafted
        self._accepted += num_accepted
        if self._drafted >= self.WINDOW:
            self._is_off = self._is_off or self._accepted < self.THRESHOLD * self._drafted
            self._drafted = self._accepted = 0


FIXED_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 12)


def all_rivals() -> list[Rival]:
    return [*(Fixed(depth) for depth in FIXED_DEPTHS), TableByBatch(), AveragePerBucket(), SwitchOff()]


class FixedDecider:
    """Runs a rival with the draft model if there is one, else with lookups; the depth is the same for all requests."""

    estimated_speedup: float | None = None

    def __init__(self, rival: Rival, proposers: Mapping[str, NoDraft]) -> None:
        self.name = rival.name
        self._rival, self._proposers = rival, proposers

    def choose(self, running: list[Running], context: float, stats: StepStats) -> list[Choice]:
        depth = self._rival.depth(len(running))
        choices = []
        for item in running:
            room = min(depth, item.request.max_useful_depth)
            if not room:
                choices.append(Choice.plain())
            elif MODEL in self._proposers:
                choices.append(Choice(MODEL, room, ask=DraftAsk(item.request, room)))
            else:
                [draft] = self._proposers[TEXT].propose([DraftAsk(item.request, room)])
                choices.append(Choice(TEXT, len(draft.tokens), draft=draft))
        make_drafts(choices, self._proposers)
        return choices

    def own_seconds(self, choices: Sequence[Choice]) -> float:
        return 0.0

    def learn(self, outcomes: Sequence[Outcome], stats: StepStats, num_tokens: int, context: float) -> None:
        verdicts = [outcome.verdict for outcome in outcomes]
        self._rival.observe(
            len(outcomes),
            sum(verdict.num_drafted > 0 for verdict in verdicts),
            sum(verdict.num_drafted for verdict in verdicts),
            sum(verdict.num_accepted for verdict in verdicts),
        )

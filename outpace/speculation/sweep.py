"""The arithmetic of a batch: which draft tokens to take, so that expected tokens per second are most.

Whatever the number of draft tokens, the best ones to take are those most likely to survive; a token's survival never
exceeds that of the one before it in its draft, so taking the likeliest never takes one without those before it. What
remains is how many, and every count is looked at, because costs have steps in them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(slots=True)
class Table:
    """Seconds of a step by number of draft tokens taken, and what it says without any."""

    seconds: Sequence[float]
    expected: float  # tokens said, before any draft token is taken
    token_seconds: float = 0.0  # of host work for each token said
    before: float = 0.0  # seconds of what has to be done first

    @property
    def plain_speed(self) -> float:
        return self.expected / self.total(0, self.expected)

    def total(self, count: int, expected: float) -> float:
        return self.before + self.seconds[count] + self.token_seconds * expected

    def after(self, seconds: float) -> Table:
        """The same where something has to be done first."""
        return Table(self.seconds, self.expected, self.token_seconds, self.before + seconds)


class Plan:
    """So many of the draft tokens, the likeliest first; rows can then be given more than their share.

    `survival` is, for each row, the chance that each of its draft tokens is reached and accepted; never rising.
    """

    def __init__(self, table: Table, survival: Sequence[Sequence[float]]) -> None:
        self._table = table
        self._survival = survival
        # Draft tokens each row is expected to have accepted, by its depth.
        self._totals = [list(accumulate(chances, initial=0.0)) for chances in survival]
        slots = [(-chance, row) for row, chances in enumerate(survival) for chance in chances if chance > 0.0]
        if len(survival) > 1:
            slots.sort()
        self._slots = slots[: len(table.seconds) - 1]
        self.drafted: list[bool] | None = None  # rows a draft model drafts for,
        self.num_passes = 0  # and how deep: that is paid whatever is taken of it;
        self.reading_seconds = 0.0  # of texts it has to read first, this step's share
        self._take(self._best(float("inf"), len(self._slots)))

    def _best(self, seconds: float, most: int) -> int:
        """The count, up to `most`, that is fastest among those that take no longer than this."""
        table, expected = self._table, self._table.expected
        by_count, before, token_seconds = table.seconds, table.before, table.token_seconds
        best, best_speed = 0, table.plain_speed
        for count, (chance, _) in enumerate(self._slots[:most], 1):
            expected -= chance
            taken = before + by_count[count] + token_seconds * expected
            if expected > best_speed * taken and taken <= seconds:
                best, best_speed = count, expected / taken
        return best

    def _take(self, count: int) -> None:
        self.count = count
        depths = [0] * len(self._survival)
        for _, row in self._slots[:count]:
            depths[row] += 1
        self._settle(depths)

    def _settle(self, depths: list[int]) -> None:
        self.depths = depths
        self.gains = [totals[depth] for totals, depth in zip(self._totals, depths, strict=True)]
        expected = self._table.expected + sum(self.gains)
        self.seconds = self._table.total(sum(depths), expected)
        self.speed = expected / self.seconds

    @property
    def most_gains(self) -> list[float]:
        """The same, were each row given all it can use."""
        return [totals[-1] for totals in self._totals]

    @property
    def slot_seconds(self) -> float:
        """What the last draft tokens taken cost, each."""
        last = min(self.count, len(self._survival))
        if not last:
            return 0.0
        return max(0.0, self._table.seconds[self.count] - self._table.seconds[self.count - last]) / last

    def raise_to(self, gains: dict[int, float]) -> bool:
        """Give these rows the depth at which they may expect so many accepted tokens; False if there is no room."""
        depths = list(self.depths)
        for row, gain in gains.items():
            totals = self._totals[row]
            depths[row] = max(depths[row], min(bisect_left(totals, gain), len(totals) - 1))
        if sum(depths) >= len(self._table.seconds):
            return False
        self._settle(depths)
        return True

    def within(self, seconds: float) -> None:
        """The best number of tokens that takes no longer than this, and fewer than now; zero where there is none."""
        self._take(self._best(seconds, self.count - 1) if self.count else 0)


def survival(chances: Sequence[float]) -> list[float]:
    """From the chance of each token, given those before it, to its chance of being reached and accepted."""
    out, product = [], 1.0
    for chance in chances:
        product *= chance
        out.append(product)
    return out


# Tokens that are accepted of a draft as good as one can hope for, nine right of ten, by how many are drafted.
GOOD_DRAFT = {depth: sum(survival([0.9] * depth)) for depth in (1, 2, 4, 8)}

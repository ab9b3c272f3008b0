"""The arithmetic of a batch: which draft tokens to take, so that expected tokens per second are most.

Whatever the number of draft tokens, the best ones to take are those most likely to survive; a token's survival never
exceeds that of the one before it in its draft, so taking the likeliest never takes one without those before it. What
remains is how many, and every count is looked at, because costs have steps in them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Table:
    """Seconds of a step by number of draft tokens taken, and what it says without any."""

    seconds: Floats
    expected: float  # tokens said, before any draft token is taken
    token_seconds: float = 0.0  # of host work for each token said

    @property
    def plain_speed(self) -> float:
        return self.expected / (float(self.seconds[0]) + self.token_seconds * self.expected)

    def after(self, seconds: float) -> Table:
        """The same where something has to be done first."""
        return Table(self.seconds + seconds, self.expected, self.token_seconds)


class Plan:
    """So many of the draft tokens, the likeliest first; rows can then be given more than their share."""

    def __init__(self, table: Table, survival: Floats) -> None:
        self._table = table
        self._width = survival.shape[1]
        self._gains = np.cumsum(survival, axis=1)  # accepted tokens to expect of a row, by its depth less one
        self._most = np.count_nonzero(survival > 0.0, axis=1)
        flat = survival.ravel()
        order = np.argsort(-flat, kind="stable")
        num = min(int(np.count_nonzero(flat > 0.0)), table.seconds.size - 1)
        self._order = order[:num]
        expected = table.expected + np.concatenate([[0.0], np.cumsum(flat[self._order])])
        self._seconds = table.seconds[: num + 1] + table.token_seconds * expected
        self._speeds = expected / self._seconds
        self.drafted: NDArray[np.bool_] | None = None  # rows a draft model drafts for
        self._take(int(np.argmax(self._speeds)))

    def _take(self, count: int) -> None:
        self.count = count
        self.depths = np.bincount(self._order[:count] // self._width, minlength=self._most.size)
        self.seconds = float(self._seconds[count])
        self.speed = float(self._speeds[count])

    @property
    def gains(self) -> Floats:
        """Draft tokens each row is expected to have accepted."""
        at = np.maximum(self.depths - 1, 0)
        out: Floats = np.where(self.depths > 0, self._gains[np.arange(at.size), at], 0.0)
        return out

    @property
    def most_gains(self) -> Floats:
        """The same, were each row given all it can use."""
        out: Floats = self._gains[:, -1]
        return out

    @property
    def slot_seconds(self) -> float:
        """What the last draft tokens taken cost, each."""
        rows = min(self.count, self._most.size)
        if not rows:
            return 0.0
        last: float = float(self._seconds[self.count]) - float(self._seconds[self.count - rows])
        return last / rows if last > 0 else 0.0

    def raise_to(self, rows: NDArray[np.bool_], gains: Floats) -> bool:
        """Give these rows the depth at which they may expect so many accepted tokens; False if there is no room."""
        wanted = 1 + np.count_nonzero(self._gains < gains[:, None], axis=1)
        depths = np.where(rows, np.maximum(self.depths, np.minimum(wanted, self._most)), self.depths)
        total = int(depths.sum())
        if total >= self._table.seconds.size:
            return False
        self.depths = depths
        expected = self._table.expected + float(self.gains.sum())
        self.seconds = float(self._table.seconds[total]) + self._table.token_seconds * expected
        self.speed = expected / self.seconds
        return True

    def within(self, seconds: float) -> None:
        """The best number of tokens that takes no longer than this, and fewer than now; zero where there is none."""
        allowed = np.flatnonzero(self._seconds[: self.count] <= seconds)
        self._take(int(allowed[np.argmax(self._speeds[allowed])]) if allowed.size else 0)


def sweep(table: Table, survival: Floats) -> Plan:
    """`survival` is [rows, positions]: the chance that a draft token is reached and accepted, 0 where there is none."""
    return Plan(table, survival)

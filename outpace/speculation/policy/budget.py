"""Limits what exploration may cost.

A `Budget` keeps how much time the engine or one request may still lose. A `Backoff` keeps when something that failed
may be tried again.
"""

from __future__ import annotations

from outpace.speculation.policy.tunables import TUNABLES


class Budget:
    """A starting grant, plus a share of the plain time so far, plus gains, minus losses; limited to `most_balance`.

    The totals of spent and plain seconds serve only to report `estimated_speedup`.
    """

    __slots__ = ("_allowed_share", "_deferred", "balance", "plain_seconds", "spent_seconds")

    def __init__(self, grant: float, allowed_share: float) -> None:
        """`allowed_share` of the plain time may be lost."""
        self._allowed_share = allowed_share
        self.balance = grant if allowed_share else 0.0
        """Plain steps that may still be lost; below zero, more was lost than is allowed."""
        self._deferred = 0.0  # seconds of catching up that are not charged yet
        self.spent_seconds = 0.0
        self.plain_seconds = 0.0

    def earned(self, plain: float) -> float:
        """Seconds that may be lost for this much plain time."""
        return self._allowed_share * plain

    def steps_to_earn(self, plain_steps: float) -> int:
        """The number of plain steps in which the budget earns `plain_steps`."""
        return 1 + int(max(0.0, plain_steps) / self._allowed_share) if self._allowed_share else 1 << 60

    def book(
        self, spent: float, plain: float, plain_step: float, *, excused: float = 0.0, invested: float = 0.0
    ) -> None:
        """`spent` seconds passed, where plain decoding of the same tokens would have taken `plain`.

        `excused` seconds were not caused by speculation and are not charged. `invested` seconds serve later steps and
        are charged gradually.
        """
        self.spent_seconds += spent
        self.plain_seconds += plain
        earned = self._allowed_share * plain + plain - spent + excused + invested
        self._deferred += invested
        if self._deferred:
            charged = self._deferred * min(1.0, plain / plain_step / TUNABLES.payback_steps)
            self._deferred -= charged
            earned -= charged
        balance, most = self.balance + earned / plain_step, TUNABLES.most_balance
        self.balance = balance if balance < most else most

    @property
    def estimated_speedup(self) -> float | None:
        """Over everything since the start; None before the first step."""
        return self.plain_seconds / self.spent_seconds if self.spent_seconds > 0 else None


class Backoff:
    """After failures, waits 1, 2, 4, ... steps; a success ends the waiting.

    A wait ends at a multiple of its length, so equally long waits end in the same step.
    """

    __slots__ = ("_longest", "due", "interval")

    def __init__(self, longest: int = TUNABLES.longest_backoff) -> None:
        self._longest = longest
        self.due = 0  # the step in which it may be tried again
        self.interval = 1

    def fail(self, step: int) -> None:
        self.due = (step // self.interval + 1) * self.interval
        self.interval = min(2 * self.interval, self._longest)

    def wait(self, step: int, num_steps: int) -> None:
        """Wait for at least `num_steps`, without counting a failure."""
        self.due = max(self.due, step + num_steps)

    def succeed(self) -> None:
        self.due, self.interval = 0, 1

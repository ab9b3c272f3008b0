"""Limits what exploration may cost.

A `Budget` keeps how many plain steps the engine, or one request, may still lose. A `Backoff` keeps when something that
failed may be tried again.
"""

from __future__ import annotations

from outpace.speculation.policy.tunables import TUNABLES


class Budget:
    """A starting grant, plus a share of the plain steps so far, plus gains, minus losses; limited to `most_balance`."""

    __slots__ = ("_share", "balance")

    def __init__(self, grant: float, share: float) -> None:
        """`share` of the plain steps may be lost; with 0 nothing may."""
        self._share = share
        self.balance = grant if share else 0.0
        """Plain steps that may still be lost; below zero, more was lost than is allowed."""

    def earn(self, plain_steps: float) -> None:
        """So many plain steps have passed, or the time in which plain decoding would have made them."""
        balance, most = self.balance + self._share * plain_steps, TUNABLES.most_balance
        self.balance = balance if balance < most else most

    def book(self, lost: float) -> None:
        """`lost` plain steps; a gain is a negative loss."""
        balance, most = self.balance - lost, TUNABLES.most_balance
        self.balance = balance if balance < most else most


class Backoff:
    """After failures, waits 1, 2, 4, ... steps; a success ends the waiting.

    A wait ends at a multiple of its length, so equally long waits end in the same step.
    """

    __slots__ = ("due", "interval")

    def __init__(self) -> None:
        self.due = 0  # the step in which it may be tried again
        self.interval = 1

    def fail(self, step: int) -> None:
        self.due = (step // self.interval + 1) * self.interval
        self.interval = min(2 * self.interval, TUNABLES.longest_wait)

    def succeed(self) -> None:
        self.due, self.interval = 0, 1

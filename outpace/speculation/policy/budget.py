"""What finding out may cost: a budget for the engine and one for each request; and how what failed is tried again."""

from __future__ import annotations

from outpace.speculation.policy.tunables import TUNABLES


class Budget:
    """A starting grant, plus a share of the plain time so far, less what was lost.

    Gains count too, up to a limit. Both totals are kept for people: `estimated_speedup` is what was gained in all.
    """

    __slots__ = ("_allowed_share", "_balance", "_grant", "_unpaid", "plain_seconds", "spent_seconds")

    def __init__(self, grant: float, allowed_loss: float) -> None:
        self._grant = grant if allowed_loss else 0.0  # plain steps
        self._allowed_share = TUNABLES.budget_share * allowed_loss
        self._balance: float | None = None  # plain steps; None before the first step
        self._unpaid = 0.0  # seconds of catching up that are not booked yet
        self.spent_seconds = 0.0
        self.plain_seconds = 0.0

    @property
    def balance(self) -> float:
        """Plain steps that may still be lost; below zero, more was lost than is allowed."""
        return self._grant if self._balance is None else self._balance

    def grant(self, plain_steps: float) -> None:
        """More may be lost from now on."""
        if self._grant:
            self._balance = min(self.balance + plain_steps, TUNABLES.most_balance)

    def steps_to_earn(self, plain_steps: float) -> int:
        """Plain steps until the budget has handed out so much."""
        return 1 + int(max(0.0, plain_steps) / self._allowed_share) if self._allowed_share else 1 << 60

    def book(
        self, spent: float, plain: float, plain_step: float, *, excused: float = 0.0, invested: float = 0.0
    ) -> None:
        """`spent` seconds passed, where plain decoding of the same tokens would have taken `plain`.

        `excused` is no fault of speculation: it lowers no balance. `invested` serves later steps: it lowers the balance
        little by little, as they pass.
        """
        self.spent_seconds += spent
        self.plain_seconds += plain
        self._unpaid += invested
        paid = self._unpaid * min(1.0, plain / plain_step / TUNABLES.payback_steps)
        self._unpaid -= paid
        earned = self._allowed_share * plain + plain - spent + excused + invested - paid
        self._balance = min(self.balance + earned / plain_step, TUNABLES.most_balance)

    @property
    def estimated_speedup(self) -> float | None:
        """Over everything since the start; None before the first step."""
        return self.plain_seconds / self.spent_seconds if self.spent_seconds > 0 else None


class Backoff:
    """What failed waits for 1, 2, 4, ... steps; what succeeds need not wait.

    Waits end at multiples of their length: what waits equally long is tried in the same step.
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
        """Neither failed nor succeeded: not before so many steps."""
        self.due = max(self.due, step + num_steps)

    def succeed(self) -> None:
        self.due, self.interval = 0, 1

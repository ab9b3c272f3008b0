"""Time spent against what plain decoding of the same tokens would have cost.

A plain step costs what it costs: only the policy's own time is a loss there. A step with drafts is compared with the
measured cost of plain steps. What a draft model spends on reading a text it had not followed is an investment: it is
written off over the tokens it is expected to serve, and at once where the request ends before.
"""

from __future__ import annotations

_MEMORY_STEPS = 2000.0  # older steps fade: what was lost an hour ago forbids nothing today
_CAUTION = 0.4  # of the allowed loss; the rest is for what the books do not see, such as costs measured a little wrong
_CREDIT_STEPS = 1.0  # plain steps that may be lost in finding out, before anything is known, and
_CREDIT_ALONE = 2.0  # more where a request runs alone: in a batch, all lose by what is tried for one


class Ledger:
    def __init__(self, allowed_loss: float) -> None:
        self._allowed_loss = allowed_loss
        self.spent_seconds = 0.0
        self.plain_seconds = 0.0
        self._recent_spent = 0.0
        self._recent_plain = 0.0
        self._step_seconds = 0.0  # the latest step, had it been plain
        self.num_running = 1

    def add(
        self,
        spent: float,
        plain: float,
        step_seconds: float,
        *,
        invested: float = 0.0,
        paid: float = 0.0,
        excused: float = 0.0,
        num_steps: int = 1,
    ) -> None:
        """A step, or several, took `spent` seconds; saying the same tokens plainly would have taken `plain`, and one
        plain step `step_seconds`.

        Of the time spent, `invested` serves later steps too; `paid` is this step's share of earlier investments;
        `excused` is no fault of speculation: it forbids nothing.
        """
        self.spent_seconds += spent
        self.plain_seconds += plain
        fade = (1.0 - 1.0 / _MEMORY_STEPS) ** num_steps
        self._recent_spent = self._recent_spent * fade + spent - invested + paid - excused
        self._recent_plain = self._recent_plain * fade + plain
        self._step_seconds = step_seconds

    def write_off(self, seconds: float) -> None:
        """An investment that will serve nobody any more."""
        self._recent_spent += seconds

    @property
    def is_in_debt(self) -> bool:
        """More was lost lately than is allowed: what may go on until that is made good is in `books.py`."""
        return self._recent_spent - self._recent_plain > self._allowed_seconds

    def headroom(self, step_seconds: float) -> float:
        """Seconds that may still be lost: nothing is drafted that would cost more were none of it accepted.

        `step_seconds` is what a plain step is believed to take, before any has been decoded.
        """
        if not self._step_seconds:
            self._step_seconds = step_seconds
        return max(0.0, self._allowed_seconds - (self._recent_spent - self._recent_plain))

    @property
    def _allowed_seconds(self) -> float:
        if not self._allowed_loss:
            return 0.0
        credit = _CREDIT_STEPS + _CREDIT_ALONE / self.num_running
        return _CAUTION * self._allowed_loss * self._recent_plain + credit * self._step_seconds

    @property
    def estimated_speedup(self) -> float | None:
        """Over everything since the start; None before the first step."""
        return self.plain_seconds / self.spent_seconds if self.spent_seconds > 0 else None

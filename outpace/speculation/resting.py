"""Steps without a decision: while nothing changes, a few are plain without looking whether anything could be drafted.

There is a rest where nobody is to be asked about, where again and again some would lose by what the others gain, and
where deciding has lately cost more than drafts have saved: it is paid out of what it saves and a small share of the
time. A rest ends when the batch changes or after a few steps; then it is booked.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from outpace.core import Request
from outpace.speculation.asking import Asking
from outpace.speculation.books import Books
from outpace.speculation.costs import Costs
from outpace.speculation.probing import Probes
from outpace.speculation.seats import Seat, Step

_LONGEST = 8  # steps, where there is nobody to ask about, or
_VETOES = 3  # steps in a row with a plan that some would lose by, until there is a rest of one step, then of more,
_AFTER_VETOES = 3  # up to so many
_FROM_MODEL = 3  # where a draft model was weighed and does not pay
_SHARE = 0.006  # of the time may go into deciding where that saves nothing
_MOST = 3.0  # plain steps that can be laid by for it, and are there at first
_NEWCOMER = 0.6  # plain steps that each new request brings, shared by all that run: its text may be of another kind


class Resting:
    def __init__(self, costs: Costs, asking: Asking, probes: Probes, books: Books) -> None:
        self._costs = costs
        self._asking = asking
        self._probes = probes
        self._books = books
        self._requests: list[Request] = []
        self._num_left = 0
        self._purse: float | None = None  # seconds that may go into deciding
        self._num_new = 0  # requests that have come since it was last paid from
        self._num_vetoed = 0  # steps in a row with a plan that some would have lost by
        self.is_now = False  # the step that is under way

    def begin(self, step: Step, own_seconds: float, saved: float, *, has_drafts: bool) -> None:
        """After a step that was decided in `own_seconds`, and whose drafts saved so much beside that, or lost it."""
        num_steps = self._pay(step, own_seconds, saved)
        if not num_steps and not has_drafts:
            weighed = [step.seats[i] for i in step.weighed]
            num_steps = self._until_next(weighed, step.number, step.plain_seconds)
            if step.is_vetoed and self._probes.is_over:
                self._num_vetoed += 1
                num_steps = max(num_steps, min(_AFTER_VETOES, 1 << self._num_vetoed >> _VETOES))
        if has_drafts:
            self._num_vetoed = 0
        if num_steps > 0:
            self._requests, self._num_left = list(step.requests), num_steps

    def begin_now(self, requests: Sequence[Request], seats: Sequence[Seat], number: int, plain_seconds: float) -> None:
        """With this step, because there is nobody to ask about; unless a guess is to be compared with what is said."""
        if self._books.forbid_guesses or not any(seat.unused for seat in seats):
            num_left = self._until_next(seats, number, plain_seconds)
            self._requests, self._num_left, self.is_now = list(requests), num_left, True

    def welcome(self) -> None:
        """A request has come."""
        self._num_new += 1

    def _pay(self, step: Step, own_seconds: float, saved: float) -> int:
        """Pay for the decision; returns how many steps it takes until there is something to pay the next with."""
        plain_seconds = step.plain_seconds
        share, most = self._books.thrift * _SHARE * plain_seconds, _MOST * plain_seconds
        purse = most if self._purse is None else self._purse
        purse += self._num_new * self._asking.worth * _NEWCOMER * plain_seconds / step.rows
        self._num_new = 0
        saved = max(-plain_seconds, min(plain_seconds, saved))  # one step that was disturbed says no more
        self._purse = max(-_LONGEST * share, min(most, purse + share + saved - own_seconds))
        return max(0, ceil(-self._purse / share)) if share else 0

    def _until_next(self, seats: Sequence[Seat], number: int, plain_seconds: float) -> int:
        """For how many steps there is nobody to ask about."""
        num_steps = self._asking.steps_until_next(
            seats, number, plain_seconds, in_debt=self._books.forbid_guesses, thrift=self._books.thrift
        )
        by_model = self._costs.draft is not None and any(seat.may_draft for seat in seats)
        return min(num_steps, _FROM_MODEL if by_model else _LONGEST)

    def goes_on(self, requests: Sequence[Request]) -> bool:
        """Whether this step belongs to a rest."""
        self.is_now = self._num_left > 0 and requests == self._requests
        if self.is_now:
            self._num_left -= 1
        else:
            self.end()
        return self.is_now

    def end(self) -> None:
        """Book what has gathered."""
        if self._requests:
            num_steps, plain_seconds = self._books.end_rest(self._requests)
            self._requests, self._num_left, self.is_now = [], 0, False
            if num_steps:
                thrift = self._books.thrift
                self._asking.save(plain_seconds, num_steps, thrift=thrift)
                self._probes.save(plain_seconds, num_steps, thrift=thrift)
                if self._purse is not None:
                    self._purse += num_steps * thrift * _SHARE * plain_seconds

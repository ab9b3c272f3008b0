"""Steps without a decision: while nothing changes, a few are plain without looking whether anything could be drafted.

A rest ends when somebody is to be asked about, when the batch changes, or after a few steps; then it is booked.
"""

from __future__ import annotations

from collections.abc import Sequence

from outpace.core import Request
from outpace.speculation.asking import Asking
from outpace.speculation.books import Books
from outpace.speculation.costs import Costs
from outpace.speculation.ledger import Ledger
from outpace.speculation.probing import Probes
from outpace.speculation.seats import Step

_LONGEST = 8  # steps, where there is nobody to ask about, or
_FROM_MODEL = 3  # where a draft model was weighed and does not pay


class Resting:
    def __init__(self, costs: Costs, asking: Asking, probes: Probes, books: Books, ledger: Ledger) -> None:
        self._costs = costs
        self._asking = asking
        self._probes = probes
        self._books = books
        self._ledger = ledger
        self._requests: list[Request] = []
        self._num_left = 0
        self.is_now = False  # the step that is under way

    def begin(self, step: Step) -> None:
        """After a step in which there was nothing to decide."""
        weighed = [step.seats[i] for i in step.weighed]
        num_steps = self._asking.steps_until_next(weighed, step.plain_seconds, in_debt=self._ledger.is_in_debt)
        by_model = self._costs.draft is not None and any(seat.may_draft for seat in weighed)
        num_steps = min(num_steps, _FROM_MODEL if by_model else _LONGEST)
        if num_steps > 0:
            self._requests, self._num_left = list(step.requests), num_steps

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
                self._asking.save(plain_seconds, num_steps)
                self._probes.save(plain_seconds, num_steps)

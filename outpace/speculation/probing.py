"""Finding out about a draft model: it drafts for a few requests although nothing says yet that this pays.

At first there is some time to spend on it, the more the more a good draft would bring; several requests are probed in
one step, because what is read for it is drafted for again if the draft proves good. Later, where it does not seem to
pay, one request is probed now and then.
"""

from __future__ import annotations

from collections.abc import Mapping

from outpace.speculation.acceptance_model import AcceptanceModel
from outpace.speculation.base import DraftAsk, Proposer
from outpace.speculation.costs import Costs
from outpace.speculation.drafting import DraftWeigher
from outpace.speculation.seats import NEURAL, Choice, Step
from outpace.speculation.sweep import GOOD_DRAFT

_SHARE = 0.003  # of the time spent decoding plainly is saved up for probes,
_SHARE_AT_FIRST = 0.008  # more of it until enough is known,
_GAIN = 0.1  # and of what speculation has saved
_MOST = 3.0  # plain steps that can be saved up
_ENOUGH = 4.0  # times what is needed to believe anything of a draft model at all
_LEAST_HOPE = 1.15  # times plain speed: where not even a good draft would gain so much, there is nothing to find out;
_START_PER_HOPE = 3.0  # else so many plain steps may be spent at first for each plain speed it would gain
_BEYOND = 1.1  # beyond this,
_MOST_START = 2.5  # and never more
_AT_ONCE = 0.75  # of what is there goes into one step
_OF_REQUEST = 0.025  # of the time a request is expected to take: no later probe costs it more
_EVERY = 32  # steps between two later probes of the same request: none is to pay for all
_DEPTH = 2


class Probes:
    def __init__(
        self,
        costs: Costs,
        acceptance: AcceptanceModel,
        drafting: DraftWeigher,
        proposers: Mapping[str, Proposer],
    ) -> None:
        self._costs = costs
        self._acceptance = acceptance
        self._drafting = drafting
        self._proposers = proposers
        self._seconds = 0.0  # saved up
        self._start: float | None = None  # seconds left of what there was at first

    @property
    def is_over(self) -> bool:
        """Beside other drafts there are probes only until enough is known."""
        return self._costs.draft is None or self._acceptance.evidence(NEURAL) >= _ENOUGH

    def save(self, plain_seconds: float, num_steps: int = 1, *, thrift: float) -> None:
        """Plain steps have passed."""
        share = thrift * (_SHARE if self.is_over else _SHARE_AT_FIRST)
        self._seconds = min(self._seconds + num_steps * share * plain_seconds, _MOST * plain_seconds)

    def share_in(self, saved: float) -> None:
        """A step with drafts has saved so much, or lost it."""
        self._seconds += _GAIN * max(0.0, saved)

    def probe(self, step: Step, choices: list[Choice], *, thrift: float) -> None:
        """Draft for those who are cheapest to draft for, where there is enough to pay for it."""
        if self._costs.draft is None:
            return
        self.save(step.plain_seconds, thrift=thrift)
        if self.is_over:
            self._start = 0.0
        elif self._start is None:
            num_steps = min(_START_PER_HOPE * (self._hope(step) - _BEYOND), _MOST_START)
            self._start = max(0.0, num_steps) * step.plain_seconds
        at_hand = self._seconds + (self._start or 0.0)
        if at_hand < self._costs.draft_seconds(1, 1, 1, step.context) or self._hope(step) < _LEAST_HOPE:
            return
        every = _EVERY if self.is_over else 1
        able = [
            i
            for i in self._drafting.able(step)
            if not choices[i].depth and step.number >= step.seats[i].probed_at + every
        ]
        if not able:
            return
        unread = sorted([(self._proposers[NEURAL].num_unread(step.requests[i]), i) for i in able])
        if self.is_over:
            of_request = step.plain_seconds * self._drafting.reading.expected_output(step.requests[unread[0][1]])
            rows, price = self._affordable(step, unread[:1], min(at_hand, _OF_REQUEST * of_request))
        else:
            most = self._drafting.reading.most_at_first(step)
            rows, price = self._affordable(step, unread, min(most, max(_AT_ONCE * at_hand, step.plain_seconds / 2)))
            if not rows:
                rows, price = self._affordable(step, unread[:1], min(most, at_hand))
        if not rows:
            return
        from_start = min(price, self._start or 0.0)
        self._start = (self._start or 0.0) - from_start
        self._seconds -= price - from_start
        step.is_probe = not any(choice.ask is not None for choice in choices)
        step.reason += "; a probe of the draft model"
        for i in rows:
            step.seats[i].probed_at = step.number
            depth = min(_DEPTH, self._drafting.room(step, i))
            choices[i] = Choice(NEURAL, depth, ask=DraftAsk(step.requests[i], depth))

    def _affordable(self, step: Step, unread: list[tuple[int, int]], seconds: float) -> tuple[list[int], float]:
        """As many of these requests, given with what is unread of them, as can be drafted for in this time."""
        taken, price, num_unread = list[int](), 0.0, 0
        verify = self._costs.target.by_tokens(step.rows, step.rows, step.rows + _DEPTH * len(unread), step.context)
        for num_rows, (more, i) in enumerate(unread, 1):
            num_unread += more
            slots = verify[_DEPTH * num_rows] - verify[0]
            needed = self._costs.draft_seconds(num_rows, num_unread, _DEPTH, step.context) + max(0.0, slots)
            if needed > seconds:
                break
            taken.append(i)
            price = needed
        return taken, price

    def _hope(self, step: Step) -> float:
        """What a good draft for everybody would gain, over plain decoding."""
        rows, costs = step.rows, self._costs
        best = 0.0
        for depth, accepted in GOOD_DRAFT.items():
            verify = costs.target.seconds(rows, rows * (1 + depth), step.context)
            host = costs.schedule_seconds + rows * (1.0 + accepted) * costs.judge_seconds
            seconds = verify + host + costs.draft_seconds(rows, rows, depth, step.context)
            best = max(best, (1.0 + accepted) / seconds)
        return best * step.plain_seconds

"""Finding out about a draft model that does not seem to pay: now and then it drafts for one request all the same."""

from __future__ import annotations

from collections.abc import Mapping

from outpace.speculation.acceptance_model import AcceptanceModel
from outpace.speculation.base import DraftAsk, Proposer
from outpace.speculation.costs import Costs
from outpace.speculation.drafting import DraftWeigher
from outpace.speculation.seats import NEURAL, Choice, Step

_SHARE = 0.003  # of the time spent decoding plainly is saved up for probes,
_GAIN = 0.1  # and of what speculation has saved
_START = 1.5  # plain steps that there are for it at first, until something is known
_MOST = 3.0  # plain steps that can be saved up
_OF_REQUEST = 0.025  # of the time a request is expected to take: no probe costs it more
_EVERY = 32  # steps between two probes of the same request: none is to pay for all
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
        """Beside other drafts there are probes only until something is known."""
        return self._costs.draft is None or self._acceptance.is_known(NEURAL)

    def save(self, plain_seconds: float, num_steps: int = 1) -> None:
        """Plain steps have passed."""
        self._seconds = min(self._seconds + num_steps * _SHARE * plain_seconds, _MOST * plain_seconds)
        if self._start is None:
            self._start = _START * plain_seconds

    def share_in(self, saved: float) -> None:
        """A step with drafts has saved so much, or lost it."""
        self._seconds += _GAIN * max(0.0, saved)

    def probe(self, step: Step, choices: list[Choice]) -> None:
        """Draft for the request that is cheapest to draft for, where enough was saved up to pay for it."""
        if self._costs.draft is None:
            return
        self.save(step.plain_seconds)
        is_known = self._acceptance.is_known(NEURAL)
        if is_known:
            self._start = 0.0
        at_hand = self._seconds + (self._start or 0.0)
        if at_hand < self._costs.draft_seconds(1, 1, 1, step.context) + step.slot_seconds:
            return
        every = _EVERY if is_known else 1
        rested = [i for i in self._drafting.able(step) if step.number >= step.seats[i].probed_at + every]
        able = [i for i in rested if not choices[i].depth]
        if not able:
            return
        unread = {i: self._proposers[NEURAL].num_unread(step.requests[i]) for i in able}
        i = min(able, key=unread.__getitem__)
        depth = min(_DEPTH, self._drafting.room(step, i))
        price = self._costs.draft_seconds(1, unread[i], depth, step.context) + depth * step.slot_seconds
        affordable = _OF_REQUEST * step.plain_seconds * self._drafting.expected_output(step.requests[i])
        if price <= at_hand and (price <= affordable or not is_known):
            from_start = min(price, self._start or 0.0)
            self._start = (self._start or 0.0) - from_start
            self._seconds -= price - from_start
            step.seats[i].probed_at = step.number
            step.reason += "; a probe of the draft model"
            choices[i] = Choice(NEURAL, depth, ask=DraftAsk(step.requests[i], depth))

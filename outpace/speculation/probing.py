"""Finding out about a draft model that does not seem to pay: now and then it drafts for one request all the same."""

from __future__ import annotations

from collections.abc import Mapping

from outpace.speculation.base import DraftAsk, Proposer
from outpace.speculation.costs import Costs
from outpace.speculation.drafting import DraftWeigher
from outpace.speculation.seats import NEURAL, Choice, Step

_SHARE = 0.004  # of the time spent decoding plainly is saved up for probes,
_GAIN = 0.1  # and of what speculation has saved
_MOST = 20.0  # plain steps that can be saved up
_DEPTH = 2


class Probes:
    def __init__(self, costs: Costs, drafting: DraftWeigher, proposers: Mapping[str, Proposer]) -> None:
        self._costs = costs
        self._drafting = drafting
        self._proposers = proposers
        self._seconds = 0.0  # saved up

    def save(self, plain_seconds: float, num_steps: int = 1) -> None:
        """Plain steps have passed."""
        self._seconds = min(self._seconds + num_steps * _SHARE * plain_seconds, _MOST * plain_seconds)

    def share_in(self, saved: float) -> None:
        """A step with drafts has saved so much, or lost it."""
        self._seconds += _GAIN * max(0.0, saved)

    def probe(self, step: Step, choices: list[Choice]) -> None:
        """Draft for the request that is cheapest to draft for, where enough was saved up to pay for it."""
        if self._costs.draft is None:
            return
        self.save(step.plain_seconds)
        if self._seconds < self._costs.draft_seconds(1, 1, 1, step.context) + step.slot_seconds:
            return
        able = self._drafting.able(step)
        if not able:
            return
        unread = {i: self._proposers[NEURAL].num_unread(step.requests[i]) for i in able}
        i = min(able, key=unread.__getitem__)
        depth = min(_DEPTH, self._drafting.room(step, i))
        price = self._costs.draft_seconds(1, unread[i], depth, step.context) + depth * step.slot_seconds
        if price <= self._seconds:
            self._seconds -= price
            step.reason += "; a probe of the draft model"
            choices[i] = Choice(NEURAL, depth, ask=DraftAsk(step.requests[i], depth))

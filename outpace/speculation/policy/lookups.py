"""Decides for which requests drafts are looked up in a step: a lookup takes time, too.

A request is looked up in every step while that has recently saved more time than it took. Otherwise it is tried at
doubling intervals, as long as the engine's budget covers the attempts. A request with little history uses the mean of
all requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from outpace.core import Draft
from outpace.decoding.acceptance import common_length
from outpace.speculation.costs.curves import Costs
from outpace.speculation.policy.budget import Budget
from outpace.speculation.policy.decision import Decision
from outpace.speculation.policy.planner import Situation
from outpace.speculation.policy.state import Mean, Outcome, RequestState
from outpace.speculation.policy.tunables import TUNABLES
from outpace.speculation.proposers.base import DraftAsk


class Lookups:
    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._usual = Mean()  # seconds saved per looked-up request

    def due(self, situation: Situation, budget: Budget) -> dict[str, list[DraftAsk]]:
        """The lookups of this step, by proposer. Attempts that `budget` does not cover wait."""
        asks: dict[str, list[DraftAsk]] = {}
        step, plain, spent = situation.step, situation.plain_seconds, 0.0
        for row in situation.auto:
            state, request = situation.states[row], situation.requests[row]
            if state.lookup.due > step:
                continue
            if state.lookup.due:
                spent += self._price(state) / plain
                if spent > budget.balance:
                    state.lookup.due = (step // TUNABLES.longest_wait + 1) * TUNABLES.longest_wait  # all together
                    continue
            depth = min(state.settings.max_depth, request.max_useful_depth)
            for name in state.settings.lookups:
                asks.setdefault(name, []).append(DraftAsk(request, depth))
        return asks

    def _price(self, state: RequestState) -> float:
        return sum([self._costs.drafts[name].lookup_seconds for name in state.settings.lookups])

    def learn(self, decision: Decision, outcomes: Sequence[Outcome]) -> None:
        """Learn how much time lookups saved, and when the requests are looked up again."""
        situation = decision.situation
        assert situation is not None
        step, states, own_seconds = decision.step, situation.states, situation.own_seconds / situation.rows
        if decision.is_refused and not decision.has_drafts:  # budgets do not allow any draft to be used now
            for row in decision.found:
                states[row].lookup.fail(step)
            return
        hit_seconds = situation.plain_seconds / situation.emitted - situation.token_seconds - situation.slot_seconds
        usual = self._usual.value
        for row, drafts in decision.found.items():
            saved = max(0.0, hit_seconds) * max([_hits(draft, outcomes[row]) for draft in drafts])
            state = states[row]
            state.saved.add(saved)
            self._usual.add(saved)
            if state.saved.shrunk(usual) >= self._price(state) + own_seconds:
                state.lookup.succeed()
                if outcomes[row].choice.draft is None:  # it would have paid, but it did not: the next one is an attempt
                    state.lookup.due = step + 1
            else:
                state.lookup.fail(step)


def _hits(draft: Draft, outcome: Outcome) -> int:
    """The tokens of this draft that were accepted or, if no draft was verified, would have been."""
    used = outcome.choice.draft
    if used is not None and used.proposer != draft.proposer:
        return 0
    return common_length(draft.tokens, outcome.verdict.tokens)

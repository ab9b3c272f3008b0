"""When to look drafts up: looking takes time, too.

A request is looked up in every step while that has lately saved more than it costs, for itself or for others like it;
else at doubling intervals. While the engine is in debt, a look has to be paid for first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outpace.acceptance import common_length
from outpace.core import StepStats
from outpace.speculation.base import DraftAsk
from outpace.speculation.costs import Costs
from outpace.speculation.policy.accounts import Accounts
from outpace.speculation.policy.decision import Decision
from outpace.speculation.policy.planner import Situation
from outpace.speculation.policy.state import Mean, Outcome
from outpace.speculation.policy.tunables import TUNABLES

_MOST_UNPROVEN = 0.25  # of a plain step that goes into lookups that have not paid lately


class LookupValue:
    def __init__(self, names: Iterable[str]) -> None:
        self._saved_seconds = {name: Mean() for name in names}  # by a lookup, lately
        self.own_seconds = 0.0  # what deciding and learning have taken lately, where anything was looked at

    @property
    def names(self) -> Iterable[str]:
        return self._saved_seconds.keys()

    def due(self, situation: Situation, costs: Costs, accounts: Accounts) -> dict[str, list[DraftAsk]]:
        """What is looked up in this step, by proposer."""
        asks: dict[str, list[DraftAsk]] = {}
        has_budget, step = accounts.budget.balance > 0.0, situation.step
        if not has_budget and accounts.in_debt.due > step:
            return asks
        price = max([costs.drafts[name].lookup_seconds for name in self.names], default=0.0)
        num_unproven = int(_MOST_UNPROVEN * situation.plain_seconds / price) + 1 if price else 1 << 30
        for row in situation.auto:
            state, request = situation.states[row], situation.requests[row]
            for name, lookup in state.lookups.items():
                if lookup.backoff.due <= step:
                    if lookup.backoff.due:
                        num_unproven -= 1
                        if num_unproven < 0:
                            continue
                    depth = min(state.wishes.max_depth, request.max_useful_depth)
                    asks.setdefault(name, []).append(DraftAsk(request, depth))
        return asks

    def learn_own_seconds(self, stats: StepStats) -> None:
        own_seconds = max(0.0, stats.deciding_seconds - stats.lookup_seconds)
        self.own_seconds += TUNABLES.smoothing * (own_seconds - self.own_seconds)

    def learn(self, decision: Decision, situation: Situation, outcomes: Sequence[Outcome], costs: Costs) -> None:
        """What lookups brought, in the time they saved; and when to look again."""
        if decision.is_refused and not decision.has_drafts:  # whatever is found cannot be used now
            for row in decision.found:
                for lookup in situation.states[row].lookups.values():
                    lookup.backoff.fail(situation.step)
            return
        token_seconds = situation.plain_seconds / situation.emitted - situation.judge_seconds
        slot_seconds = situation.slot_seconds
        totals = dict.fromkeys(self.names, 0.0)
        for row, drafts in decision.found.items():
            outcome, state = outcomes[row], situation.states[row]
            used = outcome.choice.draft if outcome.choice.ask is None else None
            for draft in drafts:
                saved = 0.0
                if used is None or used.proposer == draft.proposer:  # else it adds nothing to the other
                    hits = common_length(draft.tokens, outcome.verdict.tokens)
                    num_wasted = outcome.verdict.num_drafted - hits if used is not None else 0
                    saved = max(0.0, hits * (token_seconds - slot_seconds) - num_wasted * slot_seconds)
                state.lookups[draft.proposer].saved_seconds.add(saved)
                totals[draft.proposer] += saved
        for name in {draft.proposer for drafts in decision.found.values() for draft in drafts}:
            self._saved_seconds[name].add(totals[name] / len(decision.found))
        for row in decision.found:
            for name, lookup in situation.states[row].lookups.items():
                price = costs.drafts[name].lookup_seconds + self.own_seconds / situation.rows
                if lookup.saved_seconds.mean(self._saved_seconds[name].value) >= price:
                    lookup.backoff.succeed()
                elif lookup.backoff.due <= situation.step:
                    lookup.backoff.fail(situation.step)

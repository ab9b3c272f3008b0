"""Decides for which requests drafts are looked up in a step: a lookup takes time, too.

Lookups for a request run in every step while they have recently saved more time than they cost. Otherwise they run at
doubling intervals. While the engine is in debt, a lookup waits until the budget has earned twice what the last one
cost. A request with little history uses the mean of all requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outpace.core import StepStats
from outpace.decoding.acceptance import common_length
from outpace.speculation.costs.curves import Costs
from outpace.speculation.policy.accounts import Accounts
from outpace.speculation.policy.decision import Decision
from outpace.speculation.policy.planner import Situation
from outpace.speculation.policy.state import Mean, Outcome
from outpace.speculation.policy.tunables import TUNABLES
from outpace.speculation.proposers.base import DraftAsk

_MAX_UNPROVEN = 0.25  # share of a plain step for lookups that recently cost more than they saved


class LookupValue:
    def __init__(self, names: Iterable[str]) -> None:
        self._saved_seconds = {name: Mean() for name in names}  # recent mean per lookup, of all requests
        self.own_seconds = 0.0  # recent time of deciding and learning, without lookups

    @property
    def names(self) -> Iterable[str]:
        return self._saved_seconds.keys()

    def due(self, situation: Situation, costs: Costs, accounts: Accounts) -> dict[str, list[DraftAsk]]:
        """The lookups of this step, by proposer."""
        asks: dict[str, list[DraftAsk]] = {}
        has_budget, step = accounts.budget.balance > 0.0, situation.step
        if not has_budget and accounts.in_debt.due > step:
            return asks
        price = max([costs.drafts[name].lookup_seconds for name in self.names], default=0.0)
        num_unproven = int(_MAX_UNPROVEN * situation.plain_seconds / price) + 1 if price else 1 << 30
        for row in situation.auto:
            state, request = situation.states[row], situation.requests[row]
            for name, lookup in state.lookups.items():
                due = lookup.backoff.due
                if due <= step:
                    if due:
                        num_unproven -= 1
                        if num_unproven < 0:
                            continue
                    depth = min(state.settings.max_depth, request.max_useful_depth)
                    asks.setdefault(name, []).append(DraftAsk(request, depth))
        return asks

    def learn_own_seconds(self, stats: StepStats) -> None:
        own_seconds = max(0.0, stats.deciding_seconds - stats.lookup_seconds)
        self.own_seconds += TUNABLES.smoothing * (own_seconds - self.own_seconds)

    def learn(self, decision: Decision, situation: Situation, outcomes: Sequence[Outcome], costs: Costs) -> None:
        """Learn how much time lookups saved, and set when they run again."""
        if decision.is_refused and not decision.has_drafts:  # budgets do not allow any draft to be used now
            for row in decision.found:
                for lookup in situation.states[row].lookups.values():
                    lookup.backoff.fail(situation.step)
            return
        token_seconds = situation.plain_seconds / situation.emitted - situation.token_seconds
        slot_seconds = situation.slot_seconds
        totals = dict.fromkeys(self.names, 0.0)
        for row, drafts in decision.found.items():
            choice, verdict, lookups = outcomes[row].choice, outcomes[row].verdict, situation.states[row].lookups
            used = choice.draft
            for draft in drafts:
                saved, name = 0.0, draft.proposer
                if draft.tokens and (used is None or used.proposer == name):  # if another was used, it saved nothing
                    hits = common_length(draft.tokens, verdict.tokens)
                    num_wasted = verdict.num_drafted - hits if used is not None else 0
                    saved = max(0.0, hits * (token_seconds - slot_seconds) - num_wasted * slot_seconds)
                lookups[name].saved_seconds.add(saved)
                totals[name] += saved
        for name in {draft.proposer for drafts in decision.found.values() for draft in drafts}:
            self._saved_seconds[name].add(totals[name] / len(decision.found))
        usual = {name: saved.value for name, saved in self._saved_seconds.items()}
        prices = {name: costs.drafts[name].lookup_seconds + self.own_seconds / situation.rows for name in usual}
        for row in decision.found:
            for name, lookup in situation.states[row].lookups.items():
                if lookup.saved_seconds.mean(usual[name]) >= prices[name]:
                    lookup.backoff.succeed()
                elif lookup.backoff.due <= situation.step:
                    lookup.backoff.fail(situation.step)

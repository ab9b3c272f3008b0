"""Whether budgets cover a plan: what the engine and each request may lose by it, and what they can count on.

The engine counts on the lower bound of acceptance. A request counts on what is expected of its own draft or on what it
usually gains, the less the deeper it is in debt all the same. What a model catches up with may be won back later.
"""

from __future__ import annotations

from collections.abc import Mapping

from outpace.speculation.policy.acceptance import Acceptance
from outpace.speculation.policy.accounts import Accounts
from outpace.speculation.policy.planner import Plan, Planner, Situation
from outpace.speculation.policy.tunables import TUNABLES

_OUTVOTED = 32  # requests of which one may lose more than its budget: of so many, one is always unlucky
_TOLERATED = 0.05  # of its time that a request may be expected to lose by a step that is good for the others
_DEEP = 3.0  # request grants that a request may be behind, and still count on what is expected of its drafts
_LITTLE = 0.25  # plain steps: after a few plain steps a model has something to catch up with


class Coverage:
    def __init__(self, accounts: Accounts, planner: Planner, acceptances: Mapping[str, Acceptance]) -> None:
        self._accounts, self._budget = accounts, accounts.budget
        self._planner, self._acceptances = planner, acceptances

    def _counted_gain(self, situation: Situation, plan: Plan, row: int) -> float:
        """Draft tokens that a request can count on in a step like this one: those expected of its own draft and a
        little more, unless it is deep in debt by such expectations; or what it usually gains."""
        state = situation.states[row]
        if state.budget.balance > -_DEEP * TUNABLES.request_grant:
            of_draft = plan.gains.get(row, 0.0) + _TOLERATED * plan.seconds / situation.plain_seconds
        else:
            of_draft = self._planner.low(situation, plan, row)
        return max(of_draft, state.trusted_gain(self._accounts.usual_gain.value))

    def _lower_gain(self, situation: Situation, plan: Plan) -> float:
        """Draft tokens accepted at the lower bound, for each token emitted without drafts."""
        count = len(plan.depths)
        return sum([self._planner.low(situation, plan, row, count) for row in plan.depths]) / situation.emitted

    def holds(self, situation: Situation, plan: Plan) -> bool:
        """Whether at the lower bound neither the engine nor any request loses more than its budget holds.

        For the engine that is the lower bound of acceptance; for a request, what it can count on.
        """
        plain, allowance = situation.plain_seconds, self._allowance(situation.step)
        little = max(_LITTLE, allowance) * plain
        if plan.catch_up_seconds > little and not self._may_catch_up(situation, plan):
            return False
        needed = plan.needed_gain(plain, allowance)
        if needed > 0.0 and self._lower_gain(situation, plan) < needed:
            return False
        num_outvoted = situation.rows // _OUTVOTED
        for row in situation.auto:
            state = situation.states[row]
            needed = plan.needed_gain(plain, max(0.0, state.budget.balance))
            if needed > 0.0 and needed > self._counted_gain(situation, plan, row):
                num_outvoted -= 1
                if num_outvoted < 0:
                    return False
        return True

    def _may_catch_up(self, situation: Situation, plan: Plan) -> bool:
        """Whether a model may catch up with texts for more than the budget holds: not in debt, and not before it was
        tried on some requests. One alone is the trial, unless its text is too long for any budget."""
        if self._budget.balance <= 0.0 or plan.model is None:
            return False
        acceptance = self._acceptances[plan.model]
        if all(acceptance.is_tried(situation.states[row].wishes.temperature) for row in plan.depths):
            return True
        most = TUNABLES.most_balance * situation.plain_seconds
        return situation.rows == 1 and plan.catch_up_seconds <= most

    def _allowance(self, step: int) -> float:
        """Plain steps that the engine may lose. In debt none, and what should gain is tried at intervals."""
        if self._budget.balance > 0.0:
            return self._budget.balance
        return 0.0 if self._accounts.in_debt.due <= step else -float("inf")

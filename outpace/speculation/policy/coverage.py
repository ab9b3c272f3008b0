"""Decides whether budgets cover a plan: the possible loss of the engine and of each request must fit its budget.

The engine assumes the lower bound of acceptance. A request assumes the expected gain of its own draft or its usual
gain; a request in debt assumes less. Later steps may pay for the time a model spends on catching up.
"""

from __future__ import annotations

from collections.abc import Mapping

from outpace.speculation.policy.acceptance import Acceptance
from outpace.speculation.policy.accounts import Accounts
from outpace.speculation.policy.planner import Plan, Planner, Situation
from outpace.speculation.policy.tunables import TUNABLES

_ROWS_PER_OUTVOTED = 32  # one request in 32 may exceed its budget: in a large batch one is always unlucky
_TOLERATED_LOSS = 0.05  # share of its time that a request may lose in a step that helps the others
_DEEP_DEBT = 4.0  # in request grants; beyond it, a request assumes the lower bound. Catching up alone may cost two
_SMALL_CATCH_UP = 0.25  # plain steps; a few plain steps already leave a model this much to catch up on


class Coverage:
    def __init__(self, accounts: Accounts, planner: Planner, acceptances: Mapping[str, Acceptance]) -> None:
        self._accounts, self._budget = accounts, accounts.budget
        self._planner, self._acceptances = planner, acceptances

    def _counted_gain(self, situation: Situation, plan: Plan, row: int) -> float:
        """Accepted draft tokens a request may assume: the expected ones plus a tolerance (the lower bound if deep in
        debt), or its usual gain if that is larger."""
        state = situation.states[row]
        if state.budget.balance > -_DEEP_DEBT * TUNABLES.request_grant:
            of_draft = plan.gains.get(row, 0.0) + _TOLERATED_LOSS * plan.seconds / situation.plain_seconds
        else:
            of_draft = self._planner.lower_gain(situation, plan, row)
        return max(of_draft, state.trusted_gain(self._accounts.usual_gain.value))

    def _lower_gain(self, situation: Situation, plan: Plan) -> float:
        """Accepted draft tokens at the lower bound, per token emitted without drafts."""
        count = len(plan.depths)
        return sum([self._planner.lower_gain(situation, plan, row, count) for row in plan.depths]) / situation.emitted

    def holds(self, situation: Situation, plan: Plan) -> bool:
        """Whether neither the engine nor any request may lose more than its budget.

        The engine assumes the lower bound of acceptance, a request its `_counted_gain`.
        """
        plain, allowance = situation.plain_seconds, self._allowance(situation.step)
        small = max(_SMALL_CATCH_UP, allowance) * plain
        if plan.catch_up_seconds > small and not self._may_catch_up(situation, plan):
            return False
        needed = plan.needed_gain(plain, allowance)
        if needed > 0.0 and self._lower_gain(situation, plan) < needed:
            return False
        num_outvoted = situation.rows // _ROWS_PER_OUTVOTED
        needed_without_budget = plan.needed_gain(plain, 0.0)
        for row in situation.auto:
            balance = situation.states[row].budget.balance
            needed = plan.needed_gain(plain, balance) if balance > 0.0 else needed_without_budget
            if needed > 0.0 and needed > self._counted_gain(situation, plan, row):
                num_outvoted -= 1
                if num_outvoted < 0:
                    return False
        return True

    def _may_catch_up(self, situation: Situation, plan: Plan) -> bool:
        """Whether a model may spend more than the budget on catching up: only after trials, which may have been made
        when it was trained. What it then gains at the lower bound pays for it. Before, and with a budget, a request
        that runs alone is itself the trial, unless its text is too long for any budget."""
        if plan.model is None:
            return False
        acceptance = self._acceptances[plan.model]
        if all(acceptance.is_tried(situation.states[row].settings.temperature) for row in plan.depths):
            return True
        most = TUNABLES.most_balance * situation.plain_seconds
        return self._budget.balance > 0.0 and situation.rows == 1 and plan.catch_up_seconds <= most

    def _allowance(self, step: int) -> float:
        """Plain steps that the engine may lose. In debt: none, and a plan runs only when the back-off is due."""
        if self._budget.balance > 0.0:
            return self._budget.balance
        return 0.0 if self._accounts.in_debt.due <= step else -float("inf")

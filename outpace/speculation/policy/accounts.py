"""Keeps account of what speculation costs and saves, for the engine and for each request, and decides which plans their
budgets cover.

A step with drafts is booked at its time against that of plain decoding for the same tokens. A step without drafts loses
the time of deciding. Nothing would spare the few microseconds that an idle step takes, so they are no loss.
"""

from __future__ import annotations

from collections.abc import Sequence

from outpace.core import Request, StepStats
from outpace.speculation.policy.budget import Budget
from outpace.speculation.policy.planner import Plan, Situation
from outpace.speculation.policy.state import Outcome, RequestState, SpeculationSettings
from outpace.speculation.policy.tunables import TUNABLES

_DISTURBED = 1.5  # times the expected time of a step; the excess is not charged


class Accounts:
    def __init__(self, allowed_loss: float) -> None:
        self._allowed_loss = allowed_loss
        self.budget = Budget(TUNABLES.engine_grant, TUNABLES.engine_share * allowed_loss)
        self.spent_seconds = 0.0  # decoding so far
        self.plain_seconds = 0.0  # what it would have taken without speculation
        self._without_drafts = 0.0, 0.0  # of both, what steps without drafts took

    def open(self, request: Request, settings: SpeculationSettings) -> RequestState:
        budget = Budget(TUNABLES.request_grant, self._allowed_loss)
        return RequestState(settings, budget, request.num_output, booked=self._without_drafts)

    def covers(self, situation: Situation, plan: Plan, lower_gain: float, *, is_proven: bool) -> bool:
        """Whether neither the engine nor a request may lose more than its budget allows.

        The engine assumes `lower_gain`: the accepted draft tokens at the lower bound of acceptance, per token emitted
        without drafts. A request assumes what is expected of its own draft. Who is in debt also asks that a part of it
        is repaid: where expectations are wrong again and again, that ends it. Catching up is such a debt if the model
        `is_proven` by trials. Otherwise the budget does; the first trial of a single request may cost as much as
        a budget can hold.
        """
        plain, balance = situation.plain_seconds, max(0.0, self.budget.balance)
        if not is_proven:
            most = TUNABLES.most_balance if balance and len(plan.depths) == 1 else balance
            if plan.catch_up_seconds > most * plain:
                return False
        return plan.needed_gain(plain, self.budget.balance) <= lower_gain and all(
            plan.needed_gain(plain, situation.states[row].budget.balance) <= plan.gains.get(row, 0.0)
            for row in situation.auto
        )

    def book_plain(self, situation: Situation, seconds: float, stats: StepStats, *, is_repeated: bool) -> None:
        """Book a step without drafts. Prefill is left out: speculation does not cause it."""
        deciding, plain = stats.deciding_seconds, 0.0 if stats.num_prefill_tokens else seconds
        spent_so_far, plain_so_far = self._without_drafts
        self._without_drafts = spent_so_far + plain + deciding, plain_so_far + plain
        self.spent_seconds += plain + deciding
        self.plain_seconds += plain
        self.budget.earn(1.0)
        if not is_repeated:
            lost = deciding / situation.plain_seconds
            for budget in (self.budget, *[state.budget for state in situation.states]):
                budget.book(lost)

    def book(
        self,
        situation: Situation,
        plan: Plan | None,
        outcomes: Sequence[Outcome],
        seconds: float,
        catch_up_seconds: float,
    ) -> None:
        """Book a step with drafts. Those of mode `on` do not count for or against the engine's budget."""
        plain_step, num_emitted, has_forced = situation.baseline_seconds, 0, False
        charged = seconds if plan is None else min(seconds, _DISTURBED * plan.seconds)
        spent = seconds + catch_up_seconds
        charged += catch_up_seconds
        for state, outcome in zip(situation.states, outcomes, strict=True):
            spec, count = outcome.request.spec, len(outcome.verdict.tokens)
            num_emitted += count
            self.settle(outcome.request, state)
            spec.decode_seconds += spent
            spec.plain_seconds += plain_step * count
            if state.settings.mode == "on":
                has_forced = has_forced or outcome.choice.depth > 0
            else:
                state.budget.book(charged / plain_step - count)
        if not has_forced:
            plain_steps = num_emitted / situation.rows
            self.budget.earn(plain_steps)
            self.budget.book(charged / plain_step - plain_steps)
            self.spent_seconds += spent
            self.plain_seconds += plain_step * plain_steps

    def settle(self, request: Request, state: RequestState) -> None:
        """Add the steps without drafts to a request's counts."""
        if state.booked is not self._without_drafts:
            (spent, plain), (spent_before, plain_before) = self._without_drafts, state.booked
            request.spec.decode_seconds += spent - spent_before
            request.spec.plain_seconds += plain - plain_before
            state.booked = self._without_drafts

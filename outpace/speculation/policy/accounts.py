"""Keeps account of the time that speculation spends and saves, for the engine and for each request, and decides which
plans their budgets cover.

A step with drafts is booked when it ends: its time against the time of plain decoding for the same tokens. A step
without drafts loses only the time of deciding; such steps are summed and booked before the next decision. An idle step,
without a decision, is charged at most half of what it earns for the few microseconds that `auto` takes even then: on a
fast machine they are more than a budget earns, so that a debt could never be made good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outpace.core import Request, StepStats
from outpace.speculation.policy.budget import Backoff, Budget
from outpace.speculation.policy.planner import Plan, Situation
from outpace.speculation.policy.state import Outcome, PlainTime, RequestState
from outpace.speculation.policy.tunables import TUNABLES

_REPAYMENT_STEPS = 32.0  # in which a request's debt is to be made good


@dataclass(slots=True)
class SpentTime:
    """Seconds of one step with drafts, without prefill."""

    spent: float
    plain_step: float  # what a plain step would have taken
    excused: float  # of `spent`, due to a disturbance
    catch_up: float  # of `spent`, for later steps too


class Accounts:
    def __init__(self, allowed_loss: float) -> None:
        self.budget = Budget(TUNABLES.engine_grant, TUNABLES.budget_share * allowed_loss)
        self.in_debt = Backoff(8 * TUNABLES.longest_backoff)  # limits trials while the budget is overdrawn
        self.plain_time = PlainTime()
        self._booked_plain_time = self.plain_time

    def covers(self, situation: Situation, plan: Plan, lower_gain: float, *, is_proven: bool) -> bool:
        """Whether neither the engine nor a request may lose more than its budget.

        The engine assumes `lower_gain`: the accepted draft tokens at the lower bound of acceptance, per token emitted
        without drafts. A request assumes what is expected of its own draft; in debt, the draft must also repay a part
        of the debt, so that expectations that were wrong before count for less. Catching up is paid for by later steps if
        the model `is_proven` by trials; otherwise by the budget, or it is the first trial, with a single request.
        """
        plain, balance = situation.plain_seconds, self.budget.balance
        if balance <= 0.0 and self.in_debt.due > situation.step:
            return False
        if not is_proven:
            most = TUNABLES.most_balance if len(plan.depths) == 1 and balance > 0.0 else max(0.0, balance)
            if plan.catch_up_seconds > most * plain:
                return False
        if plan.needed_gain(plain, max(0.0, balance)) > lower_gain:
            return False
        least = plan.needed_gain(plain, 0.0)
        for row in situation.auto:
            balance = situation.states[row].budget.balance
            needed = plan.needed_gain(plain, balance) if balance > 0.0 else least - balance / _REPAYMENT_STEPS
            if needed > plan.gains.get(row, 0.0):
                return False
        return True

    def add_plain_step(self, stats: StepStats, *, is_idle: bool) -> None:
        """Add a step without drafts. Prefill and one-time work are left out: speculation does not cause them."""
        if stats.had_one_time_work:
            return
        deciding = stats.deciding_seconds
        decoding = 0.0 if stats.num_prefill_tokens else stats.total_seconds - deciding
        known = self.plain_time
        excused = known.excused
        if is_idle:
            excused += max(0.0, deciding - 0.5 * self.budget.earned(decoding))
        self.plain_time = PlainTime(known.spent + decoding + deciding, known.plain + decoding, excused)

    def settle(self, requests: Sequence[Request], states: Sequence[RequestState], plain_step: float) -> None:
        """Book the steps without drafts, for the engine and for the requests in them."""
        now, booked = self.plain_time, self._booked_plain_time
        if now is not booked:
            spent, plain = now.spent - booked.spent, now.plain - booked.plain
            self.budget.book(spent, plain, plain_step, excused=now.excused - booked.excused)
            self._booked_plain_time = now
        for request, state in zip(requests, states, strict=True):
            if state.plain_time is not now:
                spent, plain = now.spent - state.plain_time.spent, now.plain - state.plain_time.plain
                excused, state.plain_time = now.excused - state.plain_time.excused, now
                request.spec.decode_seconds += spent
                request.spec.plain_seconds += plain
                state.budget.book(spent, plain, plain_step, excused=excused)

    def book(self, situation: Situation, outcomes: Sequence[Outcome], time: SpentTime) -> None:
        """Book a step with drafts. Those of mode `on` do not count for or against the engine's budget."""
        spent, plain_step, excused, catch_up = time.spent, time.plain_step, time.excused, time.catch_up
        num_emitted, has_forced = 0, False
        for state, outcome in zip(situation.states, outcomes, strict=True):
            spec, count = outcome.request.spec, len(outcome.verdict.tokens)
            num_emitted += count
            plain = plain_step * count
            spec.decode_seconds += spent
            spec.plain_seconds += plain
            if state.settings.mode == "on":
                has_forced = has_forced or outcome.choice.depth > 0
            else:
                state.budget.book(spent, plain, plain_step, excused=excused, invested=catch_up)
        if has_forced:
            return
        plain = plain_step * num_emitted / situation.rows
        was_in_debt = self.budget.balance <= 0.0
        self.budget.book(spent, plain, plain_step, excused=excused, invested=catch_up)
        if was_in_debt and spent - excused - catch_up <= plain:
            self.in_debt.succeed()
        elif was_in_debt:
            self.in_debt.fail(situation.step)

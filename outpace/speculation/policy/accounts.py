"""Keeps account of the time that speculation spends and saves, for the engine and for each request.

A step with drafts is booked when it ends: its time against the time of plain decoding for the same tokens. A step
without drafts loses only the time of deciding; such steps are summed and booked before the next decision. An idle step,
without a decision, is charged at most half of what it earns for the few microseconds that `auto` takes even then: on a
fast machine they are more than a budget earns, so that a debt could never be made good.
"""

from __future__ import annotations

from collections.abc import Sequence

from outpace.core import Request, StepStats
from outpace.speculation.policy.baseline import DISTURBED, Baseline
from outpace.speculation.policy.budget import Backoff, Budget
from outpace.speculation.policy.decision import Decision
from outpace.speculation.policy.planner import Situation
from outpace.speculation.policy.state import Mean, Outcome, PlainTime, RequestState
from outpace.speculation.policy.tunables import TUNABLES

_RECENT_FADE = 0.98  # per step: the recent speed is a mean over about 50 steps


class Accounts:
    def __init__(self, allowed_loss: float) -> None:
        self.budget = Budget(TUNABLES.engine_grant, allowed_loss)
        self.in_debt = Backoff(8 * TUNABLES.longest_backoff)  # limits trials while the budget is overdrawn
        self.usual_gain = Mean()  # expected accepted draft tokens per request, in steps with drafts
        self.plain_time = PlainTime()
        self._booked_plain_time = self.plain_time
        self._recent_spent = self._recent_plain = 0.0  # seconds of steps without a model, exponentially faded

    @property
    def recent_speedup(self) -> float:
        """Recent speedup of steps without a model over plain decoding; at least 1."""
        return max(1.0, self._recent_plain / self._recent_spent) if self._recent_spent else 1.0

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
            self._add_recent(_RECENT_FADE ** (spent / plain_step), spent, plain)
            self._booked_plain_time = now
        for request, state in zip(requests, states, strict=True):
            if state.plain_time is not now:
                spent, plain = now.spent - state.plain_time.spent, now.plain - state.plain_time.plain
                excused, state.plain_time = now.excused - state.plain_time.excused, now
                request.spec.decode_seconds += spent
                request.spec.plain_seconds += plain
                state.budget.book(spent, plain, plain_step, excused=excused)

    def book(
        self,
        decision: Decision,
        situation: Situation,
        outcomes: Sequence[Outcome],
        stats: StepStats,
        baseline: Baseline,
        catch_up_seconds: float,
    ) -> bool:
        """Book a step with drafts; whether it took less time than plain decoding of its tokens."""
        num_drafted = sum([outcome.verdict.num_drafted for outcome in outcomes])
        spent, excused = baseline.decoding_seconds(situation, num_drafted, stats)
        if decision.plan is not None and decision.plan.model is not None:
            usual = decision.plan.draft_seconds + decision.plan.catch_up_seconds
            disturbed = max(0.0, stats.draft_seconds - DISTURBED * usual)
            excused, catch_up_seconds = excused + disturbed, max(0.0, catch_up_seconds - disturbed)
        plain_step = baseline.plain_seconds(situation.rows, situation.context)
        gains = decision.plan.gains if decision.plan is not None else {}
        num_emitted, has_forced = 0, False
        for row, outcome in enumerate(outcomes):
            state, spec, count = situation.states[row], outcome.request.spec, len(outcome.verdict.tokens)
            num_emitted += count
            plain = plain_step * count
            spec.decode_seconds += spent
            spec.plain_seconds += plain
            if state.settings.mode == "on":
                has_forced = has_forced or outcome.choice.depth > 0
            else:
                state.budget.book(spent, plain, plain_step, excused=excused, invested=catch_up_seconds)
                if gains:
                    state.gain.add(gains.get(row, 0.0))
        if gains:
            self.usual_gain.add(sum(gains.values()) / situation.rows)
        if has_forced:
            return True  # drafts of mode `on` do not count for or against the engine's budget
        plain = plain_step * num_emitted / situation.rows
        if decision.plan is None or decision.plan.model is None:
            self._add_recent(_RECENT_FADE, spent, plain)
        was_in_debt = self.budget.balance <= 0.0
        self.budget.book(spent, plain, plain_step, excused=excused, invested=catch_up_seconds)
        has_gained = spent - excused - catch_up_seconds <= plain
        if was_in_debt and has_gained:
            self.in_debt.succeed()
        elif was_in_debt:
            self.in_debt.fail(decision.step)
        return has_gained

    def _add_recent(self, kept: float, spent: float, plain: float) -> None:
        self._recent_spent = kept * self._recent_spent + spent
        self._recent_plain = kept * self._recent_plain + plain

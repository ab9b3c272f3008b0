"""Decides for each step which requests get drafts, from which proposer and how deep; depth 0 is plain decoding.

Mode `on` always drafts to the configured depth, `off` never drafts. Mode `auto` is a conservative bandit: plain
decoding is the safe arm with a known cost. A step runs the fastest expected plan (`planner.py`) if the budgets of the
engine and of its requests cover the plan's possible loss (`accounts.py`). Failed attempts are repeated at doubling
intervals.

A decision stands for several steps, because deciding takes time: a plain one until something is due to be tried again,
a model's plan until the time of deciding is a small share. Occasional plain steps keep the baseline up to date.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil, exp

from outpace.config import ResolvedConfig
from outpace.core import Draft, Request, StepStats, Verdict
from outpace.decoding.acceptance import common_length
from outpace.speculation.costs.curves import Costs, DraftCosts
from outpace.speculation.policy.acceptance import Acceptance
from outpace.speculation.policy.accounts import Accounts, SpentTime
from outpace.speculation.policy.budget import Backoff, Budget
from outpace.speculation.policy.decision import Decision
from outpace.speculation.policy.lookup_value import LookupValue
from outpace.speculation.policy.planner import Plan, Planner, Situation, Stop
from outpace.speculation.policy.state import Choice, Lookup, Outcome, RequestState, SpeculationSettings
from outpace.speculation.policy.times import PLAIN, StepTimes
from outpace.speculation.policy.trace import StepTrace
from outpace.speculation.policy.tunables import TUNABLES
from outpace.speculation.proposers.base import DraftAsk, Proposer

_FIRST_PLAIN = 8  # steps with drafts before the first plain step; doubles each time, up to `plain_every`
_MAX_REPEATED = 16  # steps that repeat a plan; a request that accepts nothing in them loses a few plain steps
_MAX_LEARNED = 8  # drafts per step that update the shared acceptance; if there are more, they take turns
_DISTURBED = 1.5  # times the expected time of a step; the excess is not charged

LookUp = Callable[[Mapping[str, list[DraftAsk]]], Mapping[int, Sequence[Draft]]]  # drafts by request id


class Policy:
    def __init__(
        self,
        config: ResolvedConfig,
        costs: Costs | None,
        proposers: Mapping[str, Proposer],
        *,
        can_speculate: bool,
        begins_ahead: bool = False,
        trace_steps: int = 0,
    ) -> None:
        """`begins_ahead`: after a plain step, the runner starts the next one before it is requested."""
        self._config = config
        self._proposers = proposers
        self._can_speculate = can_speculate
        self.begins_ahead = begins_ahead
        self.acceptances = {
            name: Acceptance(is_lookup=each.is_lookup, measured=each.measured) for name, each in proposers.items()
        }
        self._accounts = Accounts(config.allowed_loss)
        self.budget = self._accounts.budget
        self._times = StepTimes()
        self.keep_trace(trace_steps)
        self._states: dict[int, RequestState] = {}
        self._step = 0
        self._lookup_value = LookupValue(name for name, each in proposers.items() if each.is_lookup and name != "none")
        self._models = {name: Backoff() for name, each in proposers.items() if not each.is_lookup}
        self._steps_without_plain, self._plain_after = 0, _FIRST_PLAIN
        self._standing: Decision | None = None  # it holds until the step `_stands_until`, for the same requests
        self._stands_until = 0
        self._idle_steps, self._idle_seconds = 0, 0.0  # idle steps that were begun ahead, since the last decision
        self._plain_step = 1.0  # seconds, latest known value
        self.use_costs(costs)

    def use_costs(self, costs: Costs | None) -> None:
        """Without costs, `auto` decodes plainly: it cannot compare plans."""
        self.costs = costs
        if costs is not None:
            for name in (*self._lookup_value.names, *self._models):  # a proposer without measured costs counts as free
                costs.drafts.setdefault(name, DraftCosts())
            self._planner = Planner(costs, self._times, self.acceptances, self._proposers)

    def keep_trace(self, num_steps: int, max_rows: int | None = None) -> None:
        """Keep the traces of the latest `num_steps` steps, each of at most `max_rows` requests."""
        self.trace: deque[StepTrace] = deque(maxlen=num_steps)
        self._trace_rows = max_rows

    @property
    def plain_step_seconds(self) -> float | None:
        """Of the latest batch, expected; None before the first decision."""
        return self._plain_step if self._step and self.costs is not None else None

    def lookups(self, request: Request) -> tuple[str, ...]:
        """The lookup proposers that `auto` may use for this request."""
        settings = self._state(request).settings
        return settings.lookups if settings.mode == "auto" else ()

    # ---- deciding

    def decide(self, requests: Sequence[Request], look_up: LookUp, num_prefill: int = 0) -> Decision:
        """Make one choice for each decoding request. `look_up` returns drafts that need no model."""
        self._step += 1
        standing = self._standing
        if standing is not None and self._still_holds(standing, requests, num_prefill):
            decision = self._again(standing)
        else:
            self._standing = None
            states = [self._state(request) for request in requests]
            decision = Decision(self._step, requests, self._forced(requests, states))
            situation = decision.situation = self._situation(decision, states, num_prefill)
            if situation is not None and situation.auto:
                self._weigh(decision, situation, look_up)
            self._let_stand(decision, num_prefill)
        self._steps_without_plain = self._steps_without_plain + 1 if decision.plan is not None else 0
        if self.trace.maxlen:
            decision.trace = StepTrace.of(decision, self._trace_rows)
            self.trace.append(decision.trace)
        return decision

    def _state(self, request: Request) -> RequestState:
        state = self._states.get(request.id)
        if state is None:
            settings = SpeculationSettings.of(request, self._config, self._proposers, self._can_speculate)
            budget = Budget(TUNABLES.request_grant, TUNABLES.request_share * self._config.allowed_loss)
            lookups = {name: Lookup() for name in settings.lookups}
            state = RequestState(settings, budget, lookups, self._accounts.plain_time)
            self._states[request.id] = state
            for backoff in self._models.values():
                backoff.due = 0  # drafts may work better on the new text
        return state

    def _is_crowded(self, num_running: int) -> bool:
        limit = self._config.disable_by_batch_size
        return limit is not None and num_running >= limit

    def _forced(self, requests: Sequence[Request], states: Sequence[RequestState]) -> list[Choice]:
        """Choices that need no comparison: the configured depth for mode `on`, else plain."""
        choices = [Choice.plain()] * len(requests)
        if self._is_crowded(len(requests)):
            return choices
        for row, state in enumerate(states):
            settings = state.settings
            if settings.mode == "on" and settings.method != "none":
                depth = min(settings.max_depth, requests[row].max_useful_depth)
                if depth:
                    choices[row] = Choice(settings.method, depth, ask=DraftAsk(requests[row], depth))
        return choices

    def _situation(self, decision: Decision, states: list[RequestState], num_prefill: int) -> Situation | None:
        """The facts a decision needs; None without costs, or if speculation is off for all requests."""
        costs, requests = self.costs, decision.requests
        if costs is None or all(state.settings.mode == "off" for state in states):
            return None
        rows = len(requests)
        context = sum([len(request.tokens) for request in requests]) / rows
        self._learn_idle_steps(rows, context)
        self._plain_step = self._plain_seconds(rows, context)
        self._accounts.settle(requests, states, self._plain_step)
        auto = []
        if not self._is_crowded(rows):
            auto = [i for i, s in enumerate(states) if s.settings.mode == "auto" and requests[i].max_useful_depth]
        fixed = sum([choice.depth for choice in decision.choices])
        emitted = rows + (self._expected_of_forced(decision.choices, states) if fixed else 0.0)
        least = rows + num_prefill + fixed
        host = costs.schedule_seconds + costs.token_seconds * emitted
        forward = costs.target.seconds(rows, least - num_prefill, context)
        plain_seconds = (host + forward) * self._times.factor(PLAIN, rows)
        if num_prefill:  # prefill happens with or without drafts, so its time is not charged
            host -= costs.target.seconds(rows, least, context) - forward
        return Situation(
            self._step, requests, states, context, plain_seconds, auto, least, host, emitted, costs.token_seconds,
            self._lookup_value.own_seconds,
            self._repeated_own_seconds(plain_seconds),
            max(0, self._config.max_step_tokens - least),
            costs.target,
        )  # fmt: skip

    def _plain_seconds(self, rows: int, context: float) -> float:
        """The time of a plain step, as such steps have taken lately."""
        assert self.costs is not None
        return self.costs.plain_seconds(rows, context) * self._times.factor(PLAIN, rows)

    def _expected_of_forced(self, choices: Sequence[Choice], states: Sequence[RequestState]) -> float:
        total = 0.0
        for state, choice in zip(states, choices, strict=True):
            if choice.depth:
                acceptance, settings = self.acceptances[choice.method], state.settings
                gain = acceptance.forecast(settings.temperature, choice.depth, settings.log_odds)[-1]
                choice.expected = 1.0 + gain
                total += gain
        return total

    def _weigh(self, decision: Decision, situation: Situation, look_up: LookUp) -> None:
        """Look up drafts for `auto` requests, compare plans, and apply the best one that budgets cover."""
        if self._steps_without_plain >= self._plain_after:
            decision.reason = "a plain step, to measure it"
            self._plain_after = min(TUNABLES.plain_every, 2 * self._plain_after)
            return
        assert self.costs is not None
        asks = self._lookup_value.due(situation, self.costs, self._accounts)
        if asks:
            by_id = look_up(asks)
            decision.found = {row: by_id[r.id] for row, r in enumerate(situation.requests) if r.id in by_id}
        decision.reason = "nothing beats plain decoding"
        if not any(draft.tokens for drafts in decision.found.values() for draft in drafts):
            decision.reason = "nothing found" if decision.found else "nothing looked up"
            if all(backoff.due > self._step for backoff in self._models.values()):
                return
        plan = self._best(decision, situation)
        if plan is not None:
            decision.plan = plan
            self._planner.note_taken(plan)
            self._apply(decision, situation, plan)

    def _best(self, decision: Decision, situation: Situation) -> Plan | None:
        """The fastest plan that budgets cover; None if no covered plan is faster than plain decoding."""
        plain_speed = situation.emitted / situation.plain_seconds
        base = self._planner.with_lookups(situation, decision.found) if decision.found else Plan()
        best = base if base.speed > plain_speed and self._covers(situation, base) else None
        decision.is_refused = base.speed > plain_speed and best is None
        for name, backoff in self._models.items():
            if backoff.due > self._step:
                continue
            fastest = covered = None
            for plan in self._planner.with_model(situation, name, best or Plan()):
                if plan.speed <= plain_speed:
                    break
                fastest = fastest or plan
                if self._covers(situation, plan):
                    covered = plan
                    break
            if covered is not None:
                backoff.succeed()
                if best is None or covered.speed > best.speed:
                    best = covered
                continue
            backoff.fail(self._step)
            if self.budget.balance > 0.0:  # a debt is evidence too: nothing would pay for trying again
                self.acceptances[name].forget()
            decision.is_refused = decision.is_refused or fastest is not None
        if best is None and decision.is_refused:
            decision.reason = "no budget covers the best plan"
        return best

    def _covers(self, situation: Situation, plan: Plan) -> bool:
        lower_gain, is_proven = self._planner.lower_gain(situation, plan), True
        if plan.model is not None and plan.catch_up_seconds:
            acceptance = self.acceptances[plan.model]
            is_proven = all(acceptance.is_tried(situation.states[row].settings.temperature) for row in plan.depths)
        return self._accounts.covers(situation, plan, lower_gain, is_proven=is_proven)

    def _apply(self, decision: Decision, situation: Situation, plan: Plan) -> None:
        """Turn a plan into choices."""
        speed = (situation.emitted + sum(plan.gains.values())) / plan.seconds
        gain = speed * situation.plain_seconds / situation.emitted
        decision.reason = f"expected {gain:.2f} of plain"
        model, choices, gains, lookups = plan.model, decision.choices, plan.gains, plan.lookups
        stop_of = self._stops(situation, plan)
        for row, planned in plan.depths.items():
            request = situation.requests[row]
            depth, expected = min(planned, request.max_useful_depth), 1.0 + gains[row]
            if not depth:  # a repeated plan, and the request is about to end
                continue
            if row in lookups:
                draft = lookups[row]
                choices[row] = Choice(draft.proposer, depth, draft, None, expected)
            else:
                assert model is not None
                ask = DraftAsk(request, depth, stop_of(situation.states[row]) if stop_of is not None else None)
                choices[row] = Choice(model, depth, None, ask, expected)

    def _stops(self, situation: Situation, plan: Plan) -> Callable[[RequestState], Stop] | None:
        """Makes the rule that ends a request's draft early; None if the proposer cannot end a draft early."""
        model = plan.model
        if model is None or self._proposers[model].drafts_whole:
            return None
        assert self.costs is not None
        drafting, costs = len(plan.depths) - len(plan.lookups), self.costs.drafts[model]
        further = costs.seconds(drafting, 2, situation.context) - costs.seconds(drafting, 1, situation.context)
        at_least, to_go_on = plan.speed * plan.slot_seconds, plan.speed * (plan.slot_seconds + further / drafting)
        acceptance = self.acceptances[model]

        def stop(state: RequestState) -> Stop:
            shift = acceptance.shift_of(state.shifts, model, state.settings.log_odds, situation.step)
            return Stop(acceptance, state.settings.temperature, shift.mean, at_least, to_go_on)

        return stop

    # ---- standing decisions

    def _repeated_own_seconds(self, plain_seconds: float) -> float:
        own_seconds, share = self._lookup_value.own_seconds, self._config.allowed_loss
        return min(own_seconds, 0.5 * share * plain_seconds) if share else own_seconds

    def _let_stand(self, decision: Decision, num_prefill: int) -> None:
        """Let a model's plan stand for as many steps as keep the time of deciding at half of `allowed_loss`.
        A plain decision is let stand when the step's outcome is known."""
        plan, share = decision.plan, self._config.allowed_loss
        if plan is None or not plan.is_repeatable or num_prefill or not share:
            return
        assert self.costs is not None
        deciding = self._lookup_value.own_seconds
        for drafts in decision.found.values():
            deciding += sum([self.costs.drafts[draft.proposer].lookup_seconds for draft in drafts])
        wanted = ceil(deciding / (0.5 * share * plan.seconds)) - 1
        if wanted > 0:
            self._standing, self._stands_until = decision, self._step + 1 + min(wanted, _MAX_REPEATED)

    def _let_stand_plain(self, decision: Decision, situation: Situation) -> None:
        """Let a plain decision stand until a back-off ends."""
        if decision.has_drafts or any(state.settings.mode == "on" for state in situation.states):
            return
        due = [backoff.due for backoff in self._models.values()]
        due += [lookup.backoff.due for row in situation.auto for lookup in situation.states[row].lookups.values()]
        if self.budget.balance <= 0.0:
            due = [max(each, self._accounts.in_debt.due) for each in due]
            due.append(self._step + self.budget.steps_to_earn(-self.budget.balance))
        self._standing, self._stands_until = decision, min(due, default=1 << 60)

    def _still_holds(self, standing: Decision, requests: Sequence[Request], num_prefill: int) -> bool:
        if self._step >= self._stands_until or requests != standing.requests:
            return False
        if standing.plan is None:
            return True
        return not num_prefill and self._steps_without_plain < self._plain_after and self.budget.balance > 0.0

    def _again(self, standing: Decision) -> Decision:
        requests, plan = standing.requests, standing.plan
        choices = [Choice.plain()] * len(requests)
        if plan is None:
            return Decision(self._step, requests, choices, "idle", is_idle=True)
        assert standing.situation is not None
        situation = replace(standing.situation, step=self._step)
        decision = Decision(self._step, requests, choices, is_repeated=True, situation=situation, plan=plan)
        self._apply(decision, situation, plan)
        decision.reason += ", as before"
        return decision

    # ---- learning

    def learn(
        self,
        decision: Decision,
        outcomes: Sequence[Outcome],
        stats: StepStats,
        catch_up_seconds: float = 0.0,
        *,
        is_typical: bool = True,
    ) -> None:
        """Learn from a step's outcome and time; `catch_up_seconds` is the part of drafting spent on catching up.
        Costs are learned only if the time is typical."""
        if decision.trace is not None:
            decision.trace.add_outcomes([outcome.verdict for outcome in outcomes])
            decision.trace.seconds = stats.total_seconds
        situation = decision.situation
        if not decision.has_drafts:
            self._accounts.add_plain_step(stats, is_idle=decision.is_idle)
        if decision.is_idle:
            if stats.hidden_seconds and not stats.num_prefill_tokens and not stats.had_one_time_work:
                self._idle_steps, self._idle_seconds = self._idle_steps + 1, self._idle_seconds + stats.total_seconds
        elif situation is not None and self.costs is not None:
            self._learn_lookups(decision, situation, outcomes)
            self._learn_drafts(decision, situation, outcomes)
            if not decision.is_repeated:
                self._lookup_value.learn_own_seconds(stats)
            if decision.found:
                self._lookup_value.learn(decision, situation, outcomes, self.costs)
            if not stats.had_one_time_work:
                is_typical = is_typical and not stats.num_prefill_tokens
                self._learn_time(decision, situation, outcomes, stats, catch_up_seconds, is_typical=is_typical)
            if not decision.has_drafts:
                self._let_stand_plain(decision, situation)

    def _learn_lookups(self, decision: Decision, situation: Situation, outcomes: Sequence[Outcome]) -> None:
        """Learn from all looked-up drafts. Unused ones are compared with the emitted tokens."""
        every = 1 + (len(decision.found) - 1) // _MAX_LEARNED
        for turn, (row, drafts) in enumerate(decision.found.items(), decision.step):
            state, emitted = situation.states[row], outcomes[row].verdict.tokens
            for draft in drafts:
                if draft.tokens:
                    acceptance = self.acceptances[draft.proposer]
                    shift = acceptance.shift_of(state.shifts, draft.proposer, state.settings.log_odds, decision.step)
                    hits = common_length(draft.tokens, emitted)
                    tried = min(hits + 1, len(draft.tokens), len(emitted))
                    acceptance.learn(
                        state.settings.temperature, shift, draft.confidence, hits, tried, in_general=turn % every == 0
                    )

    def _learn_drafts(self, decision: Decision, situation: Situation, outcomes: Sequence[Outcome]) -> None:
        """Learn from the drafts that were made after the decision."""
        rows = [row for row, outcome in enumerate(outcomes) if outcome.choice.ask is not None]
        every = 1 + (len(rows) - 1) // _MAX_LEARNED
        for turn, row in enumerate(rows, decision.step):
            state, drafted, in_general = situation.states[row], outcomes[row].choice.draft, turn % every == 0
            if drafted is not None and (in_general or state.settings.mode == "auto"):
                self._learn_draft(decision.step, state, drafted, outcomes[row].verdict, in_general)

    def _learn_draft(self, step: int, state: RequestState, drafted: Draft, verdict: Verdict, in_general: bool) -> None:
        acceptance, name = self.acceptances[drafted.proposer], drafted.proposer
        temperature, log_odds = state.settings.temperature, state.settings.log_odds
        hits, num_drafted = verdict.num_accepted, len(drafted.tokens)
        tried = min(hits + 1, num_drafted)
        fates = [1.0] * hits + [0.0] * (tried - hits)
        if drafted.confidence:
            shift = acceptance.shift_of(state.shifts, name, log_odds, step)
            if hits == num_drafted < len(drafted.confidence):  # drafting stopped before an unlikely token
                fates.append(acceptance.chance(temperature, drafted.confidence[-1], shift.mean))
            acceptance.learn(temperature, shift, drafted.confidence, hits, tried, in_general=in_general)
        if fates:
            shift = acceptance.shift_of(state.forecast_shifts, name, log_odds, step)
            acceptance.learn_positions(temperature, shift, fates, num_drafted, in_general=in_general)

    def _learn_time(
        self,
        decision: Decision,
        situation: Situation,
        outcomes: Sequence[Outcome],
        stats: StepStats,
        catch_up_seconds: float,
        *,
        is_typical: bool,
    ) -> None:
        """Learn the costs of such a step, and book it."""
        assert self.costs is not None
        costs, rows, context = self.costs, situation.rows, situation.context
        num_tokens = rows + sum([outcome.verdict.num_drafted for outcome in outcomes])
        forward = costs.target.seconds(rows, num_tokens, context)
        seconds = stats.schedule_seconds + stats.forward_seconds + stats.verify_seconds
        if stats.num_prefill_tokens:  # its share is not due to decoding
            seconds *= forward / costs.target.seconds(rows, num_tokens + stats.num_prefill_tokens, context)
        seconds += stats.draft_seconds - catch_up_seconds
        kind = PLAIN if decision.plan is None else decision.plan.kind
        summed = forward + costs.schedule_seconds + costs.token_seconds * stats.num_emitted
        summed += self._drafting_seconds(outcomes, context)
        expected = self._times.factor(kind, rows) * summed
        if kind is PLAIN and self.begins_ahead and not stats.hidden_seconds:
            seconds = min(seconds, expected)  # a single plain step waits for the host, consecutive ones do not
        if is_typical and seconds > 0.0:
            if decision.plan is None and decision.has_drafts:  # of mode `on`: no kind that is planned
                costs.target.observe(rows, num_tokens, context, stats.forward_seconds + stats.hidden_seconds)
            else:
                surprise = self._times.observe(kind, rows, summed, seconds)
                costs.target.observe(rows, num_tokens, context, forward * exp(surprise))
            costs.observe_host(
                schedule_seconds=stats.schedule_seconds,
                verify_seconds=stats.verify_seconds,
                num_emitted=stats.num_emitted,
            )
        if decision.has_drafts:
            spent = seconds + catch_up_seconds + stats.speculation_seconds
            excused = max(0.0, seconds - _DISTURBED * expected)
            plain_step = self._plain_seconds(rows, context)
            time = SpentTime(spent, plain_step, excused, catch_up_seconds)
            self._accounts.book(situation, outcomes, time)
        elif decision.found and self.budget.balance <= 0.0:
            # In debt, lookups use at most half of what the budget earns; the other half reduces the debt.
            lost = stats.deciding_seconds / situation.plain_seconds
            self._accounts.in_debt.wait(decision.step, self.budget.steps_to_earn(2.0 * lost))

    def _drafting_seconds(self, outcomes: Sequence[Outcome], context: float) -> float:
        """The measured costs of the drafts that models made, without catching up."""
        assert self.costs is not None
        passes: dict[str, list[int]] = {}
        for outcome in outcomes:
            if outcome.choice.ask is not None and outcome.choice.draft is not None:
                passes.setdefault(outcome.choice.method, []).append(len(outcome.choice.draft.tokens))
        return sum(self.costs.drafts[name].seconds(len(each), max(each), context) for name, each in passes.items())

    def _learn_idle_steps(self, rows: int, context: float) -> None:
        """Learn the time of the idle steps since the last decision."""
        assert self.costs is not None
        if self._idle_steps:
            seconds = self._idle_seconds / self._idle_steps
            self._times.observe(PLAIN, rows, self.costs.plain_seconds(rows, context), seconds)
            self._idle_steps, self._idle_seconds = 0, 0.0

    def release(self, request: Request) -> None:
        """Forget a request that finished, was aborted or was preempted."""
        state = self._states.pop(request.id, None)
        if state is None:
            return
        if self.costs is not None:
            self._accounts.settle([request], [state], self._plain_step)
            self._planner.mean_output += 0.05 * (request.num_output - self._planner.mean_output)
        for shifts in (state.shifts, state.forecast_shifts):
            for name, shift in shifts.items():
                is_forecast = shifts is state.forecast_shifts
                self.acceptances[name].end(state.settings.temperature, shift, is_forecast=is_forecast)

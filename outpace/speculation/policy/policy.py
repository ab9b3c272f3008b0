"""Decides for each step which requests get drafts, from which proposer and how deep; depth 0 is plain decoding.

Mode `on` always drafts to the configured depth, `off` never drafts. Mode `auto` is a conservative bandit: plain
decoding is the safe arm with a known cost. A step runs the fastest expected plan (`planner.py`) that the budgets of the
engine and of its requests cover. Failed attempts are repeated at doubling intervals.

A decision stands for several steps, because deciding takes time: a plain one until something is due to be tried again,
a model's plan until the time of deciding is a small share. Its steps' times are learned when it ends. Occasional plain
steps keep the baseline up to date.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import ceil

from outpace.config import ResolvedConfig
from outpace.core import Draft, Request, StepStats, Verdict
from outpace.decoding.acceptance import common_length
from outpace.speculation.costs.curves import Costs, DraftCosts
from outpace.speculation.policy.acceptance import Acceptance
from outpace.speculation.policy.accounts import Accounts
from outpace.speculation.policy.budget import Backoff
from outpace.speculation.policy.decision import Decision
from outpace.speculation.policy.lookups import Lookups
from outpace.speculation.policy.planner import Plan, Planner, Situation, Stop
from outpace.speculation.policy.state import Choice, Mean, Outcome, RequestState, SpeculationSettings
from outpace.speculation.policy.times import PLAIN, SURPRISE, StepTimes
from outpace.speculation.policy.trace import StepTrace
from outpace.speculation.policy.tunables import TUNABLES
from outpace.speculation.proposers.base import DraftAsk, Proposer, depth_of, num_tokens

_TO_BE_SURE = 4  # plain steps that measure the machine after a surprise

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
        self._models = {name: Backoff() for name, each in proposers.items() if not each.is_lookup}
        self._times = StepTimes()
        self._own_seconds = Mean()  # of deciding anew and learning from it, without lookups
        self.keep_trace(trace_steps)
        self._states: dict[int, RequestState] = {}
        self._step = 0
        self._steps_without_plain = 0
        self._num_to_measure = 1  # plain steps, when it is time for one
        self._standing: Decision | None = None  # the latest decision; it holds until the step `_stands_until`
        self._stands_until = 0
        self.use_costs(costs)

    def use_costs(self, costs: Costs | None) -> None:
        """Without costs, `auto` decodes plainly: it cannot compare plans."""
        self.costs = costs
        if costs is not None:
            for name in self._proposers:
                if name != "none":  # a proposer without measured costs counts as free
                    costs.drafts.setdefault(name, DraftCosts())
            self._planner = Planner(costs, self._times, self.acceptances, self._proposers)
            self._lookups = Lookups(costs)

    def keep_trace(self, num_steps: int, max_rows: int | None = None) -> None:
        """Keep the traces of the latest `num_steps` steps, each of at most `max_rows` requests."""
        self.trace: deque[StepTrace] = deque(maxlen=num_steps)
        self._trace_rows = max_rows

    @property
    def plain_step_seconds(self) -> float | None:
        """Of the latest batch, expected; None before the first decision."""
        standing = self._standing
        return standing.situation.baseline_seconds if standing is not None and standing.situation is not None else None

    @property
    def spent_seconds(self) -> float:
        """Of decoding so far."""
        return self._accounts.spent_seconds

    @property
    def plain_seconds(self) -> float:
        """What decoding so far would have taken without speculation."""
        return self._accounts.plain_seconds

    @property
    def estimated_speedup(self) -> float | None:
        """Over everything since the start; None before the first step."""
        return self.plain_seconds / self.spent_seconds if self.spent_seconds > 0 else None

    def lookups(self, request: Request) -> tuple[str, ...]:
        """The lookup proposers that `auto` may use for this request."""
        settings = self._state(request).settings
        return settings.lookups if settings.mode == "auto" else ()

    # ---- deciding

    def decide(self, requests: Sequence[Request], look_up: LookUp, num_prefill: int = 0) -> Decision:
        """Make one choice for each decoding request. `look_up` returns drafts that need no model."""
        self._step += 1
        standing = self._standing
        if (
            standing is not None
            and self._step < self._stands_until
            and requests == standing.requests
            and not (standing.plan is not None and num_prefill)
        ):
            decision = self._again(standing)
        else:
            if standing is not None and standing.situation is not None and self.costs is not None:
                surprise = self._times.learn(standing.seen, standing.situation, standing.plan, self.costs)
                if standing.plan is not None and abs(surprise) > SURPRISE:  # the machine's speed may have changed
                    self._steps_without_plain, self._num_to_measure = TUNABLES.plain_every, _TO_BE_SURE
            decision = self._decide_anew(requests, look_up, num_prefill)
        if self.trace.maxlen:
            decision.trace = StepTrace.of(decision, self._trace_rows)
            self.trace.append(decision.trace)
        return decision

    def _again(self, standing: Decision) -> Decision:
        plan, situation = standing.plan, standing.situation
        if plan is None or situation is None:
            if not standing.is_repeated or self.trace.maxlen:  # each traced step has its own outcome
                self._standing = standing = Decision(
                    self._step, standing.requests, standing.choices, "idle",
                    is_repeated=True, situation=situation, seen=standing.seen,
                )  # fmt: skip
            standing.step = self._step
            return standing
        self._steps_without_plain += 1
        choices = [Choice.plain()] * len(standing.requests)
        decision = Decision(
            self._step, standing.requests, choices, is_repeated=True, situation=situation, plan=plan, seen=standing.seen
        )
        self._apply(decision, situation, plan)
        decision.reason += ", as before"
        return decision

    def _decide_anew(self, requests: Sequence[Request], look_up: LookUp, num_prefill: int) -> Decision:
        states = [self._state(request) for request in requests]
        decision = Decision(self._step, requests, self._forced(requests, states))
        situation = decision.situation = self._situation(decision, states, num_prefill)
        self._standing, self._stands_until = decision, 0
        if situation is not None and situation.auto:
            self._weigh(decision, situation, look_up)
        self._steps_without_plain = self._steps_without_plain + 1 if decision.plan is not None else 0
        return decision

    def _state(self, request: Request) -> RequestState:
        state = self._states.get(request.id)
        if state is None:
            settings = SpeculationSettings.of(request, self._config, self._proposers, self._can_speculate)
            state = self._states[request.id] = self._accounts.open(request, settings)
        return state

    def _forced(self, requests: Sequence[Request], states: Sequence[RequestState]) -> list[Choice]:
        """Choices that need no comparison: the configured depth for mode `on`, else plain."""
        choices = [Choice.plain()] * len(requests)
        if not self._is_crowded(len(requests)):
            for row, state in enumerate(states):
                settings = state.settings
                if settings.mode == "on" and settings.method != "none":
                    depth = min(settings.max_depth, requests[row].max_useful_depth)
                    if depth:
                        depth = num_tokens(self._proposers[settings.method], depth)
                        choices[row] = Choice(settings.method, depth, ask=DraftAsk(requests[row], depth))
        return choices

    def _is_crowded(self, num_running: int) -> bool:
        limit = self._config.disable_by_batch_size
        return limit is not None and num_running >= limit

    def _situation(self, decision: Decision, states: list[RequestState], num_prefill: int) -> Situation | None:
        """The facts a decision needs; None without costs, or if speculation is off for all requests."""
        costs, requests = self.costs, decision.requests
        if costs is None or all(state.settings.mode == "off" for state in states):
            return None
        rows, auto = len(requests), list[int]()
        context = sum([len(request.tokens) for request in requests]) / rows
        for row, (request, state) in enumerate(zip(requests, states, strict=True)):
            state.budget.earn(request.num_output - state.num_earned)
            state.num_earned = request.num_output
            if state.settings.mode == "auto" and request.max_useful_depth and not self._is_crowded(rows):
                auto.append(row)
        fixed = sum([choice.depth for choice in decision.choices])
        emitted = rows + (self._expected_of_forced(decision.choices, states) if fixed else 0.0)
        least = rows + num_prefill + fixed
        host = costs.schedule_seconds + costs.token_seconds * emitted
        forward = costs.target.seconds(rows, least - num_prefill, context)
        plain_seconds = (host + forward) * self._times.factor(PLAIN, rows)
        baseline_seconds = plain_seconds if not fixed else self._plain_seconds(rows, context)
        if num_prefill:  # prefill happens with or without drafts, so its time is not charged
            host -= costs.target.seconds(rows, least, context) - forward
        own_seconds, share = self._own_seconds.value, TUNABLES.deciding_share * self._config.allowed_loss
        return Situation(
            self._step, rows, requests, states, context, baseline_seconds, plain_seconds, auto, least, host, emitted,
            costs.token_seconds,
            own_seconds,
            min(own_seconds, share * plain_seconds) if share else own_seconds,
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
                depth = depth_of(self._proposers[choice.method], choice.depth)
                gain = acceptance.forecast(settings.temperature, depth, settings.log_odds)[-1]
                choice.expected = 1.0 + gain
                total += gain
        return total

    def _weigh(self, decision: Decision, situation: Situation, look_up: LookUp) -> None:
        """Look up drafts for `auto` requests, compare plans, and apply the best one that budgets cover."""
        if self._steps_without_plain >= TUNABLES.plain_every:
            decision.reason = "a plain step, to measure it"
            self._stands_until = self._step + self._num_to_measure
            self._num_to_measure = 1
            return
        asks = self._lookups.due(situation, self.budget)
        if asks:
            by_id = look_up(asks)
            decision.found = {row: by_id[r.id] for row, r in enumerate(situation.requests) if r.id in by_id}
        plan = self._best(decision, situation)
        if plan is not None:
            decision.plan, plan.stops = plan, self._planner.stops(situation, plan)
            self._apply(decision, situation, plan)
            self._let_stand(decision, situation, plan)

    def _best(self, decision: Decision, situation: Situation) -> Plan | None:
        """The fastest plan that budgets cover; None if no covered plan is faster than plain decoding."""
        plain_speed = situation.emitted / situation.plain_seconds
        decision.reason = "nothing beats plain decoding"
        base, best = Plan(), None
        if any(draft.tokens for drafts in decision.found.values() for draft in drafts):
            base = self._planner.with_lookups(situation, decision.found)
            if base.speed > plain_speed and self._covers(situation, base):
                best = base
            decision.is_refused = base.speed > plain_speed and best is None
        for name, backoff in self._models.items():
            if backoff.due > self._step:
                continue
            plans = self._planner.with_model(situation, name, best or Plan(), self.budget.balance)
            covered = next((plan for plan in plans if self._covers(situation, plan)), None)
            if covered is not None:
                backoff.succeed()
                if best is None or covered.speed > best.speed:
                    best = covered
                continue
            backoff.fail(self._step)
            if self.budget.balance > 0.0:  # a debt is evidence too: nothing would pay for trying again
                self.acceptances[name].forget()
            decision.is_refused = decision.is_refused or bool(plans)
        if best is None and decision.is_refused:
            decision.reason = "no budget covers the best plan"
        return best

    def _covers(self, situation: Situation, plan: Plan) -> bool:
        lower_gain, is_proven = self._planner.lower_gain(situation, plan), True
        if plan.model is not None and plan.catch_up_seconds:
            acceptance, states = self.acceptances[plan.model], situation.states
            is_proven = all(acceptance.is_proven(states[row].settings.temperature) for row in plan.depths)
        return self._accounts.covers(situation, plan, lower_gain, is_proven=is_proven)

    def _let_stand(self, decision: Decision, situation: Situation, plan: Plan) -> None:
        """Let a model's plan stand for as many steps as keep deciding at its share of the time. A plain decision is let
        stand when the step's outcome is known."""
        share = TUNABLES.deciding_share * self._config.allowed_loss
        if not plan.is_repeatable or not share:
            return
        deciding = self._own_seconds.value
        for drafts in decision.found.values():
            deciding += sum([self._planner.costs.drafts[draft.proposer].lookup_seconds for draft in drafts])
        until_plain = 1 + TUNABLES.plain_every - self._steps_without_plain
        num_steps = min(ceil(deciding / (share * plan.seconds)), TUNABLES.longest_wait, until_plain)
        self._stands_until = self._step + num_steps

    def _let_stand_plain(self, decision: Decision, situation: Situation) -> None:
        """Let a plain decision stand until a back-off ends."""
        if decision.has_drafts or any(state.settings.mode == "on" for state in situation.states):
            return
        due = [self._step + TUNABLES.plain_every, *(backoff.due for backoff in self._models.values())]
        due += [state.lookup.due for row in situation.auto if (state := situation.states[row]).settings.lookups]
        self._stands_until = max(self._stands_until, min(due))

    # ---- applying a plan

    def _apply(self, decision: Decision, situation: Situation, plan: Plan) -> None:
        """Turn a plan into choices."""
        speed = (situation.emitted + sum(plan.gains.values())) / plan.seconds
        gain = speed * situation.plain_seconds / situation.emitted
        decision.reason = f"expected {gain:.2f} of plain"
        choices, gains, lookups, stops = decision.choices, plan.gains, plan.lookups, plan.stops
        for row, planned in plan.depths.items():
            request = situation.requests[row]
            depth, expected = min(planned, request.max_useful_depth), 1.0 + gains[row]
            if not depth:  # a repeated plan, and the request is about to end
                continue
            if row in lookups:
                draft = lookups[row]
                choices[row] = Choice(draft.proposer, depth, draft, None, expected)
            else:
                assert plan.model is not None
                stop = Stop(*stops, situation.states[row].settings.temperature) if stops is not None else None
                depth = num_tokens(self._proposers[plan.model], depth)
                choices[row] = Choice(plan.model, depth, None, DraftAsk(request, depth, stop), expected)

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
        if situation is None:
            return
        has_drafts = not decision.is_idle and decision.has_drafts
        if not decision.is_repeated:
            self._own_seconds.add(max(0.0, stats.deciding_seconds - stats.lookup_seconds))
        if not stats.had_one_time_work:
            seconds = stats.schedule_seconds + stats.forward_seconds + stats.verify_seconds
            num_drafted = sum([outcome.verdict.num_drafted for outcome in outcomes]) if has_drafts else 0
            if stats.num_prefill_tokens:  # its share is not due to decoding
                num_tokens, target = situation.rows + num_drafted, situation.target
                whole = target.seconds(situation.rows, num_tokens + stats.num_prefill_tokens, situation.context)
                seconds *= target.seconds(situation.rows, num_tokens, situation.context) / whole
            seconds += stats.draft_seconds - catch_up_seconds
            if is_typical and not stats.num_prefill_tokens:
                if self.begins_ahead and not stats.hidden_seconds and not has_drafts:
                    seconds = min(seconds, situation.plain_seconds)  # alone, a plain step waits for the host
                decision.seen.add(stats, seconds, num_drafted)
                if has_drafts and decision.plan is not None and decision.plan.model is not None:
                    asked = [outcome.verdict.depth for outcome in outcomes if outcome.choice.ask is not None]
                    decision.seen.num_passes += max(asked, default=0)
            if not has_drafts:
                self._accounts.book_plain(situation, seconds, stats, is_repeated=decision.is_repeated)
            else:
                spent = seconds + stats.speculation_seconds
                self._accounts.book(situation, decision.plan, outcomes, spent, catch_up_seconds)
        if not decision.is_idle:
            self._learn_acceptance(decision, situation, outcomes)
            if decision.found:
                self._lookups.learn(decision, outcomes)
            if not has_drafts:
                self._let_stand_plain(decision, situation)

    def _learn_acceptance(self, decision: Decision, situation: Situation, outcomes: Sequence[Outcome]) -> None:
        """Learn from all drafts whose tokens can be compared with the emitted ones, used or not."""
        drafts = [(row, draft) for row, found in decision.found.items() for draft in found if draft.tokens]
        for row, outcome in enumerate(outcomes):
            if outcome.choice.ask is not None and outcome.choice.draft is not None:
                drafts.append((row, outcome.choice.draft))
        for row, draft in drafts:
            self._learn_draft(decision.step, situation.states[row], draft, outcomes[row].verdict)

    def _learn_draft(self, step: int, state: RequestState, draft: Draft, verdict: Verdict) -> None:
        acceptance, temperature = self.acceptances[draft.proposer], state.settings.temperature
        shift = acceptance.shift_of(state.shifts, draft.proposer, state.settings.log_odds, step)
        is_lookup = self._proposers[draft.proposer].is_lookup
        hits = common_length(draft.tokens, verdict.tokens) if is_lookup else verdict.num_accepted
        fates = [1.0] * hits + [0.0] * (hits < min(draft.depth, len(verdict.tokens)))
        if is_lookup:
            acceptance.learn(temperature, shift, draft.confidence, fates)
            return
        if draft.confidence:
            acceptance.learn(temperature, None, draft.confidence, fates)
        if hits == draft.depth < len(draft.confidence):  # drafting stopped before an unlikely token
            fates.append(acceptance.chance(temperature, draft.confidence[-1]))
        acceptance.learn(temperature, shift, (), fates)

    def release(self, request: Request) -> None:
        """Forget a request that finished, was aborted or was preempted."""
        state = self._states.pop(request.id, None)
        if state is None:
            return
        self._accounts.settle(request, state)
        if self.costs is not None:
            self._planner.mean_output += TUNABLES.smoothing * (request.num_output - self._planner.mean_output)
        for name, shift in state.shifts.items():
            by_position = not self._proposers[name].is_lookup
            self.acceptances[name].end(state.settings.temperature, shift, by_position=by_position)

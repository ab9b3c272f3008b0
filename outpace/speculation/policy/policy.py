"""Whether to speculate, for whom, with which proposer and how deep; depth 0 is an ordinary answer.

`on` drafts to the depth asked for, `off` never. `auto` is a conservative bandit. Plain decoding is the safe arm, whose
cost is known. A step runs the plan that is expected to be fastest (`planner.py`), if what it would lose at the lower
bound of acceptance (`acceptance.py`) is covered by the engine's budget and by that of every request in it
(`budget.py`). Where it is not, the plan is tried on a smaller scale; and what was refused or lost is tried again at
doubling intervals. A plain step now and then keeps the baseline true.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from outpace.acceptance import common_length
from outpace.config import ResolvedConfig
from outpace.core import Draft, Request, StepStats
from outpace.speculation.base import DraftAsk, Proposer
from outpace.speculation.costs import Costs, DraftCosts
from outpace.speculation.policy.acceptance import Acceptance
from outpace.speculation.policy.accounts import Accounts
from outpace.speculation.policy.baseline import Baseline
from outpace.speculation.policy.budget import Backoff, Budget
from outpace.speculation.policy.coverage import Coverage
from outpace.speculation.policy.decision import Decision
from outpace.speculation.policy.lookup_value import LookupValue
from outpace.speculation.policy.planner import Plan, Planner, Situation, Stop
from outpace.speculation.policy.state import Choice, Lookup, Outcome, Recent, RequestState, Wishes
from outpace.speculation.policy.trace import StepTrace
from outpace.speculation.policy.tunables import TUNABLES

_FIRST_PLAIN = 8  # steps with drafts after which the first is plain; then twice as many, up to `plain_every`
_MOST_WEIGHED = 512  # tokens of lookups weighed in a step: the more requests, the fewer of each
_MOST_LEARNED = 8  # requests that teach general acceptance in a step; where there are more, they take turns
_MOST_PLANS = 3  # of a model that are looked at in a step

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
        """`begins_ahead`: the runner begins a plain step that follows others before it is asked for."""
        self._config = config
        self._proposers = proposers
        self._can_speculate = can_speculate
        self._begins_ahead = begins_ahead
        self.acceptances = {name: Acceptance(is_lookup=each.is_lookup) for name, each in proposers.items()}
        self._accounts = Accounts(config.allowed_loss)
        self.budget = self._accounts.budget
        self.trace: deque[StepTrace] = deque(maxlen=trace_steps)
        self._states: dict[int, RequestState] = {}
        self._step = 0
        self._lookup_value = LookupValue(name for name, each in proposers.items() if each.is_lookup and name != "none")
        self._models = {name: Backoff() for name, each in proposers.items() if not each.is_lookup}
        self._steps_without_plain, self._plain_after = 0, _FIRST_PLAIN
        self._idle_requests: list[Request] = []
        self._idle_until = 0  # the first step in which something is looked at again, as far as is known
        self._is_in_debt = False  # and idle for that reason: new requests change nothing
        self._plain_step = 1.0  # seconds, when it was last known
        self._num_running = 1
        self.use_costs(costs)

    def use_costs(self, costs: Costs | None) -> None:
        """Without costs there is nothing to weigh with: `auto` decodes plainly."""
        self.costs = costs
        if costs is not None:
            for name in (*self._lookup_value.names, *self._models):  # what was not measured is taken to cost nothing
                costs.drafts.setdefault(name, DraftCosts())
            self._planner = Planner(costs, self.acceptances, self._proposers)
            self._coverage = Coverage(self._accounts, self._planner, self.acceptances)
            self._baseline = Baseline(costs, begins_ahead=self._begins_ahead)

    def keep_trace(self, num_steps: int) -> None:
        """From now on, remember why the latest steps did what they did."""
        self.trace = deque(maxlen=num_steps)

    def lookups(self, request: Request) -> tuple[str, ...]:
        """Which proposers may be asked for lookups, sooner or later."""
        wishes = self._state(request).wishes
        return wishes.lookups if wishes.mode == "auto" else ()

    # ---- deciding

    def decide(self, requests: Sequence[Request], look_up: LookUp, num_prefill: int = 0) -> Decision:
        """One choice for each decoding request. `look_up` is asked for drafts that cost no model."""
        self._step += 1
        self._num_running = len(requests)
        if self._step < self._idle_until and self._stays_idle(requests):
            decision = Decision(self._step, requests, [Choice.plain()] * len(requests), "idle", is_idle=True)
        else:
            self._idle_until = 0
            decision = Decision(self._step, requests, self._forced(requests))
            situation = decision.situation = self._situation(decision, num_prefill)
            if situation is not None and situation.auto:
                self._weigh(decision, situation, look_up)
            self._steps_without_plain = self._steps_without_plain + 1 if decision.plan is not None else 0
        if self.trace.maxlen:
            plain_seconds = decision.situation.plain_seconds if decision.situation is not None else 0.0
            decision.trace = StepTrace.of(requests, decision.choices, plain_seconds, decision.reason)
            self.trace.append(decision.trace)
        return decision

    def _state(self, request: Request) -> RequestState:
        state = self._states.get(request.id)
        if state is None:
            wishes = Wishes.of(request, self._config, self._proposers, self._can_speculate)
            budget = Budget(TUNABLES.request_grant, self._config.allowed_loss)
            lookups = {name: Lookup() for name in wishes.lookups}
            state = RequestState(wishes, budget, lookups, Recent(), self._accounts.plain_time)
            self._states[request.id] = state
            if wishes.mode == "auto":
                self.budget.grant(TUNABLES.newcomer_grant / self._num_running)
            for backoff in self._models.values():
                backoff.due = 0  # a text of another kind, perhaps
        return state

    def _is_crowded(self, num_running: int) -> bool:
        limit = self._config.disable_by_batch_size
        return limit is not None and num_running >= limit

    def _forced(self, requests: Sequence[Request]) -> list[Choice]:
        """What is done without weighing: the depth asked for, or nothing."""
        choices = [Choice.plain()] * len(requests)
        states = [self._state(request) for request in requests]
        if self._is_crowded(len(requests)):
            return choices
        for i, (request, state) in enumerate(zip(requests, states, strict=True)):
            wishes = state.wishes
            if wishes.mode == "on" and wishes.method != "none":
                depth = min(wishes.max_depth, request.max_useful_depth)
                if depth:
                    choices[i] = Choice(wishes.method, depth, ask=DraftAsk(request, depth))
        return choices

    def _situation(self, decision: Decision, num_prefill: int) -> Situation | None:
        """What is known before deciding; None where all requests decode plainly by their own wish."""
        costs, requests = self.costs, decision.requests
        states = [self._states[request.id] for request in requests]
        if costs is None or all(state.wishes.mode == "off" for state in states):
            return None
        rows = len(requests)
        context = sum([len(request.tokens) for request in requests]) / rows
        self._plain_step = costs.plain_seconds(rows, context)
        self._accounts.settle(requests, states, self._plain_step)
        self._baseline.end_idling(rows, context)
        auto = []
        if not self._is_crowded(rows):
            auto = [i for i, s in enumerate(states) if s.wishes.mode == "auto" and requests[i].max_useful_depth]
        fixed = sum([choice.depth for choice in decision.choices])
        emitted = rows + (self._expected_of_forced(decision.choices, states) if fixed else 0.0)
        least = rows + num_prefill + fixed
        host = costs.schedule_seconds + costs.judge_seconds * emitted
        forward = costs.target.seconds(rows, least - num_prefill, context)
        plain_seconds = host + forward
        if num_prefill:  # prompts are read in any case: what they take is nobody's
            host -= costs.target.seconds(rows, least, context) - forward
        # Plain steps may be faster than the costs of their parts say, where the host's part is done meanwhile.
        plain_seconds *= min(1.0, self._baseline.ratio(rows, context))
        return Situation(
            self._step, requests, states, context, plain_seconds, auto, least, host, emitted, costs.judge_seconds,
            self._lookup_value.own_seconds, self._accounts.recent_speedup * emitted / plain_seconds,
        )  # fmt: skip

    def _price_tokens(self, situation: Situation, found: Mapping[int, Sequence[Draft]]) -> None:
        """What the target takes for every number of draft tokens that may be taken."""
        assert self.costs is not None
        most = 0
        if found:
            each = max(4, _MOST_WEIGHED // len(found))
            most = sum([min(each, max([len(draft.tokens) for draft in drafts])) for drafts in found.values()])
        depth = max([self._planner.deepest(name) for name in self._models], default=0)
        most = max(most, situation.rows, depth * len(situation.auto) if self._models else 0)
        least = situation.num_tokens
        most = least + min(max(0, self._config.max_step_tokens - least), most)
        by_tokens = self.costs.target.by_tokens(situation.rows, least, most, situation.context)
        situation.seconds = [situation.host_seconds + each for each in by_tokens]

    def _expected_of_forced(self, choices: Sequence[Choice], states: Sequence[RequestState]) -> float:
        total = 0.0
        for state, choice in zip(states, choices, strict=True):
            if choice.depth:
                acceptance, wishes = self.acceptances[choice.method], state.wishes
                gain = acceptance.forecast(wishes.temperature, choice.depth, wishes.log_odds)[-1]
                choice.expected = 1.0 + gain
                total += gain
        return total

    def _weigh(self, decision: Decision, situation: Situation, look_up: LookUp) -> None:
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
        self._price_tokens(situation, decision.found)
        plan = self._best(decision, situation)
        if plan is not None:
            decision.plan = plan
            self._planner.taken(plan)
            self._take(decision, situation, plan)

    def _best(self, decision: Decision, situation: Situation) -> Plan | None:
        """The fastest plan that is covered; None where nothing is faster than plain decoding and covered."""
        plain_speed = situation.emitted / situation.plain_seconds
        base = self._planner.with_lookups(situation, decision.found) if decision.found else Plan()
        best = base if base.speed > plain_speed and self._coverage.holds(situation, base) else None
        decision.is_refused = base.speed > plain_speed and best is None
        if decision.is_refused:
            situation.rate = plain_speed  # what lookups have brought lately, they cannot bring now
        for name, backoff in self._models.items():
            if backoff.due > self._step:
                continue
            fastest = covered = None
            for plan in islice(self._planner.with_model(situation, name, best or Plan()), _MOST_PLANS):
                if plan.speed <= plain_speed:
                    break
                fastest = fastest or plan
                if self._coverage.holds(situation, plan):
                    covered = plan
                    break
            if covered is not None:
                backoff.succeed()
                if best is None or covered.speed > best.speed:
                    best = covered
                continue
            backoff.fail(self._step)
            self.acceptances[name].forget()
            if fastest is not None and (best is None or fastest.speed > best.speed):
                for trial in self._planner.smaller(situation, fastest):
                    if self._coverage.holds(situation, trial):
                        decision.is_trial = True
                        return trial
                decision.is_refused = best is None
        if best is None and decision.is_refused:
            decision.reason = "no budget covers the best plan"
        return best

    def _take(self, decision: Decision, situation: Situation, plan: Plan) -> None:
        """Put a plan into choices."""
        speed = (situation.emitted + sum(plan.gains.values())) / plan.seconds
        gain = speed * situation.plain_seconds / situation.emitted
        decision.reason = f"expected {gain:.2f} of plain" + (", a trial" if decision.is_trial else "")
        at_least = plan.speed * plan.slot_seconds
        to_go_on = at_least
        if plan.model is not None:
            assert self.costs is not None
            drafting = len(plan.depths) - len(plan.lookups)
            passes = self.costs.drafts[plan.model]
            further = passes.seconds(drafting, 2, situation.context) - passes.seconds(drafting, 1, situation.context)
            to_go_on = plan.speed * (plan.slot_seconds + further / drafting)
        for row, depth in plan.depths.items():
            request, state = situation.requests[row], situation.states[row]
            draft = plan.lookups.get(row)
            if draft is not None:
                choice = Choice(draft.proposer, depth, draft=draft)
            else:
                assert plan.model is not None
                wishes = state.wishes
                acceptance = self.acceptances[plan.model]
                own = acceptance.own(state.own, plan.model, wishes.log_odds, decision.step)
                stop = Stop(acceptance, wishes.temperature, own.mean, at_least, to_go_on)
                choice = Choice(plan.model, depth, ask=DraftAsk(request, depth, stop))
            choice.expected = 1.0 + plan.gains[row]
            decision.choices[row] = choice

    # ---- learning

    def learn(self, decision: Decision, outcomes: Sequence[Outcome], stats: StepStats, catch_up_seconds: float) -> None:
        """What the target said in a step and what it took; `catch_up_seconds` is what of drafting was catching up."""
        if decision.trace is not None:
            decision.trace.add_outcomes([outcome.verdict for outcome in outcomes])
            decision.trace.seconds = stats.total_seconds
        situation = decision.situation
        if not decision.has_drafts:
            self._accounts.add_plain_step(stats)
        if decision.is_idle:
            self._baseline.idle(stats)
        elif situation is not None and self.costs is not None:
            every = 1 + len(outcomes) // _MOST_LEARNED
            for row, outcome in enumerate(outcomes):
                self._learn_acceptance(decision, row, outcome, in_general=(row + decision.step) % every == 0)
            self._lookup_value.learn_own_seconds(stats)
            if decision.found:
                self._lookup_value.learn(decision, situation, outcomes, self.costs)
            if not stats.has_prepared:
                self._learn_time(decision, situation, outcomes, stats, catch_up_seconds)
            self._begin_idling(decision, situation)

    def _learn_acceptance(self, decision: Decision, row: int, outcome: Outcome, *, in_general: bool) -> None:
        situation = decision.situation
        assert situation is not None
        state, said = situation.states[row], outcome.verdict.tokens
        if state.wishes.mode == "off" or (state.wishes.mode == "on" and not in_general):
            return
        temperature, shift = state.wishes.temperature, state.wishes.log_odds
        for draft in decision.found.get(row, ()):  # compared with what was said, used or not: that costs no slot
            if draft.tokens:
                acceptance = self.acceptances[draft.proposer]
                own = acceptance.own(state.own, draft.proposer, shift, decision.step)
                hits = common_length(draft.tokens, said)
                tried = min(hits + 1, len(draft.tokens), len(said))
                acceptance.learn(temperature, own, draft.confidence, hits, tried, in_general=in_general)
        drafted = outcome.choice.draft
        if outcome.choice.ask is None or drafted is None:
            return
        acceptance = self.acceptances[drafted.proposer]
        hits, num_drafted = outcome.verdict.num_accepted, len(drafted.tokens)
        tried = min(hits + 1, num_drafted)
        fates = [float(i < hits) for i in range(tried)]
        if drafted.confidence:
            own = acceptance.own(state.own, drafted.proposer, shift, decision.step)
            if hits == num_drafted < len(drafted.confidence):  # it stopped before a token it was not sure of
                fates.append(acceptance.chance(temperature, drafted.confidence[-1], own.mean))
            acceptance.learn(temperature, own, drafted.confidence, hits, tried, in_general=in_general)
        if fates:
            own = acceptance.own(state.own_forecasts, drafted.proposer, shift, decision.step)
            acceptance.learn_positions(temperature, own, fates, num_drafted, in_general=in_general)

    def _learn_time(
        self,
        decision: Decision,
        situation: Situation,
        outcomes: Sequence[Outcome],
        stats: StepStats,
        catch_up_seconds: float,
    ) -> None:
        if decision.has_drafts:
            self._accounts.book(decision, situation, outcomes, stats, self._baseline, catch_up_seconds)
            return
        if not stats.num_prefill_tokens:
            self._baseline.observe(situation.rows, situation.context, stats)
        if decision.found and self.budget.balance <= 0.0:
            # Half of what the budget hands out may go into looking, so that the debt is paid back all the same.
            lost = stats.deciding_seconds / situation.plain_seconds
            self._accounts.in_debt.wait(decision.step, self.budget.steps_to_earn(2.0 * lost))

    # ---- steps in which nothing is looked at

    def _begin_idling(self, decision: Decision, situation: Situation) -> None:
        """Until something is due, steps are plain without a look: deciding takes time, too."""
        if decision.has_drafts or any(state.wishes.mode == "on" for state in situation.states):
            return
        self._is_in_debt = self.budget.balance <= 0.0
        due = [backoff.due for backoff in self._models.values()]
        due += [lookup.backoff.due for row in situation.auto for lookup in situation.states[row].lookups.values()]
        if self._is_in_debt:
            due = [max(each, self._accounts.in_debt.due) for each in due]
            due.append(self._step + self.budget.steps_to_earn(-self.budget.balance))
        self._idle_until, self._idle_requests = min(due, default=1 << 60), list(decision.requests)

    def _stays_idle(self, requests: Sequence[Request]) -> bool:
        """Whether a batch can be idle that was to be; another one only where there is no budget for a look at it."""
        if requests == self._idle_requests:
            return True
        if not self._is_in_debt:
            return False
        new = [self._state(request) for request in requests if request.id not in self._states]
        self._idle_requests = list(requests)
        return not any(state.wishes.mode == "on" for state in new)

    def release(self, request: Request) -> None:
        """The request is over, or has lost its place."""
        state = self._states.pop(request.id, None)
        if state is None:
            return
        if self.costs is not None:
            self._accounts.settle([request], [state], self._plain_step)
            self._planner.mean_output += 0.05 * (request.num_output - self._planner.mean_output)
        for owns in (state.own, state.own_forecasts):
            for name, own in owns.items():
                self.acceptances[name].end(own)

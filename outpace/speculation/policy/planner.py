"""Finds the fastest plan for a step: which draft tokens the target verifies, and the expected gain.

Lookups: each looked-up token has a chance of being reached and accepted. The planner takes the likeliest tokens of the
batch, as many as maximise expected tokens per second. A token is never likelier than the one before it, so each draft
contributes a prefix. Every count is tried, because step costs rise in jumps.

Models: drafts are priced before they are made, for several depths, for all requests or for as many as the budget can
pay to catch up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import neg
from typing import NamedTuple

from outpace.core import Draft, Request
from outpace.speculation.costs.curves import Costs, StepCosts
from outpace.speculation.policy.acceptance import Acceptance
from outpace.speculation.policy.state import RequestState
from outpace.speculation.policy.times import Kind, StepTimes
from outpace.speculation.policy.tunables import TUNABLES
from outpace.speculation.proposers.base import Proposer, num_tokens

_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # tried for a model
_LEAST_SURVIVAL = 0.05  # a token with a lower chance of being reached and accepted is never worth its cost
_MAX_LOOKUP_TOKENS = 512  # looked-up tokens considered in a step
_LOOKUPS = Kind(is_mixed=True)
_ALWAYS_UNCACHED = 2  # tokens: a fully accepted draft leaves two, which is not catching up


@dataclass(slots=True)
class Situation:
    """The facts about a step before the decision."""

    step: int
    rows: int  # decoding requests
    requests: Sequence[Request]
    states: list[RequestState]
    context: float  # mean number of tokens per request
    baseline_seconds: float  # of a plain step of these requests
    plain_seconds: float  # of this step without `auto` drafts and without prefill, but with those of mode `on`
    auto: list[int]  # rows whose drafts the policy chooses
    num_tokens: int  # computed without `auto` drafts, prefill included
    host_seconds: float  # host part of the step, corrected for prefill
    emitted: float  # expected tokens without `auto` drafts
    token_seconds: float  # host time per emitted token
    own_seconds: float  # time of deciding anew, as for lookups in every step
    repeated_own_seconds: float  # the same per step of a plan that is repeated
    max_drafted: int  # draft tokens that the step has room for
    target: StepCosts

    @property
    def slot_seconds(self) -> float:
        """Target time per draft token, if every request verified one."""
        return self.more_seconds(self.rows, self.rows)

    def seconds(self, num_drafted: int) -> float:
        """The forward pass and the host, with so many draft tokens."""
        return self.host_seconds + self.target.seconds(self.rows, self.num_tokens + num_drafted, self.context)

    def more_seconds(self, num_drafted: int, last: int) -> float:
        """Target time of each of the `last` draft tokens, of `num_drafted`."""
        return max(0.0, self.seconds(num_drafted) - self.seconds(num_drafted - last)) / last


@dataclass(slots=True)
class Plan:
    """Drafts for some rows: depth, proposer, and expected gain and time."""

    depths: dict[int, int] = field(default_factory=dict)  # by row
    gains: dict[int, float] = field(default_factory=dict)  # draft tokens expected to be accepted
    lookups: dict[int, Draft] = field(default_factory=dict)
    model: str | None = None  # drafts for the rows without a lookup
    depth: int = 0  # of the model's drafts
    seconds: float = 0.0  # of the step, without catching up
    catch_up_seconds: float = 0.0  # the model needs these first
    steps_left: float = TUNABLES.payback_steps  # in which it has to repay what it costs beyond a budget
    speed: float = 0.0  # expected tokens per second
    is_mixed: bool = False  # not all requests have drafts of the model
    stops: tuple[Acceptance, float, float] | None = None  # what ends a request's draft early: arguments of `Stop`

    @property
    def kind(self) -> Kind:
        return Kind(self.model, self.depth, self.is_mixed)

    @property
    def is_repeatable(self) -> bool:
        """Whether the next step can run it again: lookups would have to be made anew."""
        return self.model is not None and not self.lookups

    def needed_gain(self, plain_seconds: float, balance: float) -> float:
        """Accepted draft tokens, per token emitted without drafts, that are needed to lose at most `balance` plain
        steps. A debt, catching up included, has to be repaid in the steps that are left."""
        debt = self.catch_up_seconds / plain_seconds - balance
        return self.seconds / plain_seconds - 1.0 + (debt / self.steps_left if debt > 0.0 else debt)


class _Candidate(NamedTuple):
    """A request that a model may draft for."""

    num_uncached: int  # tokens to catch up on
    row: int
    room: int  # the largest depth
    totals: list[float]  # expected accepted tokens, by depth; equally long for all


class Planner:
    def __init__(
        self,
        costs: Costs,
        times: StepTimes,
        acceptances: Mapping[str, Acceptance],
        proposers: Mapping[str, Proposer],
    ) -> None:
        self.costs = costs
        self._times = times
        self._acceptances = acceptances
        self._proposers = proposers
        self.mean_output = 128.0  # recent mean output length, in tokens

    # ---- drafts that were looked up

    def with_lookups(self, situation: Situation, found: Mapping[int, Sequence[Draft]]) -> Plan:
        """The best plan with looked-up drafts only; it may be empty. `found` is by row."""
        survival: dict[int, list[float]] = {}
        best: dict[int, Draft] = {}
        for row, drafts in found.items():
            most, state = 0.0, situation.states[row]
            temperature, log_odds = state.settings.temperature, state.settings.log_odds
            for draft in drafts:
                acceptance = self._acceptances[draft.proposer]
                shift = acceptance.shift_of(state.shifts, draft.proposer, log_odds, situation.step)
                chances = acceptance.survival(temperature, draft.confidence, shift.mean, _LEAST_SURVIVAL)
                expected = sum(chances)
                if expected > most:
                    most, survival[row], best[row] = expected, chances, draft
        return self._take_likeliest(situation, survival, best)

    def _take_likeliest(
        self, situation: Situation, survival: Mapping[int, list[float]], drafts: Mapping[int, Draft]
    ) -> Plan:
        """Take the likeliest tokens, as many as maximise tokens per second."""
        ranked = [chance for chances in survival.values() for chance in chances]
        ranked.sort(reverse=True)
        del ranked[min(_MAX_LOOKUP_TOKENS, situation.max_drafted) :]
        least, rows = situation.num_tokens + 1, situation.rows
        passes = situation.target.by_tokens(rows, least, least + len(ranked), situation.context, situation.host_seconds)
        own_seconds, token_seconds, emitted = situation.own_seconds, situation.token_seconds, situation.emitted
        factor = self._times.factor(_LOOKUPS, rows)
        best, best_speed, best_seconds = 0, emitted / situation.plain_seconds, situation.plain_seconds
        gain = 0.0
        for count, (chance, seconds) in enumerate(zip(ranked, passes, strict=False), 1):
            gain += chance
            taken = factor * (seconds + token_seconds * gain) + own_seconds
            if emitted + gain > best_speed * taken:
                best, best_speed, best_seconds = count, (emitted + gain) / taken, taken
        plan = Plan(is_mixed=True, seconds=best_seconds, speed=best_speed)
        if best:
            rarest = ranked[best - 1]
            num_least = best - ranked.index(rarest)  # of the tokens with the least chance, so many are taken
            for row, chances in survival.items():
                depth = bisect_left(chances, -rarest, key=neg)
                while depth < len(chances) and num_least and chances[depth] == rarest:
                    depth, num_least = depth + 1, num_least - 1
                if depth:
                    plan.depths[row], plan.lookups[row] = depth, drafts[row]
                    plan.gains[row] = sum(chances[:depth])
        return plan

    # ---- drafts of a model

    def with_model(self, situation: Situation, name: str, base: Plan, balance: float) -> list[Plan]:
        """Plans with a model's drafts, fastest first: for the requests without a better lookup in `base`, and for all
        requests alike; of them all, or only as many as can catch up within `balance` plain steps."""
        plans = list[Plan]()
        for kept in (base, Plan()) if base.lookups else (base,):
            candidates = self._candidates(situation, name, kept)
            num_paid = self._num_paid(situation, name, candidates, balance)
            for group in (candidates, candidates[:num_paid]) if num_paid < len(candidates) else (candidates,):
                plans += self._plans(situation, name, kept, group)
        plans.sort(key=lambda plan: plan.speed, reverse=True)
        return plans

    def _candidates(self, situation: Situation, name: str, base: Plan) -> list[_Candidate]:
        """Requests that the model may draft for and that have no better lookup; those with the least to catch up on
        first."""
        acceptance, num_uncached = self._acceptances[name], self._proposers[name].num_uncached
        least = self._depths(name)[0]
        found: list[_Candidate] = []
        forecasts: dict[tuple[int, int, float], list[float]] = {}  # new requests all have the same
        for row in situation.auto:
            state, request = situation.states[row], situation.requests[row]
            settings = state.settings
            room = min(settings.max_depth, request.max_useful_depth, _DEPTHS[-1]) if name in settings.models else 0
            if room >= least:
                shift = acceptance.shift_of(state.shifts, name, settings.log_odds, situation.step)
                alike = settings.temperature, room, shift.mean
                totals = forecasts.get(alike)
                if totals is None:
                    totals = forecasts[alike] = acceptance.forecast(*alike)
                    totals += totals[-1:] * (_DEPTHS[-1] - room)
                if base.gains.get(row, 0.0) <= totals[min(base.depths.get(row, 1), len(totals)) - 1]:
                    uncached = num_uncached(request)
                    found.append(_Candidate(uncached if uncached > _ALWAYS_UNCACHED else 0, row, room, totals))
        found.sort()
        return found

    def _depths(self, name: str) -> Sequence[int]:
        """That are tried: of a proposer of trees, only theirs."""
        tree = self._proposers[name].tree
        return _DEPTHS if tree is None else (tree.depth,)

    def _num_paid(self, situation: Situation, name: str, candidates: Sequence[_Candidate], balance: float) -> int:
        """How many of them can catch up within `balance` plain steps."""
        num_uncached, most = 0, max(0.0, balance) * situation.plain_seconds
        for count, candidate in enumerate(candidates):
            num_uncached += candidate.num_uncached
            if num_uncached and self.costs.drafts[name].catch_up_seconds(num_uncached, count + 1) > most:
                return count
        return len(candidates)

    def _plans(self, situation: Situation, name: str, base: Plan, group: Sequence[_Candidate]) -> list[Plan]:
        """One plan for each depth."""
        if not group:
            return []
        costs, size = self.costs.drafts[name], len(group)
        rows = {each.row for each in group}
        kept = [row for row in base.lookups if row not in rows]
        num_kept, gain_of_kept = sum([base.depths[row] for row in kept]), sum([base.gains[row] for row in kept])
        catch_up_seconds = costs.catch_up_seconds(sum([each.num_uncached for each in group]), size)
        tokens_left = sum([self.remaining(situation.requests[row]) for row in rows]) / size
        own = situation.own_seconds if kept else situation.repeated_own_seconds
        deepest, plans = max([each.room for each in group]), list[Plan]()
        before, of_model = 0, 0.0
        for depth in self._depths(name):
            num_drafted, of_shallower = size * num_tokens(self._proposers[name], depth) + num_kept, of_model
            of_model = sum([each.totals[depth - 1] for each in group])
            too_rare = of_model - of_shallower < _LEAST_SURVIVAL * size * (depth - before)
            if depth > deepest or num_drafted > situation.max_drafted or too_rare:
                break
            before, gain, steps_left = depth, of_model + gain_of_kept, TUNABLES.payback_steps
            if catch_up_seconds:
                steps_left = min(max(1.0, TUNABLES.counted_on * tokens_left / (1.0 + of_model / size)), steps_left)
            summed = costs.seconds(size, depth, situation.context)
            summed += situation.seconds(num_drafted) + situation.token_seconds * gain
            seconds = self._times.factor(Kind(name, depth, size < situation.rows), situation.rows) * summed + own
            speed = (situation.emitted + gain) / (seconds + catch_up_seconds / steps_left)
            if speed * situation.plain_seconds > situation.emitted:
                plan = Plan(
                    {row: base.depths[row] for row in kept},
                    {row: base.gains[row] for row in kept},
                    {row: base.lookups[row] for row in kept},
                    name, depth, seconds, catch_up_seconds, steps_left, speed, size < situation.rows,
                )  # fmt: skip
                for each in group:
                    plan.depths[each.row], plan.gains[each.row] = min(depth, each.room), each.totals[depth - 1]
                plans.append(plan)
        return plans

    def remaining(self, request: Request) -> float:
        """Tokens a request is expected to emit from now on; the number emitted so far hardly predicts that."""
        return min(request.max_useful_depth + 1.0, self.mean_output)

    def stops(self, situation: Situation, plan: Plan) -> tuple[Acceptance, float, float] | None:
        """What ends the draft of a request early; None if the proposer cannot end a draft early."""
        if plan.model is None or self._proposers[plan.model].drafts_whole:
            return None
        drafting, costs = len(plan.depths) - len(plan.lookups), self.costs.drafts[plan.model]
        num_drafted = sum(plan.depths.values())
        slot_seconds = situation.more_seconds(num_drafted, min(num_drafted, situation.rows))
        further = costs.seconds(drafting, 2, situation.context) - costs.seconds(drafting, 1, situation.context)
        at_least, to_go_on = plan.speed * slot_seconds, plan.speed * (slot_seconds + further / drafting)
        return self._acceptances[plan.model], at_least, to_go_on

    # ---- what can be counted on

    def lower_gain(self, situation: Situation, plan: Plan) -> float:
        """Accepted draft tokens at the lower bound, per token emitted without drafts. Requests' differences average
        out, so the bound is tighter for more of them."""
        num_requests, total = len(plan.depths), 0.0
        for row, depth in plan.depths.items():
            state, draft = situation.states[row], plan.lookups.get(row)
            name = draft.proposer if draft is not None else plan.model
            assert name is not None
            acceptance, temperature = self._acceptances[name], state.settings.temperature
            shift = state.shifts[name].mean - acceptance.doubt(temperature, state.shifts[name], num_requests)
            if draft is not None:
                total += sum(acceptance.survival(temperature, draft.confidence[:depth], shift, 0.0))
            else:
                total += acceptance.forecast(temperature, depth, shift)[-1]
        return total / situation.emitted


class Stop:
    """Decides whether a draft continues, from the draft's confidence before its next token is drawn.

    Verifying the token takes target time: its survival chance must reach `at_least`. Drafting one more also takes a
    pass of the model: for that the chance must reach `to_go_on`.
    """

    __slots__ = ("_acceptance", "_least", "_least_to_go_on", "_survival", "_temperature", "is_over")

    def __init__(self, acceptance: Acceptance, at_least: float, to_go_on: float, temperature: int) -> None:
        self._acceptance, self._temperature = acceptance, temperature
        self._least, self._least_to_go_on = at_least, to_go_on
        self._survival = 1.0
        self.is_over = False

    def __call__(self, confidence: float) -> bool:
        if self.is_over:
            return False
        self._survival = survival = self._survival * self._acceptance.chance(self._temperature, confidence)
        self.is_over = survival < self._least_to_go_on
        return survival >= self._least

"""Finds the best plan for a step: which draft tokens the target verifies, and the expected gain.

Lookups: each looked-up token has a chance of being reached and accepted. The planner takes the likeliest tokens of the
batch, as many as maximise expected tokens per second. A token is never likelier than the one before it, so each draft
contributes a prefix. Every count is tried, because step costs rise in jumps.

Models: drafts are priced before they are made, by depth and by number of requests, those with the least to catch up on
first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import neg
from typing import NamedTuple

from outpace.core import Draft, Request
from outpace.speculation.costs.curves import Costs
from outpace.speculation.policy.acceptance import Acceptance
from outpace.speculation.policy.state import RequestState
from outpace.speculation.policy.times import Kind, StepTimes
from outpace.speculation.policy.tunables import TUNABLES
from outpace.speculation.proposers.base import Proposer

_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # tried for a model
_LEAST_SURVIVAL = 0.05  # a token with a lower chance of being reached and accepted is never worth its cost
_LOOKUPS = Kind(is_mixed=True)
_ALWAYS_UNCACHED = 2  # tokens: a fully accepted draft leaves two, which is not catching up


@dataclass(slots=True)
class Situation:
    """The facts about a step before the decision."""

    step: int
    requests: Sequence[Request]
    states: list[RequestState]
    context: float  # mean number of tokens per request
    plain_seconds: float  # of this step without `auto` drafts and without prefill
    auto: list[int]  # rows whose drafts the policy chooses
    num_tokens: int  # computed without `auto` drafts, prefill included
    host_seconds: float  # host part of the step, corrected for prefill
    emitted: float  # expected tokens without `auto` drafts
    token_seconds: float  # host time per emitted token
    own_seconds: float  # policy time of a step that is not idle
    repeated_own_seconds: float  # the same per step, if the decision is repeated
    seconds: list[float] = field(default_factory=list)  # forward pass and host, by number of draft tokens

    @property
    def rows(self) -> int:
        return len(self.requests)

    @property
    def slot_seconds(self) -> float:
        """Target time per draft token, if every request verified one."""
        if not self.seconds:  # nothing was priced
            return 0.0
        width = min(self.rows, len(self.seconds) - 1)
        return max(0.0, self.seconds[width] - self.seconds[0]) / max(width, 1)

    def summed_seconds(self, num_drafted: int, emitted: float) -> float:
        """The sum of the costs of the target's pass and of the host."""
        return self.seconds[num_drafted] + self.token_seconds * (emitted - self.emitted)

    def own(self, *, is_repeated: bool) -> float:
        return self.repeated_own_seconds if is_repeated else self.own_seconds


@dataclass(slots=True)
class Plan:
    """Drafts for some rows: depth, proposer, and expected gain and time."""

    depths: dict[int, int] = field(default_factory=dict)  # by row
    gains: dict[int, float] = field(default_factory=dict)  # draft tokens expected to be accepted
    lookups: dict[int, Draft] = field(default_factory=dict)
    model: str | None = None  # drafts for the rows without a lookup
    depth: int = 0  # of the model's drafts
    seconds: float = 0.0  # of the step, without catching up
    draft_seconds: float = 0.0  # of the model's drafts, without catching up
    catch_up_seconds: float = 0.0  # the model needs these first
    steps_left: float = 1.0  # steps that share the cost of catching up
    speed: float = 0.0  # expected tokens per second
    slot_seconds: float = 0.0  # target time of one more draft token
    is_mixed: bool = False  # not all requests have drafts of the model

    @property
    def kind(self) -> Kind:
        return Kind(self.model, self.depth, self.is_mixed)

    @property
    def is_repeatable(self) -> bool:
        """Whether the next step can run it again: lookups would have to be made anew."""
        return self.model is not None and not self.lookups

    def needed_gain(self, plain_seconds: float, allowance: float) -> float:
        """Accepted draft tokens needed to lose at most `allowance` plain steps. Later steps may pay for catching up."""
        longer = self.seconds / plain_seconds - 1.0
        behind = self.catch_up_seconds / plain_seconds - allowance
        return longer + (behind / self.steps_left if behind > 0.0 and self.catch_up_seconds else behind)


class _Candidate(NamedTuple):
    """A request that a model may draft for. The cheapest comes first, then the likeliest to be accepted."""

    num_uncached: int  # tokens to catch up on
    first_miss: float  # minus the chance of the first token
    row: int
    room: int  # the largest depth
    totals: list[float]  # expected accepted tokens, by depth; equally long for all


class _Group(NamedTuple):
    """Requests that a model may draft for together."""

    base: Plan
    candidates: Sequence[_Candidate]
    kept: list[int]  # other rows, which keep the lookups of `base`
    catch_up_seconds: float
    tokens_left: float  # expected for each candidate; they pay for catching up


class _Priced(NamedTuple):
    """A plan with a model, before its rows are filled in: most plans are only compared."""

    plan: Plan
    group: _Group

    def with_rows(self) -> Plan:
        plan, base, depth = self.plan, self.group.base, self.plan.depth
        plan.depths = {row: base.depths[row] for row in self.group.kept}
        plan.gains = {row: base.gains[row] for row in self.group.kept}
        for _, _, row, room, totals in self.group.candidates:
            plan.depths[row] = depth if depth < room else room
            plan.gains[row] = totals[depth - 1]
        return plan


class Planner:
    def __init__(
        self,
        costs: Costs,
        times: StepTimes,
        acceptances: Mapping[str, Acceptance],
        proposers: Mapping[str, Proposer],
    ) -> None:
        self._costs = costs
        self._times = times
        self._acceptances = acceptances
        self._proposers = proposers
        self._last_depth = dict.fromkeys(proposers, 4)  # depth of the model's last plan; up to twice that is tried
        self.mean_output = 128.0  # recent mean output length, in tokens

    def remaining(self, request: Request) -> float:
        """Tokens a request is expected to emit from now on; the number emitted so far hardly predicts that."""
        return min(request.max_useful_depth + 1.0, self.mean_output)

    def deepest(self, name: str) -> int:
        """The largest depth that is tried for a model: twice the depth of its last plan."""
        return min(2 * self._last_depth[name], _DEPTHS[-1])

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
        own_seconds, token_seconds, emitted = situation.own_seconds, situation.token_seconds, situation.emitted
        factor = self._times.factor(_LOOKUPS, situation.rows)
        best, best_speed = 0, emitted / situation.plain_seconds
        gain = 0.0
        for count, (chance, seconds) in enumerate(zip(ranked, situation.seconds[1:], strict=False), 1):
            gain += chance
            taken = factor * (seconds + token_seconds * gain) + own_seconds
            if emitted + gain > best_speed * taken:
                best, best_speed = count, (emitted + gain) / taken
        plan = Plan(is_mixed=True)
        if best:
            least = ranked[best - 1]
            num_least = best - ranked.index(least)  # of the tokens with the least chance, so many are taken
            for row, chances in survival.items():
                depth = bisect_left(chances, -least, key=neg)
                while depth < len(chances) and num_least and chances[depth] == least:
                    depth, num_least = depth + 1, num_least - 1
                if depth:
                    plan.depths[row], plan.lookups[row] = depth, drafts[row]
                    plan.gains[row] = sum(chances[:depth])
        self._price(situation, plan, best, sum(plan.gains.values()))
        return plan

    def lower_gain(self, situation: Situation, plan: Plan) -> float:
        """Accepted draft tokens at the lower bound, per token emitted without drafts. Requests' differences average
        out, so the bound is tighter for more of them."""
        num_requests, total = len(plan.depths), 0.0
        for row, depth in plan.depths.items():
            state, draft = situation.states[row], plan.lookups.get(row)
            name = draft.proposer if draft is not None else plan.model
            assert name is not None
            acceptance, temperature = self._acceptances[name], state.settings.temperature
            request_shift = state.shifts[name] if draft is not None else state.forecast_shifts[name]
            shift = request_shift.mean - acceptance.doubt(temperature, request_shift, num_requests)
            if draft is not None:
                total += sum(acceptance.survival(temperature, draft.confidence[:depth], shift, 0.0))
            else:
                total += acceptance.forecast(temperature, depth, shift)[-1]
        return total / situation.emitted

    def _price(self, situation: Situation, plan: Plan, num_drafted: int, gain: float) -> None:
        """Set the plan's time and speed; `gain` is the sum of its gains."""
        emitted = situation.emitted + gain
        summed = plan.draft_seconds + situation.summed_seconds(num_drafted, emitted)
        own_seconds = situation.own(is_repeated=plan.is_repeatable)
        plan.seconds = self._times.factor(plan.kind, situation.rows) * summed + own_seconds
        plan.speed = emitted / (plan.seconds + plan.catch_up_seconds / plan.steps_left)
        last = min(num_drafted, situation.rows)
        if last:
            plan.slot_seconds = max(0.0, situation.seconds[num_drafted] - situation.seconds[num_drafted - last]) / last

    # ---- drafts of a model

    def with_model(self, situation: Situation, name: str, base: Plan) -> Iterator[Plan]:
        """Plans with a model's drafts, fastest first. They differ in depth and in size: all requests, half of them, or
        those with nothing to catch up on. Each is made for the requests without a better lookup in `base`, and for all
        requests alike."""
        ranked = self._ranked(situation, name, base)
        if base.lookups:
            ranked += self._ranked(situation, name, Plan())
        ranked.sort(key=lambda priced: -priced.plan.speed)
        for priced in ranked:
            yield priced.with_rows()

    def _ranked(self, situation: Situation, name: str, base: Plan) -> list[_Priced]:
        """Plans for several groups and depths, priced but without their rows."""
        candidates = self._candidates(situation, name, base)
        if not candidates:
            return []
        num_candidates, num_cached = len(candidates), sum([each.num_uncached == 0 for each in candidates])
        sizes = {num_candidates}
        if num_cached < num_candidates:
            sizes |= {num_cached or 1, (num_candidates + 1) // 2}
        found = []
        for size in sizes:
            group = self._group(situation, name, base, candidates[:size])
            deepest = max([each.room for each in group.candidates])
            for depth in _DEPTHS[: bisect_right(_DEPTHS, deepest)]:
                priced = self._priced(situation, name, group, depth)
                if priced is not None:
                    found.append(priced)
        return found

    def _group(self, situation: Situation, name: str, base: Plan, candidates: Sequence[_Candidate]) -> _Group:
        rows = {each.row for each in candidates}
        kept = [row for row in base.lookups if row not in rows]
        num_uncached = sum([each.num_uncached for each in candidates])
        if not num_uncached:
            return _Group(base, candidates, kept, 0.0, 0.0)
        left = sum([self.remaining(situation.requests[row]) for row in rows]) / len(candidates)
        seconds = self._costs.drafts[name].catch_up_seconds(num_uncached, len(candidates))
        return _Group(base, candidates, kept, seconds, left)

    def _candidates(self, situation: Situation, name: str, base: Plan) -> list[_Candidate]:
        """Requests that the model may draft for and that have no better lookup; the cheapest first."""
        acceptance, num_uncached = self._acceptances[name], self._proposers[name].num_uncached
        requests, states, of_lookups, step = situation.requests, situation.states, base.gains, situation.step
        last, deepest = self._last_depth[name], self.deepest(name)
        found: list[_Candidate] = []
        for row in situation.auto:
            state, request = states[row], requests[row]
            settings = state.settings
            if name not in settings.models:
                continue
            room = min(settings.max_depth, request.max_useful_depth, deepest)
            if not room:
                continue
            temperature = settings.temperature
            shift = acceptance.shift_of(state.forecast_shifts, name, settings.log_odds, step)
            totals = acceptance.forecast(temperature, room, shift.mean)
            if room < deepest:
                totals = totals + totals[-1:] * (deepest - room)
            if row in of_lookups and of_lookups[row] > totals[last - 1]:
                continue
            uncached = num_uncached(request)
            if uncached <= _ALWAYS_UNCACHED:
                uncached = 0
            found.append(_Candidate(uncached, -totals[0], row, room, totals))
        found.sort()
        return found

    def _priced(self, situation: Situation, name: str, group: _Group, depth: int) -> _Priced | None:
        """The model drafts up to `depth` tokens for each candidate; other rows keep their lookups. None if the step has
        no room for so many tokens."""
        base, size = group.base, len(group.candidates)
        of_model = sum([each.totals[depth - 1] for each in group.candidates])
        num_drafted = size * depth + sum([base.depths[row] for row in group.kept])
        if num_drafted >= len(situation.seconds):
            return None
        gain = of_model + sum([base.gains[row] for row in group.kept])
        plan = Plan(lookups={row: base.lookups[row] for row in group.kept}, model=name, depth=depth)
        plan.is_mixed = size < situation.rows
        if group.catch_up_seconds:
            plan.catch_up_seconds = group.catch_up_seconds
            plan.steps_left = max(1.0, TUNABLES.counted_on * group.tokens_left / (1.0 + of_model / size))
        plan.draft_seconds = self._costs.drafts[name].seconds(size, depth, situation.context)
        self._price(situation, plan, num_drafted, gain)
        return _Priced(plan, group)

    def note_taken(self, plan: Plan) -> None:
        """Remember the depth of the plan that runs."""
        if plan.model is not None:
            self._last_depth[plan.model] = max(2, plan.depth)


class Stop:
    """Decides whether a draft continues, from the draft's confidence before its next token is drawn.

    Verifying the token takes target time: its survival chance must reach `at_least`. Drafting one more also takes a
    pass of the model: for that the chance must reach `to_go_on`.
    """

    __slots__ = ("_chance", "_least", "_least_to_go_on", "_shift", "_survival", "_temperature", "is_over")

    def __init__(
        self, acceptance: Acceptance, temperature: int, shift: float, at_least: float, to_go_on: float
    ) -> None:
        self._chance, self._temperature, self._shift = acceptance.chance, temperature, shift
        self._least, self._least_to_go_on = at_least, to_go_on
        self._survival = 1.0
        self.is_over = False

    def __call__(self, confidence: float) -> bool:
        if self.is_over:
            return False
        self._survival = survival = self._survival * self._chance(self._temperature, confidence, self._shift)
        self.is_over = survival < self._least_to_go_on
        return survival >= self._least

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
from operator import attrgetter, neg
from typing import NamedTuple

from outpace.core import Draft, Request
from outpace.speculation.costs.curves import Costs, StepCosts
from outpace.speculation.policy.acceptance import Acceptance
from outpace.speculation.policy.state import RequestState
from outpace.speculation.policy.times import Kind, StepTimes
from outpace.speculation.policy.tunables import TUNABLES
from outpace.speculation.proposers.base import Proposer

_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # tried for a model
_LEAST_SURVIVAL = 0.05  # a token with a lower chance of being reached and accepted is never worth its cost
_MAX_LOOKUP_TOKENS = 512  # looked-up tokens considered in a step
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
    max_drafted: int  # draft tokens that the step has room for
    target: StepCosts

    @property
    def rows(self) -> int:
        return len(self.requests)

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
    num_kept: int  # draft tokens of theirs
    gain_of_kept: float
    catch_up_seconds: float
    tokens_left: float  # expected for each candidate; they pay for catching up


class _Option(NamedTuple):
    """A plan with a model, before its rows are filled in: most plans are only compared."""

    speed: float
    seconds: float
    steps_left: float
    depth: int
    group: _Group


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

    # ---- drafts of a model

    def with_model(self, situation: Situation, name: str, base: Plan) -> Iterator[Plan]:
        """Plans with a model's drafts, fastest first. They differ in depth and in size: all requests, half of them, or
        those with nothing to catch up on. Each is made for the requests without a better lookup in `base`, and for all
        requests alike."""
        options = self._options(situation, name, base)
        if base.lookups:
            options += self._options(situation, name, Plan())
        options.sort(key=attrgetter("speed"), reverse=True)
        for option in options:
            yield self._plan(situation, name, option)

    def _options(self, situation: Situation, name: str, base: Plan) -> list[_Option]:
        """Plans for several groups and depths."""
        candidates = self._candidates(situation, name, base)
        if not candidates:
            return []
        num_candidates, num_cached = len(candidates), sum([each.num_uncached == 0 for each in candidates])
        sizes = {num_candidates}
        if num_cached < num_candidates:
            sizes |= {num_cached or 1, (num_candidates + 1) // 2}
        costs, found = self._costs.drafts[name], list[_Option]()
        own_seconds, repeated_own_seconds = situation.own_seconds, situation.repeated_own_seconds
        for size in sizes:
            group = self._group(situation, name, base, candidates[:size])
            own = own_seconds if group.kept else repeated_own_seconds
            deepest, steps_left = max([each.room for each in group.candidates]), 1.0
            for depth in _DEPTHS[: bisect_right(_DEPTHS, deepest)]:
                num_drafted = size * depth + group.num_kept
                if num_drafted > situation.max_drafted:
                    break
                of_model = sum([each.totals[depth - 1] for each in group.candidates])
                gain = of_model + group.gain_of_kept
                if group.catch_up_seconds:
                    steps_left = max(1.0, TUNABLES.counted_on * group.tokens_left / (1.0 + of_model / size))
                summed = costs.seconds(size, depth, situation.context)
                summed += situation.seconds(num_drafted) + situation.token_seconds * gain
                factor = self._times.factor(Kind(name, depth, size < situation.rows), situation.rows)
                seconds = factor * summed + own
                speed = (situation.emitted + gain) / (seconds + group.catch_up_seconds / steps_left)
                found.append(_Option(speed, seconds, steps_left, depth, group))
        return found

    def _plan(self, situation: Situation, name: str, option: _Option) -> Plan:
        speed, seconds, steps_left, depth, group = option
        base, kept = group.base, group.kept
        plan = Plan(
            {row: base.depths[row] for row in kept},
            {row: base.gains[row] for row in kept},
            {row: base.lookups[row] for row in kept},
            name, depth, seconds, group.catch_up_seconds, steps_left, speed,
            is_mixed=len(group.candidates) < situation.rows,
        )  # fmt: skip
        for _, _, row, room, totals in group.candidates:
            plan.depths[row] = min(depth, room)
            plan.gains[row] = totals[depth - 1]
        num_drafted = len(group.candidates) * depth + group.num_kept
        plan.slot_seconds = situation.more_seconds(num_drafted, min(num_drafted, situation.rows))
        return plan

    def _group(self, situation: Situation, name: str, base: Plan, candidates: Sequence[_Candidate]) -> _Group:
        rows = {each.row for each in candidates}
        kept = [row for row in base.lookups if row not in rows]
        num_uncached = sum([each.num_uncached for each in candidates])
        num_kept, gain_of_kept = sum([base.depths[row] for row in kept]), sum([base.gains[row] for row in kept])
        if not num_uncached:
            return _Group(base, candidates, kept, num_kept, gain_of_kept, 0.0, 0.0)
        left = sum([self.remaining(situation.requests[row]) for row in rows]) / len(candidates)
        seconds = self._costs.drafts[name].catch_up_seconds(num_uncached, len(candidates))
        return _Group(base, candidates, kept, num_kept, gain_of_kept, seconds, left)

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

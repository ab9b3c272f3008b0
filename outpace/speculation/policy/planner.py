"""The best plan for a step: which draft tokens of whom the target verifies, and what that gains and risks.

Every possible draft token has a chance of being reached and accepted. Drafts that were looked up are there already: of
their tokens the likeliest are taken across the batch, as many as make expected tokens per second largest. A token's
chance never exceeds that of the one before it in its draft, so taking the likeliest never takes one without those
before it; and every count is looked at, because costs have steps in them. A model's drafts are priced before they are
made: by depth, and by for how many requests, those first that it has least to catch up with. Seconds of a model are
weighed at the speed that steps without it have: where a good lookup comes up every other step, a model that is hardly
faster than plain decoding would only take its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from outpace.core import Draft, Request
from outpace.speculation.costs.curves import Costs
from outpace.speculation.policy.acceptance import Acceptance
from outpace.speculation.policy.state import RequestState
from outpace.speculation.policy.tunables import TUNABLES
from outpace.speculation.proposers.base import Proposer

_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # looked at for a model
_LEAST_SURVIVAL = 0.05  # a token less likely than this to be reached and accepted pays nowhere
_FOLLOWED = 2  # tokens that a model has to compute in any case: a draft accepted whole leaves two


@dataclass(slots=True)
class Situation:
    """What a step is before anything is decided about it."""

    step: int
    requests: Sequence[Request]
    states: list[RequestState]
    context: float  # tokens a request has, on average
    plain_seconds: float  # of this step, were nothing drafted by choice; prompts that are read in it aside
    auto: list[int]  # rows that are decided about
    num_tokens: int  # that the target computes in any case,
    host_seconds: float  # and the host's part of that
    emitted: float  # tokens, were nothing drafted by choice
    judge_seconds: float
    own_seconds: float  # what deciding and learning take where there are drafts
    rate: float  # tokens per second of steps without a model, lately
    seconds: list[float] = field(default_factory=list)  # of the pass and the host's part, by draft tokens taken

    @property
    def rows(self) -> int:
        return len(self.requests)

    @property
    def slot_seconds(self) -> float:
        """What one draft token for each request would cost the target, for one of them."""
        if not self.seconds:  # nothing was found, and nothing weighed
            return 0.0
        width = min(self.rows, len(self.seconds) - 1)
        return max(0.0, self.seconds[width] - self.seconds[0]) / max(width, 1)

    def total_seconds(self, num_drafted: int, emitted: float) -> float:
        return self.seconds[num_drafted] + self.judge_seconds * (emitted - self.emitted) + self.own_seconds


@dataclass(slots=True)
class Plan:
    """Drafts for some rows: how deep, by whom, and what is expected of them."""

    depths: dict[int, int] = field(default_factory=dict)  # by row
    gains: dict[int, float] = field(default_factory=dict)  # draft tokens expected to be accepted
    lookups: dict[int, Draft] = field(default_factory=dict)
    model: str | None = None  # that drafts for the rows without a lookup,
    depth: int = 0  # so deep
    seconds: float = 0.0  # of such a step once texts are caught up with,
    catch_up_seconds: float = 0.0  # which this one has to do first,
    steps_left: float = 1.0  # and which may serve so many steps
    speed: float = 0.0  # expected tokens per second
    slot_seconds: float = 0.0  # what a draft token more would cost the target

    def needed_gain(self, plain_seconds: float, allowance: float) -> float:
        """Draft tokens that somebody has to have accepted to lose no more than so many plain steps; what is caught up
        with may be won back in later steps."""
        longer = self.seconds / plain_seconds - 1.0
        behind = self.catch_up_seconds / plain_seconds - allowance
        return longer + (behind / self.steps_left if behind > 0.0 and self.catch_up_seconds else behind)


@dataclass(slots=True)
class _Prospect:
    """A request that a model may draft for."""

    row: int
    totals: list[float]  # tokens expected to be accepted, by depth
    num_behind: int  # tokens to catch up with


class Planner:
    def __init__(self, costs: Costs, acceptances: Mapping[str, Acceptance], proposers: Mapping[str, Proposer]) -> None:
        self._costs = costs
        self._acceptances = acceptances
        self._proposers = proposers
        self._last_depth = dict.fromkeys(proposers, 4)  # that was best for a model: twice that is looked at
        self.mean_output = 128.0  # tokens of a request, lately

    def remaining(self, request: Request) -> float:
        """Tokens a request is expected to emit yet; how many it has emitted says little about that."""
        return min(request.max_useful_depth + 1.0, self.mean_output)

    def deepest(self, name: str) -> int:
        """Draft tokens of a model that are looked at: twice those that were best the last time."""
        return min(2 * self._last_depth[name], _DEPTHS[-1])

    # ---- drafts that were looked up

    def with_lookups(self, situation: Situation, found: Mapping[int, Sequence[Draft]]) -> Plan:
        """The best plan that takes only drafts that are there; it may be empty. `found` is by row."""
        survival: dict[int, list[float]] = {}
        best: dict[int, Draft] = {}
        for row, drafts in found.items():
            most = 0.0
            for draft in drafts:
                chances = self._survival(situation, row, draft)
                if chances and sum(chances) > most:
                    most, survival[row], best[row] = sum(chances), chances, draft
        return self._take(situation, survival, best)

    def _survival(self, situation: Situation, row: int, draft: Draft) -> list[float]:
        state, acceptance = situation.states[row], self._acceptances[draft.proposer]
        own = acceptance.own(state.own, draft.proposer, state.wishes.log_odds, situation.step)
        return acceptance.survival(state.wishes.temperature, draft.confidence, own.mean, _LEAST_SURVIVAL)

    def _take(self, situation: Situation, survival: Mapping[int, list[float]], drafts: Mapping[int, Draft]) -> Plan:
        """The likeliest tokens, as many as are fastest."""
        slots = [(-chance, row) for row, chances in survival.items() for chance in chances]
        slots.sort()
        seconds, own, judge = situation.seconds, situation.own_seconds, situation.judge_seconds
        emitted = situation.emitted
        best, best_speed = 0, emitted / situation.plain_seconds
        gain = 0.0
        for count, (chance, _) in enumerate(slots[: len(seconds) - 1], 1):
            gain -= chance
            taken = seconds[count] + judge * gain + own
            if emitted + gain > best_speed * taken:
                best, best_speed = count, (emitted + gain) / taken
        depths: dict[int, int] = {}
        for _, row in slots[:best]:
            depths[row] = depths.get(row, 0) + 1
        plan = Plan(depths)
        for row, depth in depths.items():
            plan.lookups[row] = drafts[row]
            plan.gains[row] = sum(survival[row][:depth])
        self._settle(situation, plan, best)
        return plan

    def low(self, situation: Situation, plan: Plan, row: int, num_requests: int = 1) -> float:
        """Draft tokens of a row that are accepted at the lower bound, as one of so many requests."""
        depth = plan.depths.get(row)
        if depth is None:
            return 0.0
        state, draft = situation.states[row], plan.lookups.get(row)
        name = draft.proposer if draft is not None else plan.model
        assert name is not None
        acceptance, temperature = self._acceptances[name], state.wishes.temperature
        own = state.own[name] if draft is not None else state.own_forecasts[name]
        shift = own.mean - acceptance.doubt(temperature, own, num_requests)
        if draft is not None:
            return sum(acceptance.survival(temperature, draft.confidence[:depth], shift, 0.0))
        return acceptance.forecast(temperature, depth, shift)[-1]

    def _settle(self, situation: Situation, plan: Plan, num_drafted: int, draft_seconds: float = 0.0) -> None:
        emitted = situation.emitted + sum(plan.gains.values())
        plan.seconds = draft_seconds + situation.total_seconds(num_drafted, emitted)
        plan.speed = emitted / (plan.seconds + plan.catch_up_seconds / plan.steps_left)
        last = min(num_drafted, situation.rows)
        if last:
            plan.slot_seconds = max(0.0, situation.seconds[num_drafted] - situation.seconds[num_drafted - last]) / last

    # ---- drafts of a model

    def with_model(self, situation: Situation, name: str, base: Plan) -> Iterator[Plan]:
        """Plans in which a model drafts beside the lookups of `base`, the fastest first: by depth, and for all
        requests, those it has followed, or half of them."""
        prospects = self._prospects(situation, name, base)
        if not prospects:
            return
        costs = self._costs.drafts[name]
        num_behind = list(accumulate([each.num_behind for each in prospects], initial=0))
        left = list(accumulate([self.remaining(situation.requests[each.row]) for each in prospects], initial=0.0))
        num_followed = sum([each.num_behind == 0 for each in prospects])
        sizes = {len(prospects)}
        if num_followed < len(prospects):
            sizes |= {num_followed or 1, (len(prospects) + 1) // 2}
        catch_up = {size: costs.catch_up_seconds(num_behind[size], size) for size in sizes}
        ranked: list[tuple[float, int, int]] = []  # speed, depth, how many
        base_gain, base_tokens = sum(base.gains.values()), sum(base.depths.values())
        last, deepest = self._last_depth[name], max([len(each.totals) for each in prospects])
        for depth in _DEPTHS:
            if 2 * depth <= min(last, deepest) and depth > 1:
                continue
            if depth > min(self.deepest(name), deepest):
                break
            gains = list(accumulate([each.totals[:depth][-1] for each in prospects], initial=0.0))
            for size in sizes:
                tokens = base_tokens + size * depth
                if tokens >= len(situation.seconds):
                    continue
                emitted = situation.emitted + base_gain + gains[size]
                steps_left = self._steps_left(left[size] / size, gains[size] / size)
                seconds = costs.seconds(size, depth, situation.context) + situation.total_seconds(tokens, emitted)
                seconds += catch_up[size] / steps_left
                if emitted - situation.emitted >= situation.rate * (seconds - situation.plain_seconds):
                    ranked.append((emitted / seconds, depth, size))
        ranked.sort(reverse=True)
        for _, depth, size in ranked:
            yield self.model_plan(situation, name, base, prospects[:size], depth)

    def _prospects(self, situation: Situation, name: str, base: Plan) -> list[_Prospect]:
        """Of every request that the model may draft for and that has no better draft; the cheapest first."""
        acceptance, proposer = self._acceptances[name], self._proposers[name]
        found: list[_Prospect] = []
        for row in situation.auto:
            state, request = situation.states[row], situation.requests[row]
            if name not in state.wishes.models:
                continue
            room = min(state.wishes.max_depth, request.max_useful_depth, _DEPTHS[-1])
            if not room:
                continue
            own = acceptance.own(state.own_forecasts, name, state.wishes.log_odds, situation.step)
            temperature = state.wishes.temperature
            totals = acceptance.forecast(temperature, room, own.mean + acceptance.optimism(temperature))
            if base.gains.get(row, 0.0) > totals[min(self._last_depth[name], room) - 1]:
                continue
            behind = proposer.num_uncached(request)
            found.append(_Prospect(row, totals, behind if behind > _FOLLOWED else 0))
        found.sort(key=lambda each: (each.num_behind, -each.totals[0]))
        return found

    def _steps_left(self, remaining: float, gain: float) -> float:
        return max(1.0, TUNABLES.counted_on * remaining / (1.0 + gain))

    def model_plan(
        self, situation: Situation, name: str, base: Plan, prospects: Sequence[_Prospect], depth: int
    ) -> Plan:
        """The model drafts `depth` tokens for each of these; others keep what was looked up for them."""
        costs = self._costs.drafts[name]
        plan = Plan(dict(base.depths), dict(base.gains), dict(base.lookups), name, depth)
        left = 0.0
        for each in prospects:
            row = each.row
            plan.lookups.pop(row, None)
            plan.depths[row] = min(depth, len(each.totals))
            plan.gains[row] = each.totals[plan.depths[row] - 1]
            left += self.remaining(situation.requests[row])
        size = len(prospects)
        plan.steps_left = self._steps_left(left / size, sum(plan.gains[each.row] for each in prospects) / size)
        plan.catch_up_seconds = costs.catch_up_seconds(sum(each.num_behind for each in prospects), size)
        draft_seconds = costs.seconds(size, depth, situation.context)
        self._settle(situation, plan, sum(plan.depths.values()), draft_seconds)
        return plan

    def smaller(self, situation: Situation, plan: Plan) -> list[Plan]:
        """Trials of a plan's model for fewer and fewer requests, the cheapest to catch up with."""
        assert plan.model is not None
        base = Plan(lookups=plan.lookups)
        for row in plan.lookups:
            base.depths[row], base.gains[row] = plan.depths[row], plan.gains[row]
        prospects = [each for each in self._prospects(situation, plan.model, base) if each.row not in base.depths]
        found = []
        size, depth = len(prospects), min(plan.depth, 2)
        while size:
            found.append(self.model_plan(situation, plan.model, base, prospects[:size], depth))
            size //= 2
        return found

    def taken(self, plan: Plan) -> None:
        """The plan is run."""
        if plan.model is not None:
            self._last_depth[plan.model] = max(2, plan.depth)


class Stop:
    """Whether a draft goes on with its next token, decided on the distribution it will be drawn from.

    The token costs the target a slot, and drafting the one after it costs the model a pass. So likely has the token to
    be to survive: `at_least` for the one, `to_go_on` for both.
    """

    def __init__(
        self, acceptance: Acceptance, temperature: int, shift: float, at_least: float, to_go_on: float
    ) -> None:
        self._acceptance = acceptance
        self._temperature, self._shift = temperature, shift
        self._least, self._least_to_go_on = at_least, to_go_on
        self._survival = 1.0
        self._ended = False

    def __call__(self, confidence: float) -> bool:
        if self._ended:
            return False
        self._survival *= self._acceptance.chance(self._temperature, confidence, self._shift)
        self._ended = self._survival < self._least_to_go_on
        return self._survival >= self._least

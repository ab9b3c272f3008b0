"""Speed with a draft, by the policy's own planner: the depth that `--speculation auto` would settle on, and its gain.

`Planner.with_model` chooses the depth for a batch of equal requests, from the costs and from an `Acceptance` that holds
the chances of draft tokens. What a fixed depth gives is composed of the same parts. A model that drafts also reads the
prompt, after the first token; that time is spread over the answer, as the policy spreads it. Policy time, budgets and
requests that differ are left out: they make the runtime a few percent slower than a plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, cast

from outpace.config import DEFAULT_AUTO_DEPTH, SamplingParams
from outpace.core import MeasuredAcceptance, Request
from outpace.speculation.costs.curves import Costs
from outpace.speculation.policy.acceptance import Acceptance
from outpace.speculation.policy.budget import Budget
from outpace.speculation.policy.planner import Plan, Planner, Situation
from outpace.speculation.policy.state import RequestState, SpeculationSettings
from outpace.speculation.policy.times import StepTimes
from outpace.speculation.proposers.base import NoDraft

_MODEL = "model"
_MANY = 1 << 20
_PRECISION = 1e-3  # of a break-even acceptance


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second of a batch, with drafts of `depth`, and over plain decoding."""

    rows: int
    depth: int  # 0: plain decoding is faster
    tokens_per_step: float  # of one request, the target's own included
    seconds: float  # of a step, drafting included, reading prompts not
    tokens_per_second: float  # once the target has read the prompt
    speedup: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The usual request: what it reads, and how many tokens it emits after the first one, which prefill gives."""

    prompt_tokens: int = 0
    tokens: float = math.inf

    @classmethod
    def within(cls, context: float, tokens: int) -> Answer:
        """Of requests that have `context` tokens on average while they emit, and at most twice as many."""
        emitted = min(float(tokens), max(2.0 * context, 1.0))
        return cls(max(0, round(context - emitted / 2)), emitted)


ENDLESS = Answer()


def known_acceptance(chances: Sequence[float]) -> Acceptance:
    """Given chances: of each position of a draft, if all before it were accepted, at any temperature."""
    measured = MeasuredAcceptance(tuple(chances), tuple(chances))
    return Acceptance(is_lookup=False, measured=measured)


@dataclass(frozen=True, slots=True)
class Drafting:
    """A target with one way to draft: `costs.drafts` has exactly one entry."""

    costs: Costs
    acceptance: Acceptance
    temperature: int = 0  # class
    shift: float = 0.0  # log-odds added to every chance
    match_share: float = 1.0  # of steps in which there is a draft: lookups often find none
    answer: Answer = ENDLESS

    @property
    def name(self) -> str:
        return next(iter(self.costs.drafts))

    @property
    def reading_seconds(self) -> float:
        """Of the prompt, by the model that drafts; once for each answer."""
        return self.costs.drafts[self.name].catch_up_seconds(self.answer.prompt_tokens)

    def cost_ratio(self, rows: int, context: float) -> float:
        """A pass of the model that drafts over a step of the target, each with a token of every request."""
        passes = self.costs.drafts[self.name].passes
        return passes.seconds(rows, rows, context) / self.costs.target.seconds(rows, rows, context) if passes else 0.0

    def plain(self, rows: int, context: float) -> float:
        """Tokens a second of plain decoding."""
        return rows / self.costs.plain_seconds(rows, context)

    def expected(self, depth: int) -> float:
        """Tokens that a step with a draft of this depth emits for one request."""
        return 1.0 + self.acceptance.forecast(self.temperature, depth, self.shift)[-1]

    def fixed(self, rows: int, depth: int, context: float) -> Speed:
        """Speed of drafting always, to this depth."""
        if not depth:
            return self._speed(rows, 0, 1.0, self.costs.plain_seconds(rows, context), context)
        if self.match_share < 1.0:
            return self._looked_up(rows, depth, context)
        tokens, costs = self.expected(depth), self.costs
        seconds = costs.drafts[self.name].seconds(rows, depth, context)
        seconds += costs.target.seconds(rows, rows * (1 + depth), context)
        seconds += costs.schedule_seconds + costs.token_seconds * rows * tokens
        return self._speed(rows, depth, tokens, seconds, context)

    def _looked_up(self, rows: int, depth: int, context: float) -> Speed:
        """Some requests of a step have a draft, the others a lookup that found nothing. Of a single request, some steps
        have a draft; of many, each step has its share of them."""
        costs, share = self.costs, self.match_share
        tokens = 1.0 + share * (self.expected(depth) - 1.0)
        host = costs.schedule_seconds + costs.token_seconds * rows * tokens
        host += costs.drafts[self.name].seconds(rows, depth, context)
        plain, drafted = (costs.target.seconds(rows, rows + extra, context) for extra in (0, depth))
        if rows == 1:
            forward = share * drafted + (1.0 - share) * plain
        else:
            forward = costs.target.seconds(rows, rows + round(share * rows * depth), context)
        return self._speed(rows, depth, tokens, host + forward, context)

    def best(self, rows: int, context: float) -> Speed:
        """Speed at the depth that the policy settles on; depth 0 where no depth pays."""
        depth = self._lookup_depth(rows, context) if self.match_share < 1.0 else self._settled_depth(rows, context)
        found = self.fixed(rows, depth, context)
        return found if found.speedup > 1.0 else self.fixed(rows, 0, context)

    def break_even(self, rows: int, depth: int, context: float) -> float | None:
        """The chance of a draft token, the same at every position, at which this depth is as fast as plain decoding;
        None if it never is."""
        low, high = 0.0, 0.99

        def speedup(chance: float) -> float:
            given = replace(self, acceptance=known_acceptance([chance]), temperature=0, shift=0.0)
            return given.fixed(rows, depth, context).speedup

        if speedup(high) < 1.0:
            return None
        while high - low > _PRECISION:
            middle = (low + high) / 2
            low, high = (low, middle) if speedup(middle) >= 1.0 else (middle, high)
        return high

    def _speed(self, rows: int, depth: int, tokens: float, seconds: float, context: float) -> Speed:
        reading = self.reading_seconds / self.answer.tokens if depth else 0.0  # for each token
        speed = rows * tokens / (seconds + rows * tokens * reading)
        return Speed(rows, depth, tokens, seconds, speed, speed / self.plain(rows, context))

    def _lookup_depth(self, rows: int, context: float) -> int:
        return max(range(1, DEFAULT_AUTO_DEPTH + 1), key=lambda depth: self.fixed(rows, depth, context).speedup)

    def _settled_depth(self, rows: int, context: float) -> int:
        """That of the fastest plan."""
        costs = Costs(
            self.costs.target, {_MODEL: self.costs.drafts[self.name]}, self.costs.token_seconds,
            self.costs.schedule_seconds,
        )  # fmt: skip
        planner = Planner(costs, StepTimes(), {_MODEL: self.acceptance}, {_MODEL: NoDraft()})
        plans = planner.with_model(self._situation(costs, rows, context), _MODEL, Plan(), math.inf)
        return plans[0].depth if plans else 0

    def _situation(self, costs: Costs, rows: int, context: float) -> Situation:
        """A step of equal requests that decode, as `Policy` describes it, without policy time and without history."""
        plain = costs.plain_seconds(rows, context)
        host = costs.schedule_seconds + costs.token_seconds * rows
        settings = SpeculationSettings(
            "auto", _MODEL, (), (_MODEL,), DEFAULT_AUTO_DEPTH, self.temperature, self.shift
        )  # fmt: skip
        state = RequestState(settings, Budget(0.0, 0.0))
        return Situation(
            step=0, rows=rows, requests=list(repeat(_request(), rows)), states=list(repeat(state, rows)),
            context=context, baseline_seconds=plain, plain_seconds=plain, auto=list(range(rows)), num_tokens=rows,
            host_seconds=host, emitted=float(rows), token_seconds=costs.token_seconds, own_seconds=0.0,
            repeated_own_seconds=0.0, max_drafted=_MANY, target=costs.target,
        )  # fmt: skip


def _request() -> Request:
    """One that never ends. The planner looks at its length only."""
    nothing = cast(Any, None)
    return Request(0, SamplingParams(), [0], 0, nothing, nothing, max_length=_MANY, tokens=[0])

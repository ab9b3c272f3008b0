"""The oracle: it knows every rate, cost and length, and maximises tokens per second. Our limits do not apply to it.

It does not know the random draws: whether a token with a probability of 0.8 will be accepted. Its lookups and decisions
take no time. The cost of catch-up is spread over the remaining steps of the request. A draft of the model must be worth
its seconds at the speed of steps without it, because it may replace a lookup that is much faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outpace.bench.simulation.deciders import HOST_SECONDS, MAX_STEP_TOKENS, make_drafts, token_seconds
from outpace.bench.simulation.proposers import MODEL, TEXT, Running
from outpace.bench.simulation.world import Floats, Rates, Scenario
from outpace.config import DEFAULT_AUTO_DEPTH
from outpace.core import Draft, StepStats
from outpace.speculation.policy.state import Choice, Outcome
from outpace.speculation.proposers.base import DraftAsk, NoDraft

_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
_NONE = np.zeros(0)
_RATE = 0.02


@dataclass(slots=True)
class _Plan:
    speed: float  # expected tokens per second
    value: float  # tokens, less those that steps without the model emit in that time
    depths: list[int]
    by_model: list[bool]


class Oracle:
    name = "oracle"
    estimated_speedup: float | None = None

    def __init__(self, scenario: Scenario, proposers: Mapping[str, NoDraft]) -> None:
        self._scenario = scenario
        self._proposers = proposers
        self._token_seconds = token_seconds(scenario)
        self._speedup = 1.0  # recent speedup of steps without the model over plain decoding
        self._rate = 0.0  # tokens per second of such steps

    def choose(self, running: list[Running], context: float, stats: StepStats) -> list[Choice]:
        self._rate = max(1.0, self._speedup) * len(running) / self._plain_seconds(len(running), context)
        text = [self._survival(item, item.world.text, lookup=True) for item in running]
        model = [self._survival(item, item.world.model) for item in running]
        best = self._best(text, [False] * len(running), context, 0.0)
        plain = len(running) - self._rate * self._plain_seconds(len(running), context)
        slower = 0
        for depth in _DEPTHS if MODEL in self._proposers else ():
            mixed = self._with_model(running, text, model, context, depth)
            alike = self._with_model(running, [_NONE] * len(running), model, context, depth)
            plan = max((each for each in (mixed, alike) if each is not None), key=lambda each: each.speed, default=None)
            if plan is not None and plan.value > plain and plan.speed > best.speed:
                best, slower = plan, 0
            else:
                slower += 1
                if slower > 1:
                    break
        rows = zip(running, best.depths, best.by_model, strict=True)
        choices = [self._choice(item, depth, by_model=by_model) for item, depth, by_model in rows]
        make_drafts(choices, self._proposers)
        return choices

    def _choice(self, item: Running, depth: int, *, by_model: bool) -> Choice:
        if not depth:
            return Choice.plain()
        if by_model:
            return Choice(MODEL, depth, ask=DraftAsk(item.request, depth))
        assert item.world.text is not None
        return Choice(TEXT, depth, draft=Draft(item.tokens(item.world.text, depth), TEXT))

    def _survival(self, item: Running, rates: Rates | None, *, lookup: bool = False) -> Floats:
        """The probability of each draft token from here to be reached and accepted."""
        at = item.position
        if rates is None or (rates.rejects_after_draft and item.drafted_last):
            return _NONE
        if lookup and (at >= rates.rate.size or not rates.has_guess[at]):
            return _NONE
        depth = min(DEFAULT_AUTO_DEPTH, item.request.max_useful_depth)
        return np.cumprod(rates.rate[at : at + depth], dtype=np.float64)

    def _with_model(
        self, running: list[Running], text: list[Floats], model: list[Floats], context: float, depth: int
    ) -> _Plan | None:
        """The best plan in which the draft model drafts `depth` tokens for all requests that gain by it."""
        scenario, proposer = self._scenario, self._proposers[MODEL]
        law = scenario.draft_law
        assert law is not None
        rows = len(running)
        chances, by_model, share, num_drafting = list(text), [False] * rows, 0.0, 0
        for i, item in enumerate(running):
            gain, instead = float(model[i][:depth].sum()), float(text[i].sum())
            behind = max(0, proposer.num_uncached(item.request) - 2)
            catch_up = law.of(1, 1 + behind) - law.of(1, 1) if behind else 0.0
            steps_left = max(1.0, (item.world.output_length - item.position) / (1.0 + gain))
            if gain - instead > self._rate * catch_up / steps_left:
                chances[i], by_model[i] = model[i][:depth], True
                share += catch_up / steps_left
                num_drafting += 1
        if not num_drafting:
            return None
        return self._best(chances, by_model, context, depth * law.of(num_drafting, num_drafting, context) + share)

    def _best(self, chances: list[Floats], by_model: list[bool], context: float, before: float) -> _Plan:
        """The draft tokens that maximise expected tokens per second, after `before` seconds of drafting."""
        rows = len(chances)
        slots = np.concatenate(chances) if rows else _NONE
        row_of = np.repeat(np.arange(rows), [each.size for each in chances])
        order = np.argsort(-slots, kind="stable")[: MAX_STEP_TOKENS - rows]
        emitted = rows + np.concatenate([[0.0], np.cumsum(slots[order])])
        seconds = self._scenario.law.by_tokens(rows, rows, rows + order.size, context)
        taken = before + seconds + HOST_SECONDS + self._token_seconds * emitted
        taken[1:] += self._scenario.law.mixed_seconds
        if all(by_model) and all(each.size for each in chances):
            taken[-1] -= self._scenario.law.mixed_seconds  # every row has a draft of the model
        speeds = emitted / taken
        count = int(speeds.argmax())
        depths = np.bincount(row_of[order[:count]], minlength=rows).tolist()
        value = float(emitted[count] - self._rate * taken[count])
        return _Plan(float(speeds[count]), value, depths, by_model)

    def own_seconds(self, choices: Sequence[Choice]) -> float:
        return 0.0

    def _plain_seconds(self, rows: int, context: float) -> float:
        return self._scenario.law.of(rows, rows, context) + HOST_SECONDS + rows * self._token_seconds

    def learn(self, outcomes: Sequence[Outcome], stats: StepStats, num_tokens: int, context: float) -> None:
        if any(outcome.choice.ask is not None for outcome in outcomes):
            return
        rows = len(outcomes)
        plain = self._plain_seconds(rows, context) * stats.num_emitted / rows
        self._speedup += _RATE * (plain / stats.total_seconds - self._speedup)

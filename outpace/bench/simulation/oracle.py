"""The oracle: it knows every rate, cost and length, and makes each step as fast as it can. No rule of ours binds it.

It does not know the coins: whether a token with a chance of 0.8 will be accepted. What it looks up or decides takes no
time. Catching up with a text is spread over the steps that the request still has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outpace.bench.simulation.deciders import HOST_SECONDS, MAX_STEP_TOKENS, TOKEN_SECONDS
from outpace.bench.simulation.proposers import TEXT, Running
from outpace.bench.simulation.world import Floats, Rates, Scenario
from outpace.config import DEFAULT_AUTO_DEPTH
from outpace.core import StepStats
from outpace.speculation.base import DraftAsk, NoDraft
from outpace.speculation.seats import NEURAL, Choice, Outcome

_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
_NONE = np.zeros(0)


@dataclass(slots=True)
class _Plan:
    speed: float
    depths: list[int]
    by_model: list[bool]


class Oracle:
    name = "oracle"
    estimated_speedup: float | None = None

    def __init__(self, scenario: Scenario, proposers: Mapping[str, NoDraft]) -> None:
        self._scenario = scenario
        self._proposers = proposers

    def choose(self, running: list[Running], context: float, stats: StepStats) -> list[Choice]:
        text = [self._survival(item, item.world.text, lookup=True) for item in running]
        model = [self._survival(item, item.world.model) for item in running]
        best = self._best(text, [False] * len(running), context, 0.0)
        slower = 0
        for depth in _DEPTHS if NEURAL in self._proposers else ():
            plan = self._with_model(running, text, model, context, depth)
            if plan is not None and plan.speed > best.speed:
                best, slower = plan, 0
            else:
                slower += 1
                if slower > 3:
                    break
        rows = zip(running, best.depths, best.by_model, strict=True)
        return [self._choice(item, depth, by_model=by_model) for item, depth, by_model in rows]

    def _choice(self, item: Running, depth: int, *, by_model: bool) -> Choice:
        if not depth:
            return Choice.plain()
        ask = DraftAsk(item.request, depth)
        if by_model:
            return Choice(NEURAL, depth, ask=ask)
        [draft] = self._proposers[TEXT].propose([ask])
        return Choice(TEXT, depth, draft=draft)

    def _survival(self, item: Running, rates: Rates | None, *, lookup: bool = False) -> Floats:
        """The chance of each draft token from here to be reached and accepted."""
        at = item.position
        if rates is None or (rates.spites and item.drafted_last):
            return _NONE
        if lookup and (at >= rates.rate.size or not rates.has_guess[at]):
            return _NONE
        depth = min(DEFAULT_AUTO_DEPTH, item.request.max_useful_depth)
        return np.cumprod(rates.rate[at : at + depth])

    def _with_model(
        self, running: list[Running], text: list[Floats], model: list[Floats], context: float, depth: int
    ) -> _Plan | None:
        """The best plan in which the draft model drafts so many tokens, for all requests that gain by that."""
        scenario, proposer = self._scenario, self._proposers[NEURAL]
        law = scenario.draft_law
        assert law is not None
        rows = len(running)
        token_seconds = scenario.law.of(rows, rows, context) / rows
        chances, by_model, share, num_drafting = list(text), [False] * rows, 0.0, 0
        for i, item in enumerate(running):
            gain, instead = float(model[i][:depth].sum()), float(text[i].sum())
            behind = max(0, proposer.num_unread(item.request) - 2)
            catch_up = law.of(1, 1 + behind) - law.of(1, 1) if behind else 0.0
            steps_left = max(1.0, (item.world.output_length - item.position) / (1.0 + gain))
            if (gain - instead) * token_seconds > catch_up / steps_left:
                chances[i], by_model[i] = model[i][:depth], True
                share += catch_up / steps_left
                num_drafting += 1
        if not num_drafting:
            return None
        return self._best(chances, by_model, context, depth * law.of(num_drafting, num_drafting, context) + share)

    def _best(self, chances: list[Floats], by_model: list[bool], context: float, before: float) -> _Plan:
        """The draft tokens that make expected tokens per second largest, after `before` seconds of drafting."""
        rows = len(chances)
        slots = np.concatenate(chances) if rows else _NONE
        row_of = np.repeat(np.arange(rows), [each.size for each in chances])
        order = np.argsort(-slots, kind="stable")[: MAX_STEP_TOKENS - rows]
        emitted = rows + np.concatenate([[0.0], np.cumsum(slots[order])])
        seconds = self._scenario.law.by_tokens(rows, rows, rows + order.size, context)
        speeds = emitted / (before + seconds + HOST_SECONDS + TOKEN_SECONDS * emitted)
        count = int(speeds.argmax())
        depths = np.bincount(row_of[order[:count]], minlength=rows).tolist()
        return _Plan(float(speeds[count]), depths, by_model)

    def own_seconds(self, choices: Sequence[Choice]) -> float:
        return 0.0

    def learn(self, outcomes: Sequence[Outcome], stats: StepStats, num_tokens: int, context: float) -> None:
        pass

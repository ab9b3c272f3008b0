"""A simple rival: it has one acceptance rate per proposer, one budget, and picks the best plan.

It does a lookup for every request at every step. A plan runs if it beats plain decoding and the budget covers the loss
if nothing is accepted. A decision costs the same time as ours. It shows what the rest of our policy gains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from outpace.bench.simulation.deciders import (
    HOST_SECONDS,
    MAX_STEP_TOKENS,
    make_drafts,
    measured_costs,
    token_seconds,
)
from outpace.bench.simulation.machines import GPUS
from outpace.bench.simulation.policy_time import policy_seconds
from outpace.bench.simulation.proposers import MODEL, TEXT, Running
from outpace.bench.simulation.world import Scenario
from outpace.config import DEFAULT_AUTO_DEPTH
from outpace.core import Draft, StepStats
from outpace.speculation.policy.state import Choice, Outcome
from outpace.speculation.proposers.base import DraftAsk, NoDraft

_DEPTHS = (1, 2, 3, 4, 6, 8)
_ALLOWED_LOSS = 0.02
_GRANT_STEPS = 2.0
_PRIOR, _PRIOR_WEIGHT = 0.7, 10.0
_FADE = 0.99


class PlanAndBudget:
    estimated_speedup: float | None = None

    def __init__(
        self, name: str, scenario: Scenario, proposers: Mapping[str, NoDraft], rng: np.random.Generator
    ) -> None:
        self.name = name
        self._costs = measured_costs(scenario, rng)
        self._proposers = proposers
        self._token_seconds = token_seconds(scenario)
        self._counts = {method: [_PRIOR * _PRIOR_WEIGHT, _PRIOR_WEIGHT] for method in proposers}  # accepted, tried
        self._balance: float | None = None
        self._plain_seconds = 0.0
        self._is_cold = scenario.machine not in GPUS

    def choose(self, running: list[Running], context: float, stats: StepStats) -> list[Choice]:
        rows = len(running)
        self._plain_seconds = self._costs.plain_seconds(rows, context)
        if self._balance is None:
            self._balance = _GRANT_STEPS * self._plain_seconds
        drafts = self._look_up(running)
        best_speed, best = rows / self._plain_seconds, [Choice.plain()] * rows
        for method in self._proposers:
            accepted, tried = self._counts[method]
            rate = accepted / tried
            for depth in _DEPTHS:
                choices = [self._choice(method, item, depth, drafts) for item in running]
                asked = [choice.ask.request for choice in choices if choice.ask is not None]
                behind = sum(max(0, self._proposers[method].num_uncached(request) - 1) for request in asked)
                tokens = sum(choice.depth for choice in choices)
                if not tokens or rows + tokens > MAX_STEP_TOKENS:
                    continue
                emitted = rows + sum(sum(rate ** (k + 1) for k in range(choice.depth)) for choice in choices)
                seconds = HOST_SECONDS + self._token_seconds * emitted
                seconds += self._costs.target.seconds(rows, rows + tokens, context)
                if asked:
                    drafting = self._costs.drafts[method]
                    seconds += drafting.seconds(len(asked), depth, context)
                    seconds += drafting.catch_up_seconds(behind, len(asked))
                if emitted / seconds > best_speed and seconds - self._plain_seconds <= self._balance:
                    best_speed, best = emitted / seconds, choices
        make_drafts(best, self._proposers)
        return best

    def _look_up(self, running: list[Running]) -> dict[int, Draft]:
        if TEXT not in self._proposers:
            return {}
        asks = [DraftAsk(item.request, DEFAULT_AUTO_DEPTH) for item in running]
        drafts = self._proposers[TEXT].propose(asks)
        return {ask.request.id: draft for ask, draft in zip(asks, drafts, strict=True)}

    @staticmethod
    def _choice(method: str, item: Running, depth: int, drafts: Mapping[int, Draft]) -> Choice:
        depth = min(depth, item.request.max_useful_depth)
        if method == MODEL and depth:
            return Choice(method, depth, ask=DraftAsk(item.request, depth))
        tokens = drafts[item.request.id].tokens[:depth] if method == TEXT else []
        return Choice(method, len(tokens), draft=Draft(tokens, method)) if tokens else Choice.plain()

    def own_seconds(self, choices: Sequence[Choice]) -> float:
        num_touched = len(choices) if TEXT in self._proposers else sum(choice.depth > 0 for choice in choices)
        has_drafts = any(choice.depth for choice in choices)
        return policy_seconds(len(choices), num_touched, is_cold=self._is_cold, is_idle=False, has_drafts=has_drafts)

    def learn(self, outcomes: Sequence[Outcome], stats: StepStats, num_tokens: int, context: float) -> None:
        assert self._balance is not None
        self._costs.target.observe(len(outcomes), num_tokens, context, stats.forward_seconds)
        has_drafts = any(outcome.verdict.num_drafted for outcome in outcomes)
        plain_step = self._plain_seconds if has_drafts else stats.total_seconds - stats.speculation_seconds
        plain = plain_step * stats.num_emitted / len(outcomes)
        self._balance += plain - stats.total_seconds + _ALLOWED_LOSS * plain
        for outcome in outcomes:
            verdict = outcome.verdict
            if verdict.num_drafted:
                counts = self._counts[outcome.choice.method]
                counts[0] = _FADE * counts[0] + verdict.num_accepted
                counts[1] = _FADE * counts[1] + verdict.num_accepted + (verdict.num_accepted < verdict.num_drafted)

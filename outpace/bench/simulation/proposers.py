"""Simulated proposers: the scenario decides which of their draft tokens will be accepted.

A lookup takes a fixed time. The passes of a draft model, catch-up included, take the time of its own `StepLaw`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outpace.bench.simulation.machines import CPUS
from outpace.bench.simulation.world import Rates, Scenario, SimulatedRequest, jitter
from outpace.core import Draft, Request, Verdict
from outpace.speculation.costs.timing import DraftTiming
from outpace.speculation.proposers.base import DraftAsk, NoDraft

TEXT, MODEL = "suffix", "draft"
LOOKUP_SECONDS = 15e-6  # per request
RIGHT, WRONG = 1, 2  # the target always emits RIGHT


@dataclass(slots=True)
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class Running:
    request: Request
    world: SimulatedRequest
    started: float
    drafted_last: bool = False
    num_cached: int = 0  # tokens in the draft model's KV cache

    @property
    def position(self) -> int:
        return self.request.num_output - 1  # the first token comes from prefill

    def tokens(self, rates: Rates, depth: int) -> list[int]:
        """The draft from here: RIGHT for tokens that will be accepted, else WRONG."""
        return [self.token(rates, i) for i in range(depth)]

    def token(self, rates: Rates, offset: int) -> int:
        return RIGHT if rates.hit(self.position + offset, drafted_before=self.drafted_last) else WRONG


class TextProposer(NoDraft):
    name = TEXT

    def __init__(self, running: dict[int, Running], clock: Clock) -> None:
        self._running, self._clock = running, clock

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        self._clock.now += LOOKUP_SECONDS * len(asks)
        return [self._draft(self._running[ask.request.id], ask.depth) for ask in asks]

    def _draft(self, running: Running, depth: int) -> Draft:
        rates, start = running.world.text, running.position
        if rates is None or start >= rates.rate.size or not rates.has_guess[start]:
            return Draft([], self.name)
        depth = min(depth, rates.rate.size - start)
        confidence = rates.confidence[start : start + depth].tolist()
        return Draft(running.tokens(rates, depth), self.name, confidence=confidence)


class ModelProposer(NoDraft):
    name = MODEL
    is_lookup = False

    def __init__(self, running: dict[int, Running], clock: Clock, scenario: Scenario, rng: np.random.Generator) -> None:
        self._running, self._clock, self._scenario, self._rng = running, clock, scenario, rng
        self.measured = scenario.measured
        self.drafts_whole = scenario.machine not in CPUS

    def num_uncached(self, request: Request) -> int:
        return len(request.tokens) - self._running[request.id].num_cached

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        law = self._scenario.draft_law
        assert law is not None
        self.timing = DraftTiming()
        group = [(ask, self._running[ask.request.id], Draft([], self.name)) for ask in asks]
        drafts = [draft for _, _, draft in group]
        tokens = sum(self.num_uncached(ask.request) for ask in asks)
        is_catching_up = any(self.num_uncached(ask.request) > 2 for ask in asks)
        offset = 0
        while group:
            context = sum(len(ask.request.tokens) for ask, _, _ in group) / len(group)
            seconds = law.of(len(group), tokens, context) * jitter(self._rng, self._scenario.noise)
            self._clock.now += seconds
            if is_catching_up:
                self.timing.catch_up_seconds += seconds
                self.timing.num_caught_up += tokens
            else:
                self.timing.forwards.append((len(group), tokens, context, seconds))
            is_catching_up = False
            group = [item for item in group if self._extend(*item, offset)]
            offset, tokens = offset + 1, len(group)
        for ask, draft in zip(asks, drafts, strict=True):
            self._running[ask.request.id].num_cached = len(ask.request.tokens) + max(0, len(draft.tokens) - 1)
        return drafts

    def _extend(self, ask: DraftAsk, running: Running, draft: Draft, offset: int) -> bool:
        rates = running.world.model
        assert rates is not None
        at = running.position + offset
        confidence = float(rates.confidence[at]) if at < rates.rate.size else 0.5
        if ask.goes_on is not None:
            draft.confidence.append(confidence)
            if not ask.goes_on(confidence):
                return False
        draft.tokens.append(running.token(rates, offset))
        return len(draft.tokens) < ask.depth

    def observe(self, request: Request, verdict: Verdict) -> None:
        running = self._running[request.id]
        running.num_cached = min(running.num_cached, len(request.tokens) - 1)

"""Proposers of the simulated world: they draft what the world says will be accepted, or not.

A guess from text is there at once; a draft model's passes take the time its own law of costs says, reading included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outpace.bench.simulation.world import Rates, Scenario, SimulatedRequest, jitter
from outpace.core import Draft, Request, Verdict
from outpace.speculation.base import DraftAsk, DraftTiming, NoDraft
from outpace.speculation.seats import NEURAL

TEXT = "suffix"
RIGHT, WRONG = 1, 2  # the target always says 1


@dataclass(slots=True)
class Running:
    request: Request
    world: SimulatedRequest
    started: float
    drafted_last: bool = False
    num_read: int = 0  # by the draft model

    @property
    def position(self) -> int:
        return self.request.num_output - 1  # the first token comes from the prompt's own pass

    def tokens(self, rates: Rates, depth: int) -> list[int]:
        """What a proposer would draft from here: right where it will be accepted."""
        return [self.token(rates, i) for i in range(depth)]

    def token(self, rates: Rates, offset: int) -> int:
        return RIGHT if rates.hit(self.position + offset, drafted_before=self.drafted_last) else WRONG


class TextProposer(NoDraft):
    name = TEXT

    def __init__(self, running: dict[int, Running]) -> None:
        self._running = running

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [self._draft(self._running[ask.request.id], ask.depth) for ask in asks]

    def _draft(self, running: Running, depth: int) -> Draft:
        rates, start = running.world.text, running.position
        if rates is None or start >= rates.rate.size or not rates.has_guess[start]:
            return Draft([], self.name)
        depth = min(depth, rates.rate.size - start)
        confidence = rates.confidence[start : start + depth].tolist()
        return Draft(running.tokens(rates, depth), self.name, confidence=confidence)


class ModelProposer(NoDraft):
    name = NEURAL
    guesses_from_text = False

    def __init__(self, running: dict[int, Running], scenario: Scenario, rng: np.random.Generator) -> None:
        self._running, self._scenario, self._rng = running, scenario, rng
        self.seconds = 0.0  # simulated, of the latest call

    def num_unread(self, request: Request) -> int:
        return len(request.tokens) - self._running[request.id].num_read

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        law = self._scenario.draft_law
        assert law is not None
        self.timing = DraftTiming()
        group = [(ask, self._running[ask.request.id], Draft([], self.name)) for ask in asks]
        drafts = [draft for _, _, draft in group]
        unread = sum(self.num_unread(ask.request) for ask in asks)
        is_reading = any(self.num_unread(ask.request) > 2 for ask in asks)
        self.seconds, tokens = 0.0, unread
        offset = 0
        while group:
            context = sum(len(ask.request.tokens) for ask, _, _ in group) / len(group)
            seconds = law.of(len(group), tokens, context) * jitter(self._rng, self._scenario.noise)
            self.seconds += seconds
            if is_reading:
                self.timing.reading_seconds += seconds
            else:
                self.timing.forwards.append((len(group), tokens, context, seconds))
            is_reading = False
            group = [item for item in group if self._extend(*item, offset)]
            offset, tokens = offset + 1, len(group)
        for ask, draft in zip(asks, drafts, strict=True):
            self._running[ask.request.id].num_read = len(ask.request.tokens) + max(0, len(draft.tokens) - 1)
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
        running.num_read = min(running.num_read, len(request.tokens) - 1)

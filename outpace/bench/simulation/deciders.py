"""What decides in a simulated step, and our policy as one that does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from outpace.bench.simulation.machines import StepLaw
from outpace.bench.simulation.policy_time import policy_seconds
from outpace.bench.simulation.proposers import TEXT, Running
from outpace.bench.simulation.world import Scenario, jitter
from outpace.config import EngineConfig, ResolvedConfig
from outpace.core import Draft, StepStats
from outpace.speculation.base import NoDraft
from outpace.speculation.calibration import SIZES
from outpace.speculation.costs import Costs, StepCosts
from outpace.speculation.policy import Policy
from outpace.speculation.seats import NEURAL, Choice, Outcome

LOOKUP_SECONDS = 15e-6  # of a proposer that runs no model, for each request
HOST_SECONDS = 50e-6  # of a step, and
TOKEN_SECONDS = 30e-6  # of a token emitted
MAX_STEP_TOKENS = 8192


class Decider(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def estimated_speedup(self) -> float | None:
        """What it believes to have gained; None where it keeps no such figure."""
        ...

    def choose(self, running: list[Running], context: float, stats: StepStats) -> list[Choice]:
        """One choice for each running request; what lookups take is added to `stats`."""
        ...

    def own_seconds(self, choices: Sequence[Choice]) -> float:
        """What deciding and learning take in this step."""
        ...

    def learn(self, outcomes: Sequence[Outcome], stats: StepStats, num_tokens: int, context: float) -> None: ...


def measured_costs(scenario: Scenario, rng: np.random.Generator) -> Costs:
    """As a calibration would find them: each size with an error of its own."""

    def measured(law: StepLaw, most: int) -> StepCosts:
        sizes = [size for size in (*SIZES, 384, 512, 768, 1024, 1536, 2048) if size <= most]
        return StepCosts(
            {size: law.of(1, size) * jitter(rng, scenario.noise / 2) for size in sizes},
            row_seconds=law.row_seconds,
            context_seconds=law.context_seconds,
            row_context_seconds=law.row_context_seconds,
            token_context_seconds=law.token_context_seconds,
        )

    draft = scenario.draft_law
    return Costs(
        target=measured(scenario.law, max(64, min(2048, 16 * scenario.load.concurrency))),
        draft=measured(draft, 256) if draft is not None else None,
        guess_seconds={TEXT: LOOKUP_SECONDS},
        judge_seconds=TOKEN_SECONDS,
        schedule_seconds=HOST_SECONDS,
    )


def simulated_config(scenario: Scenario) -> ResolvedConfig:
    wanted = EngineConfig(draft="draft" if scenario.model is not None else None, max_sequences=128)
    config = wanted.resolve(model_context=1 << 20, model_path="simulated", draft_path=wanted.draft)
    return replace(config, max_sequences=scenario.load.concurrency, max_step_tokens=MAX_STEP_TOKENS)


class Ours:
    """The engine's own policy."""

    def __init__(
        self, name: str, scenario: Scenario, proposers: Mapping[str, NoDraft], rng: np.random.Generator
    ) -> None:
        self.name = name
        self._proposers = proposers
        costs = measured_costs(scenario, rng)
        self.policy = Policy(simulated_config(scenario), costs, proposers, can_speculate=True)

    @property
    def estimated_speedup(self) -> float | None:
        return self.policy.ledger.estimated_speedup

    def choose(self, running: list[Running], context: float, stats: StepStats) -> list[Choice]:
        requests = [item.request for item in running]
        guesses: dict[int, list[Draft]] = {}
        for method, asks in self.policy.wanted_guesses(requests).items():
            stats.guess_seconds += LOOKUP_SECONDS * len(asks)
            for ask, draft in zip(asks, self._proposers[method].propose(asks), strict=True):
                guesses.setdefault(ask.request.id, []).append(draft)
        choices = self.policy.decide(requests, guesses)
        for choice in choices:
            if choice.depth:
                choice.shorten(choice.depth)
        return choices

    def own_seconds(self, choices: Sequence[Choice]) -> float:
        return policy_seconds(
            len(choices), is_idle=self.policy.is_resting, has_drafts=any(choice.depth for choice in choices)
        )

    def learn(self, outcomes: Sequence[Outcome], stats: StepStats, num_tokens: int, context: float) -> None:
        timing = self._proposers[NEURAL].timing if stats.draft_seconds else None
        if timing is not None:
            self.policy.observe_drafting(timing)
        self.policy.observe(outcomes)
        costs = self.policy.costs
        assert costs is not None
        costs.target.observe(len(outcomes), num_tokens, context, stats.forward_seconds)
        self.policy.account(outcomes, stats, timing.reading_seconds if timing is not None else 0.0)
        for outcome in outcomes:
            if outcome.request.finish_reason is not None:
                self.policy.release(outcome.request)

"""The interface of a policy in the simulator, and our policy behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from outpace.bench.simulation.machines import GPUS, StepLaw
from outpace.bench.simulation.policy_time import policy_seconds
from outpace.bench.simulation.proposers import LOOKUP_SECONDS, MODEL, TEXT, Clock, Running
from outpace.bench.simulation.world import Scenario, jitter
from outpace.config import EngineConfig, ResolvedConfig
from outpace.core import StepStats
from outpace.speculation.costs.calibration import CATCH_UP_SIZES, SIZES
from outpace.speculation.costs.curves import Costs, DraftCosts, StepCosts
from outpace.speculation.policy.decision import Decision
from outpace.speculation.policy.policy import Policy
from outpace.speculation.policy.state import Choice, Outcome
from outpace.speculation.proposers.base import NoDraft
from outpace.speculation.session import Session

HOST_SECONDS = 50e-6  # of the host per step
_TOKEN_SECONDS = {True: 7.5e-6, False: 30e-6}  # of the host per emitted token: on the machine of a GPU, and else
MAX_STEP_TOKENS = 8192


def token_seconds(scenario: Scenario) -> float:
    return _TOKEN_SECONDS[scenario.machine in GPUS]


class Decider(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def estimated_speedup(self) -> float | None:
        """Its own estimate of the speedup; None if it has none."""
        ...

    def choose(self, running: list[Running], context: float, stats: StepStats) -> list[Choice]:
        """One choice for each running request, with its draft. The clock advances by the time this takes."""
        ...

    def own_seconds(self, choices: Sequence[Choice]) -> float:
        """Seconds for deciding and learning in this step."""
        ...

    def learn(self, outcomes: Sequence[Outcome], stats: StepStats, num_tokens: int, context: float) -> None: ...


def make_drafts(choices: Sequence[Choice], proposers: Mapping[str, NoDraft]) -> None:
    """Have the draft model make the chosen drafts."""
    asked = [choice for choice in choices if choice.ask is not None]
    if asked:
        drafts = proposers[MODEL].propose([choice.ask for choice in asked if choice.ask is not None])
        for choice, draft in zip(asked, drafts, strict=True):
            choice.draft = draft


def measured_costs(scenario: Scenario, rng: np.random.Generator) -> Costs:
    """Costs as a calibration would measure them: each size has its own random error."""

    def measured(law: StepLaw, most: int, sizes: Sequence[int] = (*SIZES, 1536, 2048)) -> StepCosts:
        sizes = [size for size in sizes if size <= most]
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
        drafts={TEXT: DraftCosts(lookup_seconds=LOOKUP_SECONDS)}
        | (
            {MODEL: DraftCosts(measured(draft, 256), measured(draft, 1024, CATCH_UP_SIZES))}
            if draft is not None
            else {}
        ),
        token_seconds=token_seconds(scenario),
        schedule_seconds=HOST_SECONDS,
    )


def simulated_config(scenario: Scenario) -> ResolvedConfig:
    wanted = EngineConfig(draft="draft" if scenario.model is not None else None, max_sequences=128)
    config = wanted.resolve(model_context=1 << 20, model_path="simulated", draft_path=wanted.draft)
    return replace(config, max_sequences=scenario.load.concurrency, max_step_tokens=MAX_STEP_TOKENS)


class Ours:
    """The engine's own policy, in the engine's own session."""

    def __init__(
        self, name: str, scenario: Scenario, proposers: Mapping[str, NoDraft], rng: np.random.Generator, clock: Clock
    ) -> None:
        self.name = name
        costs = measured_costs(scenario, rng)
        policy = Policy(simulated_config(scenario), costs, proposers, can_speculate=True)
        self.session = Session(policy, proposers, clock)
        self._decision: Decision | None = None
        self._is_cold = scenario.machine not in GPUS

    @property
    def estimated_speedup(self) -> float | None:
        return self.session.policy.estimated_speedup

    def choose(self, running: list[Running], context: float, stats: StepStats) -> list[Choice]:
        decision = self._decision = self.session.choose([item.request for item in running], stats)
        for choice in decision.choices:
            if choice.depth:
                choice.shorten(choice.depth)
        self.session.draft(decision, stats)
        return decision.choices

    def own_seconds(self, choices: Sequence[Choice]) -> float:
        decision = self._decision
        assert decision is not None
        drafted = {row for row, choice in enumerate(choices) if choice.depth}
        num_touched = len(drafted | decision.found.keys())
        return policy_seconds(
            len(choices), num_touched, is_cold=self._is_cold, is_idle=decision.is_idle, has_drafts=bool(drafted),
            is_repeated=decision.is_repeated,
        )  # fmt: skip

    def learn(self, outcomes: Sequence[Outcome], stats: StepStats, num_tokens: int, context: float) -> None:
        decision = self._decision
        assert decision is not None
        catch_up_seconds = self.session.learn_drafting(decision, is_typical=True)
        self.session.learn(decision, outcomes, stats, catch_up_seconds)

"""Simulates one scenario under one policy: requests arrive, steps take simulated time, tokens are emitted.

The policy under test is the engine's own; only the models and the clock are simulated. The policy's time advances that
clock by measured constants (`policy_time.py`), so that a seed gives the same figures on every machine.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from outpace.bench.simulation.deciders import HOST_SECONDS, Decider, Ours, token_seconds
from outpace.bench.simulation.oracle import Oracle
from outpace.bench.simulation.plan_and_budget import PlanAndBudget
from outpace.bench.simulation.proposers import MODEL, RIGHT, TEXT, Clock, ModelProposer, Running, TextProposer
from outpace.bench.simulation.rivals import FixedDecider, Rival
from outpace.bench.simulation.world import Result, Scenario, SimulatedRequest, jitter
from outpace.config import SamplingParams
from outpace.core import Request, StepStats, Verdict
from outpace.speculation.policy.state import Choice, Outcome
from outpace.speculation.proposers.base import NoDraft

OURS, ORACLE, BUDGET = "ours", "oracle", "plan+budget"


class Simulation:
    """Runs one scenario under one policy."""

    def __init__(self, scenario: Scenario, policy: str | Rival) -> None:
        self._scenario = scenario
        self._rng = np.random.default_rng(scenario.seed + 1)
        self._running: dict[int, Running] = {}
        self._clock = Clock()
        self._num_tokens = 0
        self._tpots: list[tuple[int, float]] = []
        proposers: dict[str, NoDraft] = {}
        if scenario.text is not None:
            proposers[TEXT] = TextProposer(self._running, self._clock)
        if scenario.model is not None:
            proposers[MODEL] = ModelProposer(self._running, self._clock, scenario, self._rng)
        self._proposers = proposers
        self.decider = self._decider(policy)

    def _decider(self, policy: str | Rival) -> Decider:
        if not isinstance(policy, str):
            return FixedDecider(policy, self._proposers)
        if policy == ORACLE:
            return Oracle(self._scenario, self._proposers)
        if policy == BUDGET:
            return PlanAndBudget(policy, self._scenario, self._proposers, self._rng)
        return Ours(policy, self._scenario, self._proposers, self._rng, self._clock)

    def run(self) -> Result:
        waiting = list(reversed(self._scenario.requests()))
        is_closed = self._scenario.load.intensity is None
        next_id = 0
        while waiting or self._running:
            # A closed loop is full by definition, so the phase in which it drains is not measured.
            if is_closed and not waiting and len(self._running) < self._scenario.load.concurrency:
                break
            while waiting and len(self._running) < self._scenario.load.concurrency:
                if waiting[-1].arrival > self._clock.now:
                    if self._running:
                        break
                    self._clock.now = waiting[-1].arrival
                self._admit(next_id, waiting.pop())
                next_id += 1
            self._step()
        return Result(
            policy=self.decider.name,
            tokens_per_second=self._num_tokens / self._clock.now,
            tpots=self._tpots,
            estimated_speedup=self.decider.estimated_speedup,
        )

    def _admit(self, identity: int, world: SimulatedRequest) -> None:
        unused = cast(Any, None)  # the simulation has no logits and no text
        request = Request(
            id=identity,
            params=SamplingParams(temperature=world.temperature, max_tokens=world.output_length),
            prompt=[0] * world.prompt_length,
            seed=0,
            shaper=unused,
            writer=unused,
            max_length=world.prompt_length + world.output_length + 1,
        )
        request.tokens.append(RIGHT)
        self._running[identity] = Running(request, world, self._clock.now)

    def _step(self) -> None:
        running = list(self._running.values())
        rows, scenario = len(running), self._scenario
        stats = StepStats(num_decode_rows=rows)
        context = sum(len(item.request.tokens) for item in running) / rows
        begin = self._clock.now
        choices = self.decider.choose(running, context, stats)
        if not stats.speculation_seconds + stats.draft_seconds:  # not every decider measures its own time
            stats.lookup_seconds = self._clock.now - begin
        num_tokens = rows + sum(len(c.draft.tokens) for c in choices if c.draft is not None)
        seconds = scenario.law.of(rows, num_tokens, context)
        num_by_model = sum(choice.ask is not None for choice in choices)
        if any(choice.depth for choice in choices) and num_by_model < rows:
            seconds += scenario.law.mixed_seconds
        stats.forward_seconds = seconds * jitter(self._rng, scenario.noise)
        outcomes = [self._verify(item, choice) for item, choice in zip(running, choices, strict=True)]
        stats.num_emitted = sum(len(outcome.verdict.tokens) for outcome in outcomes)
        stats.num_finished = sum(outcome.request.finish_reason is not None for outcome in outcomes)
        stats.schedule_seconds = HOST_SECONDS
        stats.verify_seconds = token_seconds(scenario) * stats.num_emitted
        stats.policy_seconds = self.decider.own_seconds(choices)
        self._clock.now = begin + stats.total_seconds
        self._num_tokens += stats.num_emitted
        self.decider.learn(outcomes, stats, num_tokens, context)
        for item in running:
            if item.request.finish_reason is not None:
                del self._running[item.request.id]
                length = item.request.num_output - 1  # the first token comes from prefill
                self._tpots.append((length, (self._clock.now - item.started) / max(length, 1)))

    def _verify(self, item: Running, choice: Choice) -> Outcome:
        drafted = choice.draft.tokens if choice.draft is not None else []
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == RIGHT:
            accepted += 1
        request = item.request
        num_emitted = min(accepted + 1, item.world.output_length + 1 - request.num_output)
        request.tokens += [RIGHT] * num_emitted
        if request.num_output > item.world.output_length:
            request.finish_reason = "length"
        item.drafted_last = bool(drafted)
        verdict = Verdict([RIGHT] * num_emitted, len(drafted), min(accepted, num_emitted))
        if choice.draft is not None:
            self._proposers[choice.method].observe(request, verdict)
        return Outcome(request, choice, verdict)

"""One scenario under one policy: requests arrive, steps take the time the world says, tokens are said.

The policy under test is the engine's own `Policy` with its own costs and ledger; only the model and the clock are
simulated. Its costs are measured at the start, with noise, as a calibration would, and corrected as it runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, cast

import numpy as np

from outpace.bench.simulation.oracle import TrueRates
from outpace.bench.simulation.proposers import RIGHT, TEXT, ModelProposer, Running, TextProposer
from outpace.bench.simulation.rivals import Rival
from outpace.bench.simulation.world import Result, Scenario, SimulatedRequest, jitter
from outpace.config import EngineConfig, ResolvedConfig, SamplingParams
from outpace.core import Draft, Request, StepStats, Verdict
from outpace.speculation.base import DraftAsk, NoDraft
from outpace.speculation.calibration import SIZES
from outpace.speculation.costs import Costs, StepCosts
from outpace.speculation.policy import Policy
from outpace.speculation.seats import NEURAL, Choice, Outcome

_GUESS_SECONDS = 15e-6
_HOST_SECONDS = 50e-6  # of a step, and
_TOKEN_SECONDS = 30e-6  # of a token said
_MAX_STEP_TOKENS = 8192


class Simulation:
    """Runs one scenario under one policy."""

    def __init__(self, scenario: Scenario, policy: str | Rival) -> None:
        self._scenario = scenario
        self._rng = np.random.default_rng(scenario.seed + 1)
        self._running: dict[int, Running] = {}
        self._rival = None if isinstance(policy, str) else policy
        self._name = policy if isinstance(policy, str) else policy.name
        self._now = 0.0
        self._num_tokens = 0
        self._tpots: list[float] = []
        self._policy_seconds: list[float] = []
        proposers: dict[str, NoDraft] = {}
        if scenario.text is not None:
            proposers[TEXT] = TextProposer(self._running)
        if scenario.model is not None:
            proposers[NEURAL] = ModelProposer(self._running, scenario, self._rng)
        self._proposers = proposers
        if self._rival is None:
            self._policy = Policy(
                _config(scenario), self._costs(exact=policy == "oracle"), proposers, can_speculate=True
            )
            if policy == "oracle":
                self._policy.acceptance = TrueRates()
                self._policy.use_costs(self._policy.costs)

    def _costs(self, *, exact: bool) -> Costs:
        """As calibration would find them: each size with an error of its own, unless exact."""
        noise = 0.0 if exact else self._scenario.noise / 2

        def measured(law: Any, most: int) -> StepCosts:
            sizes = [size for size in (*SIZES, 384, 512, 768, 1024, 1536, 2048) if size <= most]
            points = {size: law.of(1, size) * jitter(self._rng, noise) for size in sizes}
            if exact and law.stair:
                points = {size: law.of(1, size) for size in range(1, most + 1)}
            return StepCosts(points, row_context_seconds=law.row_context_seconds)

        most = 16 * self._scenario.load.concurrency
        draft = self._scenario.draft_law
        return Costs(
            target=measured(self._scenario.law, max(64, min(2048, most))),
            draft=measured(draft, 256) if draft is not None else None,
            guess_seconds={TEXT: _GUESS_SECONDS},
            judge_seconds=_TOKEN_SECONDS,
            schedule_seconds=_HOST_SECONDS,
        )

    def run(self) -> Result:
        waiting = list(reversed(self._scenario.requests()))
        is_closed = self._scenario.load.intensity is None
        next_id = 0
        while waiting or self._running:
            # A closed loop is full by definition: what happens while it drains says nothing about it.
            if is_closed and not waiting and len(self._running) < self._scenario.load.concurrency:
                break
            while waiting and len(self._running) < self._scenario.load.concurrency:
                if waiting[-1].arrival > self._now:
                    if self._running:
                        break
                    self._now = waiting[-1].arrival
                self._admit(next_id, waiting.pop())
                next_id += 1
            self._step()
        speedup = self._policy.ledger.estimated_speedup if self._rival is None else None
        tpots = np.array(self._tpots)
        return Result(
            policy=self._name,
            tokens_per_second=self._num_tokens / self._now,
            p99_tpot=float(np.percentile(tpots, 99)),
            mean_tpot=float(tpots.mean()),
            estimated_speedup=speedup,
            policy_ms=1e3 * statistics.median(self._policy_seconds),
        )

    def _admit(self, identity: int, world: SimulatedRequest) -> None:
        nothing = cast(Any, None)  # no text is shaped or written here
        request = Request(
            id=identity,
            params=SamplingParams(temperature=world.temperature, max_tokens=world.output_length),
            prompt=[0] * world.prompt_length,
            seed=0,
            shaper=nothing,
            writer=nothing,
            max_length=world.prompt_length + world.output_length + 1,
        )
        request.tokens.append(RIGHT)
        self._running[identity] = Running(request, world, self._now)

    def _step(self) -> None:
        running = list(self._running.values())
        requests = [item.request for item in running]
        stats = StepStats(num_decode_rows=len(requests))
        begin = perf_counter()
        choices = self._ours(requests, stats) if self._rival is None else self._theirs(running, stats)
        deciding = perf_counter() - begin
        stats.draft_seconds = self._draft(choices)
        num_tokens = len(requests) + sum(len(c.draft.tokens) for c in choices if c.draft is not None)
        context = sum(len(request.tokens) for request in requests) / len(requests)
        law = self._scenario.law
        stats.forward_seconds = law.of(len(requests), num_tokens, context) * jitter(self._rng, self._scenario.noise)
        outcomes = [self._judge(item, choice) for item, choice in zip(running, choices, strict=True)]
        stats.num_emitted = sum(len(outcome.verdict.tokens) for outcome in outcomes)
        stats.schedule_seconds = _HOST_SECONDS
        stats.verify_seconds = _TOKEN_SECONDS * stats.num_emitted
        self._now += stats.total_seconds
        self._num_tokens += stats.num_emitted
        begin = perf_counter()
        self._learn(outcomes, stats, num_tokens, context)
        self._policy_seconds.append(deciding + perf_counter() - begin)
        for item in running:
            if item.request.finish_reason is not None:
                del self._running[item.request.id]
                self._tpots.append((self._now - item.started) / max(item.request.num_output - 1, 1))

    def _ours(self, requests: list[Request], stats: StepStats) -> list[Choice]:
        policy = self._policy
        for request in requests:
            if isinstance(policy.acceptance, TrueRates):
                policy.acceptance.known[id(policy.prospects(request))] = self._running[request.id]
        asks = policy.wanted_guesses(requests)
        guesses: dict[int, list[Draft]] = {}
        for method, of_method in asks.items():
            stats.guess_seconds += _GUESS_SECONDS * len(of_method)
            for ask, draft in zip(of_method, self._proposers[method].propose(of_method), strict=True):
                guesses.setdefault(ask.request.id, []).append(draft)
        choices = policy.decide(requests, guesses)
        for choice in choices:
            if choice.depth:
                choice.shorten(choice.depth)
        return choices

    def _theirs(self, running: list[Running], stats: StepStats) -> list[Choice]:
        """A draft model where there is one, else a guess; for everybody alike."""
        assert self._rival is not None
        depth = self._rival.depth(len(running))
        choices = []
        for item in running:
            room = min(depth, item.request.max_useful_depth)
            if not room:
                choices.append(Choice.plain())
            elif NEURAL in self._proposers:
                choices.append(Choice(NEURAL, room, ask=DraftAsk(item.request, room)))
            else:
                stats.guess_seconds += _GUESS_SECONDS
                [draft] = self._proposers[TEXT].propose([DraftAsk(item.request, room)])
                choices.append(Choice(TEXT, len(draft.tokens), draft=draft))
        return choices

    def _draft(self, choices: Sequence[Choice]) -> float:
        asked = [choice for choice in choices if choice.ask is not None]
        if not asked:
            return 0.0
        proposer = self._proposers[NEURAL]
        assert isinstance(proposer, ModelProposer)
        drafts = proposer.propose([choice.ask for choice in asked if choice.ask is not None])
        for choice, draft in zip(asked, drafts, strict=True):
            choice.draft = draft
        if self._rival is None and proposer.timing is not None:
            self._policy.observe_drafting(proposer.timing)
        return proposer.seconds

    def _judge(self, item: Running, choice: Choice) -> Outcome:
        drafted = choice.draft.tokens if choice.draft is not None else []
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == RIGHT:
            accepted += 1
        request = item.request
        said = min(accepted + 1, item.world.output_length + 1 - request.num_output)
        request.tokens += [RIGHT] * said
        if request.num_output > item.world.output_length:
            request.finish_reason = "length"
        item.drafted_last = bool(drafted)
        verdict = Verdict([RIGHT] * said, len(drafted), min(accepted, said))
        if choice.ask is not None and choice.draft is not None:
            self._proposers[NEURAL].observe(request, verdict)
        return Outcome(request, choice, verdict)

    def _learn(self, outcomes: Sequence[Outcome], stats: StepStats, num_tokens: int, context: float) -> None:
        verdicts = [outcome.verdict for outcome in outcomes]
        if self._rival is not None:
            self._rival.observe(
                len(outcomes),
                sum(v.num_drafted > 0 for v in verdicts),
                sum(v.num_drafted for v in verdicts),
                sum(v.num_accepted for v in verdicts),
            )
            return
        self._policy.observe(outcomes)
        costs = self._policy.costs
        assert costs is not None
        if not isinstance(self._policy.acceptance, TrueRates):
            costs.target.observe(len(outcomes), num_tokens, context, stats.forward_seconds)
        timing = self._proposers[NEURAL].timing if NEURAL in self._proposers and stats.draft_seconds else None
        self._policy.account(outcomes, stats, timing.reading_seconds if timing is not None else 0.0)
        for outcome in outcomes:
            if outcome.request.finish_reason is not None:
                self._policy.release(outcome.request)


def _config(scenario: Scenario) -> ResolvedConfig:
    wanted = EngineConfig(draft="draft" if scenario.model is not None else None, max_sequences=128)
    config = wanted.resolve(model_context=1 << 20, model_path="simulated", draft_path=wanted.draft)
    return replace(config, max_sequences=scenario.load.concurrency, max_step_tokens=_MAX_STEP_TOKENS)

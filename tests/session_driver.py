"""Runs a policy without an engine: scripted proposers, and a target that always emits token 1.

`Session` has the protocol of a step. The driver only verifies drafts and advances its own clock by what its costs say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from outpace.config import SamplingParams, SpeculationParams
from outpace.core import Draft, Request, StepStats, Verdict
from outpace.speculation.costs.curves import Costs, DraftCosts, StepCosts
from outpace.speculation.costs.timing import DraftTiming
from outpace.speculation.policy.decision import Decision
from outpace.speculation.policy.policy import Policy
from outpace.speculation.policy.state import Choice, Outcome
from outpace.speculation.proposers.base import DraftAsk, NoDraft
from outpace.speculation.session import Session
from tests.fakes import fake_config
from tests.requests_helper import make_request

RIGHT, WRONG, OTHER = 1, 2, 3

FLAT = {1: 1.0, 256: 1.0}  # further tokens are free: a step is bound by reading the weights
PROPORTIONAL = {1: 1.0, 256: 256.0}  # a second token costs as much as a second step
USUAL = {1: 1.0, 256: 1.0 + 255 * 0.3}  # a further token costs a third of a step

# Which tokens are right, and the confidence: one for all tokens, or one for each.
Script = Callable[[Request], tuple[Sequence[bool], float | Sequence[float]]]


def always(right: bool = True, *, sure: float = 0.9, length: int = 16) -> Script:
    return lambda request: ([right] * length, sure)


def nothing(request: Request) -> tuple[Sequence[bool], float]:
    return [], 0.0


@dataclass(slots=True)
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Scripted(NoDraft):
    """A lookup proposer that follows a script; `asked` has the requests of every call."""

    def __init__(self, name: str, script: Script, costs: DraftCosts, clock: Clock) -> None:
        self.name = name
        self.script = script
        self.costs = costs  # the true costs of its drafts
        self._clock = clock
        self.asked: list[list[Request]] = []

    @property
    def num_asked(self) -> int:
        return sum(map(len, self.asked))

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        self.asked.append([ask.request for ask in asks])
        self._clock.now += self.costs.lookup_seconds * len(asks)
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: DraftAsk) -> Draft:
        right, sure = self._scripted(ask.request)
        tokens = [RIGHT if hit else WRONG for hit in right[: ask.depth]]
        return Draft(tokens, self.name, confidence=sure[: len(tokens)])

    def _scripted(self, request: Request) -> tuple[Sequence[bool], list[float]]:
        right, sure = self.script(request)
        return right, [sure] * len(right) if isinstance(sure, float) else list(sure)


class ScriptedModel(Scripted):
    """A scripted draft model: it catches up with requests, and asks `goes_on` before every token.

    With one-pass costs it does not ask and gives no confidence.
    """

    is_lookup = False

    def __init__(self, name: str, script: Script, costs: DraftCosts, clock: Clock) -> None:
        super().__init__(name, script, costs, clock)
        self.num_cached: dict[int, int] = {}

    def num_uncached(self, request: Request) -> int:
        return len(request.tokens) - self.num_cached.get(request.id, 0)

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        self.asked.append([ask.request for ask in asks])
        self.timing = DraftTiming()
        context = sum(len(ask.request.tokens) for ask in asks) / len(asks)
        behind = [self.num_uncached(ask.request) for ask in asks]
        drafts = [self._draft(ask) for ask in asks]
        depth = max(len(draft.confidence or draft.tokens) for draft in drafts)
        self._catch_up(len(asks), behind)
        for seconds, tokens in self._passes(len(asks), depth, context):
            self.timing.forwards.append((len(asks), tokens, context, seconds))
            self._clock.now += seconds
        for ask, draft in zip(asks, drafts, strict=True):
            self.num_cached[ask.request.id] = len(ask.request.tokens) + max(0, len(draft.tokens) - 1)
        return drafts

    def _catch_up(self, rows: int, behind: Sequence[int]) -> None:
        assert self.timing is not None
        if max(behind) > 2:
            seconds = self.costs.catch_up_seconds(sum(behind) - rows, rows)
            self.timing.catch_up_seconds, self.timing.num_caught_up = seconds, sum(behind)
            self._clock.now += seconds

    def _passes(self, rows: int, depth: int, context: float) -> list[tuple[float, int]]:
        assert self.costs.passes is not None
        if self.costs.one_pass:
            return [(self.costs.passes.seconds(rows, rows * depth, context), rows * depth)] * (depth > 0)
        return [(self.costs.passes.seconds(rows, rows, context), rows)] * depth

    def _draft(self, ask: DraftAsk) -> Draft:
        right, sure = self._scripted(ask.request)
        draft = Draft([], self.name)
        for hit, confidence in list(zip(right, sure, strict=True))[: ask.depth]:
            if ask.goes_on is not None and not self.costs.one_pass:
                draft.confidence.append(confidence)
                if not ask.goes_on(confidence):
                    break
            draft.tokens.append(RIGHT if hit else WRONG)
        return draft

    def observe(self, request: Request, verdict: Verdict) -> None:
        self.num_cached[request.id] = min(self.num_cached[request.id], len(request.tokens) - 1)


def model_costs(seconds: float, *, one_pass: bool = False) -> DraftCosts:
    """A pass takes `seconds` for one token, and 1.5 times that for 256."""
    return DraftCosts(StepCosts({1: seconds, 256: 1.5 * seconds}), one_pass=one_pass)


def costs_of(
    points: Mapping[int, float], *, lookup_seconds: float = 1e-4, models: Mapping[str, DraftCosts] | None = None
) -> Costs:
    lookups = {name: DraftCosts(lookup_seconds=lookup_seconds) for name in ("suffix", "ngram")}
    return Costs(target=StepCosts(points), drafts=lookups | deepcopy(dict(models or {})))


def request_of(*, length: int = 3, max_length: int = 10**6, temperature: float = 0.0, **wishes: Any) -> Request:
    made = make_request([97] * (length - 1), [99])
    made.params = SamplingParams(temperature=temperature, speculation=SpeculationParams(**wishes))
    made.max_length = max_length
    return made


class SessionDriver:
    def __init__(
        self,
        points: Mapping[int, float],
        *,
        suffix: Script | None = None,
        ngram: Script | None = None,
        draft: Script | None = None,
        draft_seconds: float = 0.05,
        models: Mapping[str, tuple[Script, DraftCosts]] | None = None,
        lookup_seconds: float = 1e-4,
        can_speculate: bool = True,
        begins_ahead: bool = False,
        **options: Any,
    ) -> None:
        """`draft` scripts a model whose passes take `draft_seconds`; `models` adds others by name."""
        scripts = {name: script for name, script in (("suffix", suffix), ("ngram", ngram)) if script is not None}
        drafting = dict(models or {})
        if draft is not None:
            drafting["draft"] = draft, model_costs(draft_seconds)
        costs = costs_of(
            points, lookup_seconds=lookup_seconds, models={name: each for name, (_, each) in drafting.items()}
        )
        self.truth = deepcopy(costs)
        self.clock = Clock()
        self.proposers: dict[str, Scripted] = {
            name: Scripted(name, script, self.truth.drafts[name], self.clock) for name, script in scripts.items()
        }
        for name, (script, _) in drafting.items():
            self.proposers[name] = ScriptedModel(name, script, self.truth.drafts[name], self.clock)
        settings: dict[str, Any] = {"speculation": "auto", "depth": 8, "max_step_tokens": 512, **options}
        config = fake_config(draft="fake" if draft is not None else None, **settings)
        if "method" not in options:  # then all compete, also models that the configuration does not list
            unlisted: Any = [name for name in drafting if name not in config.methods]
            config = replace(config, methods=(*config.methods, *unlisted))
        self.policy = Policy(
            config, costs, self.proposers, can_speculate=can_speculate, begins_ahead=begins_ahead, trace_steps=1000
        )
        self.session = Session(self.policy, self.proposers, self.clock)
        self.accepts: Callable[[Sequence[int]], int] = _num_right  # how many of a draft's tokens are accepted
        self.mixed_seconds = 0.0  # more for a step that is neither plain nor drafted by a model for all requests alike

    @property
    def costs(self) -> Costs:
        """The costs as the policy has learned them."""
        assert self.policy.costs is not None
        return self.policy.costs

    def model(self, name: str = "draft") -> ScriptedModel:
        found = self.proposers[name]
        assert isinstance(found, ScriptedModel)
        return found

    def settle(self, request: Request) -> None:
        """Count the plain steps that have passed."""
        self.policy._accounts.settle(request, self.policy._state(request))

    def gain(self, steps: float) -> None:
        """Add the time of this many plain steps to what speculation saved, for the engine and for each request."""
        for budget in (self.policy.budget, *[state.budget for state in self.policy._states.values()]):
            budget.book(-steps)

    def lose(self, steps: float) -> None:
        """Add the time of this many plain steps to what speculation lost."""
        self.policy.budget.book(steps)

    @property
    def lost(self) -> float:
        """Seconds that decoding took so far, more than plain decoding would have."""
        return self.policy.spent_seconds - self.policy.plain_seconds

    def decision(self, requests: Sequence[Request], *, num_prefill: int = 0) -> Decision:
        return self.session.choose(requests, StepStats(num_prefill_tokens=num_prefill))

    def decide(self, requests: Sequence[Request], *, num_prefill: int = 0) -> list[Choice]:
        return self.decision(requests, num_prefill=num_prefill).choices

    def depths(self, requests: Sequence[Request], *, num_prefill: int = 0) -> list[int]:
        return [choice.depth for choice in self.decide(requests, num_prefill=num_prefill)]

    def step(
        self,
        requests: Sequence[Request],
        *,
        policy_seconds: float = 0.0,
        deciding_seconds: float = 0.0,
        num_prefill: int = 0,
        forward_seconds: float | None = None,
        hidden_seconds: float = 0.0,
        had_one_time_work: bool = False,
    ) -> list[Outcome]:
        """Run one step. `policy_seconds` are spent in every step, `deciding_seconds` only if no decision stands;
        `forward_seconds` replaces the time that the true costs give for the target's pass."""
        rows = len(requests)
        stats = StepStats(num_decode_rows=rows, num_prefill_tokens=num_prefill, had_one_time_work=had_one_time_work)
        context = sum(len(request.tokens) for request in requests) / rows
        decision = self.session.choose(requests, stats)
        policy_seconds += 0.0 if decision.is_repeated else deciding_seconds
        stats.policy_seconds += policy_seconds
        for choice in decision.choices:
            if choice.depth:
                choice.shorten(choice.depth)
        self.session.draft(decision, stats)
        catch_up_seconds = self.session.learn_drafting(decision, is_typical=True)
        outcomes = [self._verify(request, choice) for request, choice in zip(requests, decision.choices, strict=True)]
        for outcome in outcomes:
            self.session.observe(outcome.request, outcome.choice, outcome.verdict)
        num_tokens = rows + num_prefill + sum(outcome.verdict.num_drafted for outcome in outcomes)
        usual = self.truth.target.seconds(rows, num_tokens, context)
        num_by_model = sum(choice.depth > 0 and choice.ask is not None for choice in decision.choices)
        if decision.has_drafts and num_by_model < rows:
            usual += self.mixed_seconds
        stats.forward_seconds = usual if forward_seconds is None else forward_seconds
        stats.hidden_seconds = hidden_seconds
        stats.num_emitted = sum(len(outcome.verdict.tokens) for outcome in outcomes)
        stats.num_finished = sum(outcome.request.finish_reason is not None for outcome in outcomes)
        self.clock.now += stats.forward_seconds + policy_seconds
        self.session.learn(decision, outcomes, stats, catch_up_seconds)
        return outcomes

    def run(self, requests: Sequence[Request], steps: int, **seconds: float) -> list[list[int]]:
        """Run steps; returns the depths verified, step by step."""
        return [
            [outcome.verdict.num_drafted for outcome in self.step(requests, **seconds)]  # type: ignore[arg-type]
            for _ in range(steps)
        ]

    def _verify(self, request: Request, choice: Choice) -> Outcome:
        drafted = choice.draft.tokens if choice.draft is not None else []
        num_accepted = self.accepts(drafted)
        is_rejected = num_accepted < len(drafted)
        emitted = [*drafted[:num_accepted], OTHER if is_rejected and drafted[num_accepted] == RIGHT else RIGHT]
        request.tokens += emitted
        if len(request.tokens) >= request.max_length:
            request.finish_reason = "length"
        return Outcome(request, choice, Verdict(emitted, len(drafted), num_accepted))


def _num_right(drafted: Sequence[int]) -> int:
    return next((i for i, token in enumerate(drafted) if token != RIGHT), len(drafted))

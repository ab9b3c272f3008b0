"""A policy at work without an engine: proposers that say what they are told, a target that always says 1.

`Desk.step` does what the engine does in a step and in the same order; time is what the desk's own costs say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outpace.config import SamplingParams, SpeculationParams
from outpace.core import Draft, Request, StepStats, Verdict
from outpace.speculation.base import DraftAsk, DraftTiming, NoDraft
from outpace.speculation.costs import Costs, StepCosts
from outpace.speculation.policy import Policy
from outpace.speculation.seats import Choice, Outcome
from tests.fakes import fake_config
from tests.requests_helper import make_request

RIGHT, WRONG = 1, 2

FLAT = {1: 1.0, 256: 1.0}  # further tokens are free: a step waits for the weights
PROPORTIONAL = {1: 1.0, 256: 256.0}  # a second token costs as much as a second step
USUAL = {1: 1.0, 256: 1.0 + 255 * 0.3}  # a further token costs a third of a step

Script = Callable[[Request], tuple[Sequence[bool], float]]  # which tokens will be right, and how sure it claims to be


def always(right: bool = True, *, sure: float = 0.9, length: int = 16) -> Script:
    return lambda request: ([right] * length, sure)


def nothing(request: Request) -> tuple[Sequence[bool], float]:
    return [], 0.0


class Scripted(NoDraft):
    """Guesses from text, as told."""

    def __init__(self, name: str, script: Script) -> None:
        self.name = name
        self.script = script

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: DraftAsk) -> Draft:
        right, sure = self.script(ask.request)
        tokens = [RIGHT if hit else WRONG for hit in right[: ask.depth]]
        return Draft(tokens, self.name, confidence=[sure] * len(tokens))


class ScriptedModel(Scripted):
    """A draft model: it reads what it has not read, and asks before every token whether to go on."""

    guesses_from_text = False

    def __init__(self, script: Script) -> None:
        super().__init__("draft", script)
        self.num_read: dict[int, int] = {}

    def num_unread(self, request: Request) -> int:
        return len(request.tokens) - self.num_read.get(request.id, 0)

    def _draft(self, ask: DraftAsk) -> Draft:
        right, sure = self.script(ask.request)
        draft = Draft([], self.name)
        for hit in right[: ask.depth]:
            if ask.goes_on is not None:
                draft.confidence.append(sure)
                if not ask.goes_on(sure):
                    break
            draft.tokens.append(RIGHT if hit else WRONG)
        self.num_read[ask.request.id] = len(ask.request.tokens) + max(0, len(draft.tokens) - 1)
        return draft

    def observe(self, request: Request, verdict: Verdict) -> None:
        self.num_read[request.id] = min(self.num_read[request.id], len(request.tokens) - 1)

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        self.timing = DraftTiming()
        return super().propose(asks)


def costs_of(points: Mapping[int, float], *, draft: float | None = None, guess: float = 1e-4) -> Costs:
    """`draft` is what a pass of the draft model takes, whatever its size."""
    return Costs(
        target=StepCosts(points),
        draft=StepCosts({1: draft, 256: draft * 1.5}) if draft is not None else None,
        guess_seconds={"suffix": guess, "ngram": guess},
    )


def request_of(*, length: int = 3, max_length: int = 10**6, temperature: float = 0.0, **wishes: Any) -> Request:
    made = make_request([97] * (length - 1), [99])
    made.params = SamplingParams(temperature=temperature, speculation=SpeculationParams(**wishes))
    made.max_length = max_length
    return made


class Desk:
    def __init__(
        self,
        points: Mapping[int, float],
        *,
        suffix: Script | None = None,
        ngram: Script | None = None,
        draft: Script | None = None,
        draft_seconds: float = 0.05,
        guess_seconds: float = 1e-4,
        can_speculate: bool = True,
        begins_ahead: bool = False,
        **options: Any,
    ) -> None:
        told: list[Scripted] = []
        if suffix is not None:
            told.append(Scripted("suffix", suffix))
        if ngram is not None:
            told.append(Scripted("ngram", ngram))
        if draft is not None:
            told.append(ScriptedModel(draft))
        self.proposers = {proposer.name: proposer for proposer in told}
        settings: dict[str, Any] = {"speculation": "auto", "depth": 8, "max_step_tokens": 512, **options}
        config = fake_config(draft="fake" if draft is not None else None, **settings)
        pass_seconds = draft_seconds if draft is not None else None
        self.truth = costs_of(points, draft=pass_seconds, guess=guess_seconds)
        self.policy = Policy(
            config,
            costs_of(points, draft=pass_seconds, guess=guess_seconds),
            self.proposers,
            can_speculate=can_speculate,
            begins_ahead=begins_ahead,
            trace_steps=1000,
        )

    def decide(self, requests: Sequence[Request]) -> list[Choice]:
        guesses: dict[int, list[Draft]] = {}
        for name, asks in self.policy.wanted_guesses(requests).items():
            for ask, draft in zip(asks, self.proposers[name].propose(asks), strict=True):
                guesses.setdefault(ask.request.id, []).append(draft)
        return self.policy.decide(requests, guesses)

    def depths(self, requests: Sequence[Request]) -> list[int]:
        return [choice.depth for choice in self.decide(requests)]

    def step(self, requests: Sequence[Request], *, policy_seconds: float = 0.0) -> list[Outcome]:
        choices = self.decide(requests)
        rows, drafting, reading = len(requests), 0.0, 0.0
        context = sum(len(request.tokens) for request in requests) / rows
        asked = [choice for choice in choices if choice.ask is not None]
        by_model = [choice for choice in asked if choice.method == "draft"]
        if by_model:
            model = self.proposers["draft"]
            assert isinstance(model, ScriptedModel)
            unread = [model.num_unread(choice.ask.request) for choice in by_model if choice.ask is not None]
            depth = max(choice.depth for choice in by_model)
            drafting = self.truth.draft_seconds(len(by_model), sum(unread), depth, context)
            if max(unread) > 2:
                assert self.truth.draft is not None
                reading = self.truth.draft.seconds(len(by_model), sum(unread), context)
        for choice in asked:
            assert choice.ask is not None
            [choice.draft] = self.proposers[choice.method].propose([choice.ask])
        outcomes = [self._judge(request, choice) for request, choice in zip(requests, choices, strict=True)]
        for outcome in outcomes:
            if outcome.choice.ask is not None:
                self.proposers[outcome.choice.method].observe(outcome.request, outcome.verdict)
        num_tokens = rows + sum(outcome.verdict.num_drafted for outcome in outcomes)
        stats = StepStats(
            num_decode_rows=rows,
            num_emitted=sum(len(outcome.verdict.tokens) for outcome in outcomes),
            policy_seconds=policy_seconds,
            draft_seconds=drafting,
            forward_seconds=self.truth.target.seconds(rows, num_tokens, context),
        )
        self.policy.observe(outcomes)
        self.policy.account(outcomes, stats, reading)
        for outcome in outcomes:
            if outcome.request.finish_reason is not None:
                self.policy.release(outcome.request)
        return outcomes

    def run(self, requests: Sequence[Request], steps: int) -> list[list[int]]:
        """Depths verified, step by step."""
        return [[outcome.verdict.num_drafted for outcome in self.step(requests)] for _ in range(steps)]

    @staticmethod
    def _judge(request: Request, choice: Choice) -> Outcome:
        choice.shorten(choice.depth)
        drafted = choice.draft.tokens if choice.draft is not None else []
        num_accepted = next((i for i, token in enumerate(drafted) if token != RIGHT), len(drafted))
        said = [RIGHT] * (num_accepted + 1)
        request.tokens += said
        if len(request.tokens) >= request.max_length:
            request.finish_reason = "length"
        return Outcome(request, choice, Verdict(said, len(drafted), num_accepted))

"""`auto` in a whole engine: whatever the policy decides, the tokens are those of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import pytest

from outpace.backends.base import StepResult
from outpace.config import SamplingParams, SpeculationParams
from outpace.core import Case, Draft, Request, StepPlan, StepStats
from outpace.engine.engine import Engine
from outpace.speculation.costs.curves import Costs, DraftCosts, StepCosts
from outpace.speculation.policy.decision import Decision
from outpace.speculation.policy.state import Outcome
from outpace.speculation.proposers.base import DraftAsk
from outpace.speculation.proposers.draft_model import DraftModelProposer
from outpace.speculation.proposers.suffix import SuffixProposer
from tests.engine.test_engine import check_law, plainly, prompt_of, run
from tests.fakes import FakeModel, fake_engine, runner_of

# Artificial costs: plain steps are expensive, some sizes are cheaper than smaller ones, the rest is nearly free.
ODD: dict[str, dict[int, float]] = {
    "flat": {1: 1.0, 64: 1.0},
    "stairs": {n: 1.0 + (n - 1) // 8 for n in range(1, 65)},
    "downhill": {1: 2.0, 5: 1.0, 9: 3.0, 12: 0.5, 64: 9.0},
}


class Unchanging(StepCosts):
    """The time of the fake runner does not matter here."""

    def observe(self, rows: int, tokens: int, context: float, seconds: float, num_passes: int = 1) -> None:
        pass


def auto_engine(model: FakeModel, points: dict[int, float], *, draft_seconds: float = 0.01, **options: Any) -> Engine:
    """An engine with these costs, which books every step at its cost."""
    engine = fake_engine(model, speculation="auto", **options)
    drafts = {"draft": DraftCosts(Unchanging({1: draft_seconds})), "suffix": DraftCosts(), "ngram": DraftCosts()}
    costs = Costs(target=Unchanging(points), drafts=drafts)
    engine.policy.use_costs(costs)
    learn = engine.policy.learn

    def booked(decision: Decision, outcomes: Sequence[Outcome], stats: StepStats, *others: Any, **options: Any) -> None:
        tokens = sum(1 + outcome.verdict.num_drafted for outcome in outcomes)
        seconds = costs.target.seconds(len(outcomes), tokens)
        learn(decision, outcomes, StepStats(num_emitted=stats.num_emitted, forward_seconds=seconds), 0.0)

    engine.policy.learn = booked  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize("points", ODD.values(), ids=ODD.keys())
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=60),
        SamplingParams(temperature=0.8, seed=11, max_tokens=60),
        SamplingParams(temperature=1.0, seed=3, top_p=0.9, top_k=12, min_p=0.02, max_tokens=60),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=60),
    ],
    ids=["greedy", "seeded", "filters", "penalties"],
)
def test_whatever_is_decided_the_tokens_are_those_of_plain_decoding(points, params):
    model = FakeModel()
    engine = auto_engine(model, points)
    rng = random.Random(5)
    prompts = [prompt_of(rng, n) for n in (1, 5, 20, 33, 70, 12)]
    requests = [engine.submit(prompt, params) for prompt in prompts]
    said = run(engine, requests)
    assert said == [plainly(model, p, params, r.seed) for p, r in zip(prompts, requests, strict=True)]
    assert sum(request.spec.num_accepted for request in requests) > 0, "nothing was accepted: the test shows little"
    assert sum(request.spec.num_drafted - request.spec.num_accepted for request in requests) > 0


def test_all_proposers_take_part_and_tokens_stay_the_same():
    model = FakeModel(order=2)
    engine = auto_engine(model, ODD["flat"], draft_seconds=0.2, draft_noise=0.5)
    params = SamplingParams(temperature=0.7, seed=2, max_tokens=80, ignore_eos=True)
    rng = random.Random(1)
    prompts = [prompt_of(rng, n) for n in (8, 30, 60, 15, 40, 22)]
    wishes = [None, "ngram", "suffix", "draft", None, None]
    requests = [
        engine.submit(
            prompt,
            SamplingParams(temperature=0.7, seed=2, max_tokens=80, speculation=SpeculationParams(method=wish)),  # type: ignore[arg-type]
        )
        for prompt, wish in zip(prompts, wishes, strict=True)
    ]
    said = run(engine, requests)
    plain = SamplingParams(temperature=params.temperature, seed=2, max_tokens=80)
    assert said == [plainly(model, p, plain, 2) for p in prompts]
    assert set().union(*(request.spec.proposers for request in requests)) == {"ngram", "suffix", "draft"}


def test_modes_mixed_in_one_batch_disturb_nobody():
    model = FakeModel()
    engine = auto_engine(model, ODD["flat"], max_sequences=4)
    modes: list[Any] = ["auto", "off", "on", "auto", "on", "off", "auto"]
    prompts = [prompt_of(random.Random(i), 20) for i in range(len(modes))]
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=40, speculation=SpeculationParams(mode=mode))
        for i, mode in enumerate(modes)
    ]
    requests = [engine.submit(prompt, wanted) for prompt, wanted in zip(prompts, params, strict=True)]
    said = run(engine, requests)
    assert said == [plainly(model, p, wanted, wanted.seed or 0) for p, wanted in zip(prompts, params, strict=True)]


def test_a_seeded_request_replays_in_other_company_at_other_costs():
    """The policy has learned something else and decides differently; the tokens are the same."""
    model, prompt = FakeModel(), prompt_of(random.Random(9), 25)
    params = SamplingParams(temperature=1.0, seed=77, max_tokens=60, ignore_eos=True)
    said, drafted = set(), set()
    for points in ODD.values():
        engine = auto_engine(model, points)
        for company in range(3):
            others = [
                engine.submit(prompt_of(random.Random(company * 10 + i), 10 + i), SamplingParams(max_tokens=30))
                for i in range(company)
            ]
            request = engine.submit(prompt, params)
            run(engine, [*others, request])
            said.add(tuple(request.tokens))
            drafted.add((request.spec.num_drafted, request.spec.steps))
    assert len(said) == 1
    assert len(drafted) > 1, "decisions were the same throughout: the test shows little"


def test_a_free_request_has_the_targets_law_whatever_is_decided():
    """Unseeded drafts that stop on their confidence, with block verification: frequencies match the target's."""
    model = FakeModel(vocab_size=258, order=1, sharpness=1.0)
    engine = auto_engine(model, ODD["flat"], draft_seconds=0.001, prefix_reuse=False, draft_noise=0.5, method="draft")
    params = SamplingParams(temperature=1.0, top_k=2, max_tokens=4, ignore_eos=True)
    requests = check_law(engine, model, params, frozenset())
    assert sum(request.spec.num_accepted for request in requests) > len(requests) / 4


# ---- stopping a draft early


def drafted(engine: Engine, asks: Sequence[DraftAsk]) -> list[Draft]:
    proposer = engine._proposers["draft"]
    assert isinstance(proposer, DraftModelProposer)
    return proposer.propose(asks)


def free_requests(engine: Engine, count: int) -> list[Request]:
    params = SamplingParams(temperature=1.5, max_tokens=30, ignore_eos=True)
    return [engine._request([97, 98, 99], params, seed) for seed in range(count)]


class Stopping:
    """A rule that gives these answers, one after another, and is over after `last` of them."""

    def __init__(self, answers: Sequence[bool], last: int = 99) -> None:
        self.asked: list[float] = []
        self.is_over = False
        self._answers, self._last = answers, last

    def __call__(self, confidence: float) -> bool:
        self.asked.append(confidence)
        self.is_over = len(self.asked) == self._last
        return self._answers[len(self.asked) - 1]


def test_whether_a_draft_goes_on_is_asked_with_the_distribution_and_not_the_token():
    """Same text, different noise: the first distribution gives different tokens, but the same confidence."""
    engine = fake_engine(speculation="off", max_sequences=8)
    heard: list[list[float]] = []
    tokens = []
    for request in free_requests(engine, 24):
        stop = Stopping([True] * 3)
        [draft] = drafted(engine, [DraftAsk(request, 3, stop)])
        engine._proposers["draft"].release(request)
        assert draft.confidence == stop.asked
        heard.append(stop.asked)
        tokens.append(draft.tokens)
    assert len({first for first, *_ in heard}) == 1
    assert len({first for first, *_ in tokens}) > 3
    by_past: dict[tuple[int, ...], set[float]] = {}
    for said, asked in zip(tokens, heard, strict=True):
        for i in range(3):
            by_past.setdefault(tuple(said[:i]), set()).add(asked[i])
    assert all(len(figures) == 1 for figures in by_past.values()), "a function of what was drafted before, and no more"


def test_a_draft_that_stops_was_not_drawn_any_further():
    engine = fake_engine(speculation="off")
    [request] = free_requests(engine, 1)
    [draft] = drafted(engine, [DraftAsk(request, 8, Stopping([True, True, False]))])
    assert len(draft.tokens) == 2 and draft.probs is not None and len(draft.probs) == 2
    assert len(draft.confidence) == 3, "the figure that stopped it is kept, to learn from"


def test_a_pass_that_would_not_pay_is_not_run():
    engine = fake_engine(speculation="off")
    [request] = free_requests(engine, 1)
    stop = Stopping([True, True, True], last=2)
    [draft] = drafted(engine, [DraftAsk(request, 8, stop)])
    proposer = engine._proposers["draft"]
    assert len(draft.tokens) == 2 and len(stop.asked) == 2
    assert proposer.timing is not None and len(proposer.timing.forwards) <= 2
    assert draft.confidence == [*stop.asked, stop.asked[-1]], "the next token counts as likely as the last"


# ---- what the engine passes to learning


def test_catching_up_is_booked_in_the_step_that_caught_up_and_in_no_other():
    """A draft model catches up on a prompt for one request; later steps without it report no catch-up time."""
    engine = fake_engine(speculation="off", prefix_reuse=False)
    engine.calibrate()
    booked: list[float] = []
    learn = engine.policy.learn

    def noted(
        decision: Decision, outcomes: Sequence[Outcome], stats: StepStats, catch_up_seconds: float, **options: Any
    ) -> None:
        booked.append(catch_up_seconds)
        learn(decision, outcomes, stats, catch_up_seconds, **options)

    engine.policy.learn = noted  # type: ignore[method-assign, assignment]
    drafting = SamplingParams(
        temperature=0.0, max_tokens=3, ignore_eos=True, speculation=SpeculationParams(mode="on", method="draft")
    )
    run(engine, [engine.submit(prompt_of(random.Random(1), 30), drafting)])
    assert booked[0] > 0
    booked.clear()
    copying = SamplingParams(
        temperature=0.0, max_tokens=8, speculation=SpeculationParams(mode="on", method="ngram", max_depth=2)
    )
    run(engine, [engine.submit(prompt_of(random.Random(2), 30), copying)])
    assert booked and not any(booked)


def test_the_policy_forgets_requests_that_end_are_aborted_or_lost():
    engine = fake_engine(speculation="auto", prefix_reuse=False)
    requests = [engine.submit(prompt_of(random.Random(i), 20), SamplingParams(max_tokens=20)) for i in range(4)]
    for _ in range(4):
        engine.step()
    assert len(engine.policy._states) > 0
    engine.abort(requests[0])
    engine.reset()
    assert engine.policy._states == {}
    run(engine, [engine.submit([97, 98], SamplingParams(max_tokens=5))])
    assert engine.policy._states == {}


@pytest.mark.parametrize("captures", [False, True])
def test_what_is_done_once_is_nobodys_loss_and_teaches_no_costs(captures):
    """Capturing a graph makes a step slow once: that is not a cost of speculation."""
    engine = fake_engine(speculation="auto")
    runner = runner_of(engine)
    engine._prepared = [lambda: runner.num_forwards if captures else 0]
    engine.calibrate()
    costs = engine.costs
    assert costs is not None and costs.drafts["draft"].passes is not None
    before = costs.as_dict()
    engine.submit([1, 2, 3], SamplingParams(max_tokens=8, temperature=0.0))
    while engine.has_requests:
        engine.step()
        assert engine.stats.had_one_time_work == captures
    assert (engine.policy.spent_seconds == 0.0) == captures
    assert (costs.target.as_dict() == before["target"]) == captures


def test_what_learning_from_a_step_takes_is_counted_with_the_next():
    engine = auto_engine(FakeModel(), ODD["flat"])
    learn, counted = engine.policy.learn, list[float]()

    def slow(decision: Decision, outcomes: Sequence[Outcome], stats: StepStats, *others: Any, **options: Any) -> None:
        counted.append(stats.learning_seconds)
        until = perf_counter() + 0.05 * (len(counted) == 3)
        while perf_counter() < until:
            pass
        learn(decision, outcomes, stats, *others, **options)

    engine.policy.learn = slow  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    run(engine, [engine.submit(prompt_of(random.Random(4), 20), params)])
    assert [seconds >= 0.05 for seconds in counted[:5]] == [False, False, False, True, False]


def test_the_budget_has_an_estimate_after_decoding():
    engine = fake_engine(speculation="auto")
    assert engine.policy.estimated_speedup is None
    run(engine, [engine.submit(prompt_of(random.Random(3), 20), SamplingParams(temperature=0.0, max_tokens=20))])
    assert engine.policy.estimated_speedup is not None and engine.policy.estimated_speedup > 0


def test_lookups_take_a_prompt_in_once_while_a_device_computes_it(monkeypatch):
    prepared: list[tuple[int, int]] = []
    monkeypatch.setattr(
        SuffixProposer, "prepare", lambda _, request: prepared.append((request.id, len(request.tokens)))
    )
    engine = auto_engine(FakeModel(), ODD["flat"])
    forward_and_verify = engine._forward_and_verify

    def on_a_device(plan: StepPlan, cases: Sequence[Case], meanwhile: Callable[[], None] | None = None) -> StepResult:
        if meanwhile is not None:
            meanwhile()
        return forward_and_verify(plan, cases)

    engine._forward_and_verify = on_a_device
    prompt = prompt_of(random.Random(1), 100)  # more than one chunk
    drafted_for = engine.submit(prompt, SamplingParams(max_tokens=5))
    engine.submit(
        prompt_of(random.Random(2), 7), SamplingParams(max_tokens=5, speculation=SpeculationParams(mode="off"))
    )
    while engine.has_requests:
        engine.step()
    assert prepared == [(drafted_for.id, len(prompt))]

"""Log-probabilities of prompts: the model's own, each once, in bounded chunks, without an effect on other requests."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outpace.backends.base import max_scored_tokens
from outpace.config import SamplingParams
from outpace.core import Request, StepPlan, TokenLogprob
from outpace.decoding.sampling import token_logprob
from outpace.engine.engine import Engine
from tests.engine.test_engine import check, plainly, prompt_of, run
from tests.fakes import FakeModel, fake_engine, runner_of

SCORED = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=2)
ONLY_SCORED = replace(SCORED, max_tokens=0)


def scores(model: FakeModel, prompt: list[int], num_top: int = 2) -> list[TokenLogprob]:
    """The reference: for every token of a prompt but the first, what the model says after those before it."""
    return [token_logprob(model.logits(prompt[:i]), prompt[i], num_top) for i in range(1, len(prompt))]


def record_plans(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    plans: list[StepPlan] = []
    forward = runner_of(engine).forward

    def recording(plan: StepPlan) -> NDArray[np.float32]:
        plans.append(plan)
        return forward(plan)

    monkeypatch.setattr(runner_of(engine), "forward", recording)
    return plans


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize("length", [1, 2, 64, 65, 200])
def test_prompt_logprobs_are_the_models_own(length, num_top):
    """Temperature, penalties and biases have no part in them."""
    model, prompt = FakeModel(), prompt_of(random.Random(length), length)
    engine = fake_engine(model)
    shaped = SamplingParams(
        temperature=1.4, seed=1, repetition_penalty=1.5, logit_bias={98: 9.0}, max_tokens=5, prompt_logprobs=num_top
    )
    only = replace(shaped, max_tokens=0)
    requests = [engine.submit(prompt, params) for params in (shaped, only)]
    emitted = run(engine, requests)
    assert [request.prompt_logprobs for request in requests] == [scores(model, prompt, num_top)] * 2
    assert emitted == [plainly(model, prompt, shaped, requests[0].seed), []]
    assert (requests[1].finish_reason, requests[1].first_token_at, requests[1].writer.text) == ("length", None, "")


@pytest.mark.parametrize("method", ["none", "suffix", "draft"])
def test_an_answer_read_as_a_prompt_has_the_logprobs_that_it_was_generated_with(method):
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True, logprobs=2)
    options: dict[str, Any] = {"speculation": "on", "method": method, "depth": 3}
    engine = fake_engine(**(options if method != "none" else {"speculation": "off"}))
    generated = engine.submit(prompt_of(random.Random(2), 20), params)
    run(engine, [generated])
    scored = engine.submit(generated.tokens, ONLY_SCORED)
    run(engine, [scored])
    assert scored.prompt_logprobs[19:] == generated.writer.logprobs


def test_a_step_scores_a_bounded_number_of_tokens(monkeypatch):
    engine = fake_engine(FakeModel(), speculation="off")
    engine.scheduler._max_scored_tokens = 10
    plans = record_plans(engine, monkeypatch)
    model, rng = FakeModel(), random.Random(3)
    prompts, kinds = [prompt_of(rng, length) for length in (4, 35, 17)], [ONLY_SCORED, SCORED, ONLY_SCORED]
    requests = [engine.submit(prompt, params) for prompt, params in zip(prompts, kinds, strict=True)]
    run(engine, requests)
    assert [request.prompt_logprobs for request in requests] == [scores(model, prompt) for prompt in prompts]
    assert max(plan.num_scored for plan in plans) == 10
    # Of a prompt without output, the logits of the last token come with the others.
    assert sum(plan.num_scored for plan in plans) == sum(map(len, prompts)) - 1


@pytest.mark.parametrize("vocab_size", [258, 49_152, 152_064, 10**9])
def test_the_logits_of_a_step_stay_within_64_mib(vocab_size):
    most = max_scored_tokens(vocab_size)
    assert most == 1 or 4 * vocab_size * most <= 64 << 20 < 4 * vocab_size * (most + 1)


def test_nothing_more_is_computed_where_nobody_asked(monkeypatch):
    engine = fake_engine(speculation="off")
    plans = record_plans(engine, monkeypatch)
    run(engine, [engine.submit(prompt_of(random.Random(4), 100), SamplingParams(max_tokens=4, ignore_eos=True))])
    assert [sum(row.num_logits for row in plan.rows) for plan in plans] == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("method", ["none", "suffix", "draft"])
def test_other_requests_of_the_batch_keep_their_output(method):
    model, rng = FakeModel(), random.Random(5)
    options: dict[str, Any] = {"speculation": "on", "method": method, "depth": 3}
    engine = fake_engine(model, **(options if method != "none" else {"speculation": "off"}))
    engine.scheduler._max_scored_tokens = 7
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=30, logprobs=1),
        SamplingParams(temperature=0.8, seed=11, max_tokens=30, logprobs=1),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=30, logprobs=1),
    ]
    prompts = [prompt_of(rng, length) for length in (5, 40, 21)]
    others = [engine.submit(prompt, params) for prompt, params in zip(prompts, kinds, strict=True)]
    for _ in range(3):
        engine.step()
    scored = [engine.submit(prompt_of(rng, 80), params) for params in (SCORED, ONLY_SCORED)]
    run(engine, others + scored)
    for request, prompt, params in zip(others, prompts, kinds, strict=True):
        answer = plainly(model, prompt, params, request.seed)
        assert request.tokens == [*prompt, *answer] and request.prompt_logprobs == []
        assert request.writer.logprobs == scores(model, request.tokens, 1)[len(prompt) - 1 :]
    assert [request.prompt_logprobs for request in scored] == [scores(model, list(r.prompt)) for r in scored]


def test_a_scored_prompt_takes_no_shared_prefix_and_leaves_its_own_to_others():
    """A cache holds keys and values, and no logits."""
    model, prompt = FakeModel(), prompt_of(random.Random(6), 50)
    engine = fake_engine(model, speculation="off")
    plain = replace(SCORED, prompt_logprobs=None)
    first, *others = [engine.submit(prompt, params) for params in (plain, SCORED, ONLY_SCORED)]
    run(engine, [first, *others])
    later = [engine.submit(prompt, params) for params in (SCORED, plain)]
    run(engine, later)
    assert [request.num_shared for request in (*others, *later)] == [0, 0, 0, 49]
    for request in (*others, later[0]):
        assert request.prompt_logprobs == scores(model, prompt)


def test_preemption_neither_loses_nor_doubles_scores():
    model, rng = FakeModel(), random.Random(7)
    engine = fake_engine(model, speculation="off", max_context=100, cache_tokens=110, max_step_tokens=16)
    engine.scheduler._max_scored_tokens = 9
    prompts = [prompt_of(rng, 48) for _ in range(4)]
    params = [replace(SCORED, max_tokens=number) for number in (30, 40, 0, 9)]
    requests = [engine.submit(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    emitted = run(engine, requests)
    assert sum(request.num_preemptions for request in requests) > 0, "nothing was preempted: the test shows little"
    assert [request.prompt_logprobs for request in requests] == [scores(model, prompt) for prompt in prompts]
    assert emitted == [plainly(model, p, each, 0) for p, each in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("num_steps", range(8))
def test_scoring_goes_on_where_a_restart_or_a_preemption_interrupted_it(num_steps, monkeypatch):
    """After some steps the request is computed again from its beginning; only missing tokens are scored then."""
    model, prompt = FakeModel(), prompt_of(random.Random(8), 40)
    engine = fake_engine(model, speculation="off")
    engine.scheduler._max_scored_tokens = 7
    plans = record_plans(engine, monkeypatch)
    request = engine.submit(prompt, SCORED)
    for _ in range(num_steps):
        engine.step()
    engine.restart([request])
    engine.scheduler._max_scored_tokens = 7
    run(engine, [request])
    assert request.prompt_logprobs == scores(model, prompt)
    assert sum(plan.num_scored for plan in plans) == len(prompt) - 1
    assert request.tokens[40:] == plainly(model, prompt, SCORED, 0)


def test_a_resumed_request_shares_what_is_scored_already():
    model, prompt = FakeModel(), prompt_of(random.Random(9), 60)
    engine = fake_engine(model, speculation="off")
    run(engine, [engine.submit(prompt, replace(SCORED, prompt_logprobs=None))])
    engine.scheduler._max_scored_tokens = 25
    request = engine.submit(prompt, SCORED)
    engine.step()
    engine.scheduler._preempt(request)
    run(engine, [request])
    assert request.num_shared == 25
    assert request.prompt_logprobs == scores(model, prompt)


@pytest.mark.parametrize("num_steps", range(6))
def test_a_cancelled_request_frees_everything(num_steps):
    engine = fake_engine(speculation="off")
    engine.scheduler._max_scored_tokens = 10
    requests = [engine.submit(prompt_of(random.Random(i), 30), each) for i, each in enumerate((SCORED, ONLY_SCORED))]
    for _ in range(num_steps):
        engine.step()
    for request in requests:
        engine.abort(request)
    engine.forget()
    engine.scheduler.check_integrity()
    assert not engine.has_requests and runner_of(engine).num_cells == 0


def test_a_prompt_that_fills_the_context_can_be_scored():
    model, prompt = FakeModel(), prompt_of(random.Random(10), 64)
    engine = fake_engine(model, max_context=64, cache_tokens=64)
    request = engine.submit(prompt, ONLY_SCORED)
    run(engine, [request])
    assert request.prompt_logprobs == scores(model, prompt)


def test_rank_counts_the_likelier_tokens():
    logits = np.array([1.0, 3.0, 2.0, 3.0], np.float32)
    assert [token_logprob(logits, token, 0).rank for token in range(4)] == [4, 1, 3, 1]


def test_steps_that_score_teach_no_costs():
    """Scoring takes time that has nothing to do with drafts."""
    engine = fake_engine()
    engine.calibrate()
    decoding: Request = engine.submit([97, 98], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    engine.step()
    engine.submit(prompt_of(random.Random(11), 30), SCORED)
    engine.step()
    assert engine.stats.had_one_time_work and engine.stats.num_decode_rows
    engine.step()
    assert not engine.stats.had_one_time_work
    run(engine, [decoding])


@pytest.mark.parametrize("seed", range(20))
def test_scores_are_right_amid_preemptions_restarts_and_shared_prefixes(seed):
    """Also where a chunk of an old scored prompt preempts a younger request that decodes in the same step."""
    rng, model = random.Random(seed), FakeModel()
    engine = fake_engine(
        model,
        speculation=rng.choice(["off", "on"]),
        max_context=100,
        cache_tokens=rng.choice([100, 110, 150, 200]),
        max_step_tokens=rng.choice([8, 16, 64]),
    )
    engine.scheduler._max_scored_tokens = rng.choice([1, 3, 9])
    common, requests = prompt_of(rng, 90), list[Request]()
    while len(requests) < 10 or engine.has_requests:
        if len(requests) < 10 and rng.random() < 0.3:
            prompt = (common if rng.random() < 0.5 else prompt_of(rng, 90))[: rng.randrange(1, 90)]
            num_top = rng.choice([None, 0, 2])
            max_tokens = rng.randrange(0 if num_top is not None else 1, 40)
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, prompt_logprobs=num_top)
            requests.append(engine.submit(prompt, params))
        if requests and rng.random() < 0.02:
            engine.restart([request for request in requests if request.finish_reason is None])
            engine.scheduler._max_scored_tokens = 5
        engine.step()
        check(engine)
    for request in requests:
        prompt, num_top = list(request.prompt), request.params.prompt_logprobs
        assert request.tokens == prompt + plainly(model, prompt, request.params, 0, 100)
        assert request.prompt_logprobs == ([] if num_top is None else scores(model, prompt, num_top))

"""Embeddings of prompts in the engine: of all tokens or the last, each once, without an effect on other requests."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outpace.config import SamplingParams
from outpace.core import Request
from outpace.engine.engine import Engine
from outpace.errors import UsageError
from tests.engine.test_engine import check, plainly, prompt_of, run
from tests.fakes import FakeModel, fake_engine, runner_of

MEAN = SamplingParams(pooling="mean", max_tokens=0)
LAST = SamplingParams(pooling="last", max_tokens=0)


def embedding(model: FakeModel, prompt: list[int], params: SamplingParams) -> NDArray[np.float64]:
    """The reference: from the states after every token."""
    states = [model.state(prompt[:end]) for end in range(1, len(prompt) + 1)]
    pooled = np.mean(states, axis=0) if params.pooling == "mean" else states[-1]
    return pooled / np.linalg.norm(pooled)


def assert_right(model: FakeModel, requests: list[Request]) -> None:
    for request in requests:
        assert request.pooled is not None and (request.finish_reason, request.num_output) == ("stop", 0)
        expected = embedding(model, list(request.prompt), request.params)
        np.testing.assert_allclose(request.pooled.embedding(), expected, atol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200, 256])
def test_an_embedding_is_the_pooled_state_of_length_one(length):
    model, prompt = FakeModel(), prompt_of(random.Random(length), length)
    engine = fake_engine(model)
    requests = [engine.submit(prompt, params) for params in (MEAN, LAST)]
    run(engine, requests)
    assert_right(model, requests)


def test_an_embedding_does_not_depend_on_the_split_into_steps():
    prompt, found = prompt_of(random.Random(1), 100), []
    for most in (1, 7, 1000):
        engine = fake_engine(max_step_tokens=32)
        engine.scheduler._max_scored_tokens = most
        request = engine.submit(prompt, MEAN)
        run(engine, [request])
        assert request.pooled is not None
        found.append(request.pooled.embedding().tobytes())
    assert len(set(found)) == 1


def test_the_last_state_alone_may_follow_a_shared_prefix():
    model, prompt = FakeModel(), prompt_of(random.Random(2), 50)
    engine = fake_engine(model, speculation="off")
    run(engine, [engine.submit(prompt, SamplingParams(max_tokens=3, ignore_eos=True))])
    requests = [engine.submit(prompt, params) for params in (MEAN, LAST)]
    run(engine, requests)
    assert_right(model, requests)
    assert [request.num_shared for request in requests] == [0, 49]


@pytest.mark.parametrize("method", ["none", "suffix", "draft"])
def test_requests_that_generate_beside_it_keep_their_output(method):
    model, rng = FakeModel(), random.Random(3)
    engine = fake_engine(model, **({"speculation": "on", "method": method} if method != "none" else {}))
    kinds = [SamplingParams(temperature=t, seed=5, max_tokens=30) for t in (0.0, 0.8, 1.2)]
    prompts = [prompt_of(rng, length) for length in (5, 40, 21)]
    others = [engine.submit(prompt, params) for prompt, params in zip(prompts, kinds, strict=True)]
    for _ in range(3):
        engine.step()
    embedded = [engine.submit(prompt_of(rng, 80), params) for params in (MEAN, LAST, MEAN)]
    emitted = run(engine, others + embedded)
    assert emitted[:3] == [plainly(model, p, k, 5) for p, k in zip(prompts, kinds, strict=True)]
    assert_right(model, embedded)


def interrupt(engine: Engine, requests: list[Request], rng: random.Random) -> None:
    if rng.random() < 0.05:
        engine.restart([request for request in requests if request.finish_reason is None])


@pytest.mark.parametrize("seed", range(10))
def test_embeddings_are_right_amid_preemptions_restarts_and_shared_prefixes(seed):
    rng, model = random.Random(seed), FakeModel()
    sizes: dict[str, Any] = {
        "max_context": 100,
        "cache_tokens": rng.choice([100, 150]),
        "max_step_tokens": rng.choice([8, 64]),
    }
    engine = fake_engine(model, speculation=rng.choice(["off", "on"]), **sizes)
    common = prompt_of(rng, 90)
    kinds = [MEAN, LAST, SamplingParams(temperature=0.0, max_tokens=9), replace(LAST)]
    requests = [engine.submit(common[: rng.randrange(1, 90)], rng.choice(kinds)) for _ in range(10)]
    while engine.has_requests:
        engine.step()
        check(engine)
        interrupt(engine, requests, rng)
    assert_right(model, [request for request in requests if request.pooled is not None])
    for request in requests:
        if request.pooled is None:
            prompt = list(request.prompt)
            assert request.tokens == prompt + plainly(model, prompt, request.params, 0, 100)


@pytest.mark.parametrize("num_steps", range(4))
def test_a_cancelled_request_frees_everything(num_steps):
    engine = fake_engine(max_step_tokens=16)
    requests = [engine.submit(prompt_of(random.Random(4), 40), params) for params in (MEAN, LAST)]
    for _ in range(num_steps):
        engine.step()
    for request in requests:
        engine.abort(request)
    engine.forget()
    assert not engine.has_requests and runner_of(engine).num_cells == 0


def test_states_are_asked_for_only_where_they_are_needed():
    """FakeRunner fails if states are read from a step whose plan did not ask for them; here none may ask."""
    engine = fake_engine(speculation="off")
    run(engine, [engine.submit([97, 98], SamplingParams(max_tokens=3, ignore_eos=True))])
    assert not runner_of(engine)._keeps_states


def test_a_backend_without_states_is_named():
    engine = fake_engine()
    capabilities = runner_of(engine).capabilities
    runner_of(engine).capabilities = replace(capabilities, states=None, state_width=0)
    with pytest.raises(UsageError, match="no hidden states, so it makes no embeddings; use the native or the torch"):
        engine.submit([97], LAST)


@pytest.mark.parametrize("options", [{"max_tokens": 1}, {"max_tokens": 0, "prompt_logprobs": 1}, {"max_tokens": 5}])
def test_an_embedding_has_no_answer(options):
    with pytest.raises(UsageError, match="set max_tokens=0"):
        SamplingParams(pooling="mean", **options)

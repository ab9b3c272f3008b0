"""Log-probabilities of prompts on every backend: those of a model in numpy, and on the native one exact to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace import LLM, SamplingParams
from outpace.core import TokenLogprob
from outpace.decoding.sampling import token_logprob
from outpace.decoding.verification import host_scores
from tests.backends.tiny_llm import tiny_llm
from tests.numpy_reference import ReferenceModel
from tests.tiny_gguf import VOCAB_SIZE, write_model

ROUNDING = 0.1  # log-probabilities here are around -25; caches hold halves
SCORED = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, prompt_logprobs=3)


def random_tokens(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(n)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf", "llama", "F32")


@pytest.fixture(scope="module", params=["native", "llamacpp", "torch"])
def llm(request: pytest.FixtureRequest, path: Path) -> Iterator[LLM]:
    with tiny_llm(path, request.param) as made:
        yield made


def scores_of(llm: LLM, prompt: list[int], params: SamplingParams = SCORED) -> list[TokenLogprob]:
    [output] = llm.generate(prompt, params)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    scores = [each for each in output.prompt_logprobs if each is not None]
    assert [each.token_id for each in scores] == prompt[1:]
    return scores


def test_prompt_logprobs_are_those_of_the_numpy_reference(llm, path):
    """In one step and in several, alone and with an answer."""
    prompt = random_tokens(150)
    expected = ReferenceModel.load(path).logits(prompt)
    for max_step, params in ((1000, SCORED), (1000, replace(SCORED, max_tokens=0)), (11, SCORED)):
        llm.engine.scheduler._max_scored_tokens = max_step
        llm.engine.forget()
        scores = scores_of(llm, prompt, params)
        wanted = [token_logprob(expected[i], token, 3) for i, token in enumerate(prompt[1:])]
        np.testing.assert_allclose([s.logprob for s in scores], [w.logprob for w in wanted], atol=ROUNDING)
        found, tops = ([[p for _, p in each.top] for each in several] for several in (scores, wanted))
        np.testing.assert_allclose(found, tops, atol=ROUNDING)


def test_prompts_scored_on_the_device_have_the_same_scores(llm):
    if llm.config.backend != "torch":
        pytest.skip("only the torch backend has a device")
    from outpace.backends.torch.execution.executor import score

    prompt = random_tokens(70, seed=8)
    on_host, llm.engine._scores = scores_of(llm, prompt), score
    for number in (0, 3):
        on_device = scores_of(llm, prompt, replace(SCORED, prompt_logprobs=number))
        assert [each.rank for each in on_device] == [each.rank for each in on_host]
        assert [[t for t, _ in each.top] for each in on_device] == [[t for t, _ in e.top[:number]] for e in on_host]
        np.testing.assert_allclose([d.logprob for d in on_device], [h.logprob for h in on_host], atol=1e-5)
    llm.engine._scores = host_scores


def test_an_answer_read_as_a_prompt_has_the_logprobs_that_it_was_generated_with(llm):
    generated = replace(SCORED, max_tokens=60, temperature=0.8, seed=4, logprobs=3, prompt_logprobs=None)
    prompt = random_tokens(30, seed=1)
    [answer] = llm.generate(prompt, generated)[0].outputs
    assert answer.logprobs is not None
    llm.engine.scheduler._max_scored_tokens = 17
    scores = scores_of(llm, prompt + answer.token_ids, replace(SCORED, max_tokens=0))[29:]
    if llm.config.backend == "native":
        assert scores == answer.logprobs
    else:  # a step of one token may round differently
        np.testing.assert_allclose([s.logprob for s in scores], [a.logprob for a in answer.logprobs], atol=ROUNDING)


def test_scoring_beside_others_changes_neither(llm):
    params = replace(SCORED, prompt_logprobs=None, logprobs=1, max_tokens=24)
    plain: list[Any] = [replace(params, temperature=t, seed=s) for t, s in ((0.0, 1), (0.9, 2), (0.7, 3))]
    prompts = [random_tokens(n, seed=n) for n in (20, 33, 47)]
    alone = [llm.generate(prompt, each)[0].outputs[0].token_ids for prompt, each in zip(prompts, plain, strict=True)]
    scored = random_tokens(60, seed=5)
    expected = scores_of(llm, scored)
    llm.engine.forget()
    llm.engine.scheduler._max_scored_tokens = 7
    mixed = llm.generate([scored, *prompts], [replace(SCORED, max_tokens=3), *plain])
    together = [output.outputs[0].token_ids for output in mixed[1:]]
    found = [each for each in mixed[0].prompt_logprobs or () if each is not None]
    if llm.config.backend == "native":
        assert found == expected
    assert together == alone
    assert all(output.prompt_logprobs is None for output in mixed[1:])
    np.testing.assert_allclose([f.logprob for f in found], [e.logprob for e in expected], atol=ROUNDING)

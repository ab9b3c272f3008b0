"""Embeddings on every backend: those of a model in numpy, and on the native one exact to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from outpace import LLM, SamplingParams
from outpace.config import Pooling
from outpace.errors import UsageError
from tests.backends.test_prompt_logprobs import random_tokens
from tests.backends.tiny_llm import tiny_llm
from tests.numpy_reference import ReferenceModel
from tests.tiny_gguf import write_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf", "qwen3", "F32")


@pytest.fixture(scope="module", params=["native", "torch"])
def llm(request: pytest.FixtureRequest, path: Path) -> Iterator[LLM]:
    with tiny_llm(path, request.param) as made:
        yield made


def expected(path: Path, tokens: list[int], pooling: Pooling) -> NDArray[np.float32]:
    states = ReferenceModel.load(path).states(tokens)
    pooled = states.mean(axis=0) if pooling == "mean" else states[-1]
    return np.asarray(pooled / np.linalg.norm(pooled), np.float32)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_those_of_the_numpy_reference(llm, path, pooling):
    prompts = [random_tokens(n, seed=n) for n in (1, 30, 150)]
    together, alone = llm.embed(prompts, pooling=pooling), [llm.embed(prompt, pooling=pooling)[0] for prompt in prompts]
    for prompt, each in [*zip(prompts, together, strict=True), *zip(prompts, alone, strict=True)]:
        np.testing.assert_allclose(each, expected(path, prompt, pooling), atol=2e-3)
        assert abs(np.linalg.norm(each) - 1) < 1e-6


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_beside_generation_change_neither(llm, pooling):
    prompts = [random_tokens(n, seed=n) for n in (40, 70)]
    generated = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    pooled = SamplingParams(pooling=pooling, max_tokens=0)
    alone = [llm.generate(prompts[0], generated)[0].outputs[0].token_ids, llm.embed(prompts[1], pooling=pooling)[0]]
    llm.engine.forget()
    llm.engine.scheduler._max_scored_tokens = 9
    answer, embedded = llm.generate(prompts, [generated, pooled])
    assert answer.outputs[0].token_ids == alone[0] and embedded.embedding is not None
    if llm.config.backend == "native":
        assert embedded.embedding.tobytes() == alone[1].tobytes()
    np.testing.assert_allclose(embedded.embedding, alone[1], atol=1e-3)


def test_llamacpp_says_that_it_makes_none(path):
    with (
        LLM(str(path), backend="llamacpp", max_context=256, max_step_tokens=64, threads=1) as llm,
        pytest.raises(UsageError, match="makes no embeddings; use the native or the torch backend"),
    ):
        llm.embed("a")

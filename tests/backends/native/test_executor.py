"""Greedy tokens found inside the native step, compared with the host reference on the same logits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from outpace.backends.base import Capacity
from outpace.backends.native.library import load_library
from outpace.backends.native.runner import NativeModel, NativeRunner
from outpace.config import SamplingParams, SpeculationParams
from outpace.core import Case, Draft, Request, Row, StepPlan
from outpace.decoding.constraints import Constraints
from outpace.decoding.sampling import Shaper
from outpace.decoding.verification import HostVerifier, executor_of
from outpace.errors import BackendError
from outpace.models.llama_library import load_library as load_llama
from outpace.structured import StructuredOutput
from tests.fakes import ByteTokenizer
from tests.tiny_gguf import VOCAB_SIZE, write_model

try:
    load_library()
except BackendError as error:
    pytest.skip(str(error), allow_module_level=True)

CAPACITY = Capacity(max_sequences=8, cache_tokens=1024, max_context=512, max_step_tokens=256)
WIDTH = 64
NAN_TOKENS = (77, 200)
STOP_IDS = frozenset({0, 3})


def multiples_of_one_row() -> NDArray[np.float32]:
    """A head for which a third of all logits tie for the maximum, and some rows are all negative."""
    one = np.random.default_rng(0).normal(size=WIDTH)
    return np.outer(2.0 ** (np.arange(VOCAB_SIZE) % 3), one).astype(np.float32)


def head(kind: str) -> dict[str, NDArray[np.float32]]:
    if kind == "random":
        return {}
    weights = multiples_of_one_row()
    if kind == "not numbers":
        weights[list(NAN_TOKENS)] = np.nan
    return {"output.weight": weights}


@pytest.fixture(scope="module", params=["random", "equal", "not numbers"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[1, 2, 3], ids="{} threads".format)
def runner(
    request: pytest.FixtureRequest, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NativeRunner]:
    path = write_model(tmp_path_factory.mktemp("model") / "tiny.gguf", width=WIDTH, tied=False, change=head(kind))
    runner = NativeModel(path, load_llama()).start(CAPACITY, request.param).runner
    assert isinstance(runner, NativeRunner)
    yield runner
    runner.close()


def request_with(params: SamplingParams) -> Request:
    prompt = [1, 2]
    shaper = Shaper(params, prompt, STOP_IDS)
    return Request(id=1, params=params, prompt=prompt, seed=5, shaper=shaper, writer=cast(Any, None), max_length=500)


def random_tokens(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(n)]


def test_the_likeliest_of_every_row_is_numpys_argmax(runner: NativeRunner, kind: str) -> None:
    logits = runner.forward(StepPlan([Row(0, 0, random_tokens(150, 1), 150), Row(1, 0, random_tokens(60, 2), 20)]))
    likeliest = runner.likeliest(170)
    assert likeliest == logits.argmax(axis=1).tolist()
    if kind == "equal":
        assert {*likeliest} == {0, 2}  # the first of equals, in positive and negative rows
        assert any(logits.max(axis=1) < 0)
    if kind == "not numbers":
        assert {*likeliest} == {NAN_TOKENS[0]}
    runner.free(0)
    runner.free(1)


GREEDY = SamplingParams(temperature=0.0)
OTHERS = {
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.5),
    "bias": SamplingParams(temperature=0.0, logit_bias={9: 50.0}),
    "masked stops": SamplingParams(temperature=0.0, min_tokens=9),
    "lossy": SamplingParams(temperature=0.0, speculation=SpeculationParams(acceptance="threshold", threshold=0.001)),
    "seeded": SamplingParams(temperature=0.9, seed=4),
}


def verified_alike(runner: NativeRunner, all_params: list[SamplingParams], seed: int) -> list[int]:
    """The number of accepted draft tokens per row; drafts are right at first, then wrong."""
    rng = random.Random(seed)
    rows, cases = [Row(7, 0, random_tokens(5, seed), 0)], []  # a prompt chunk: no logits, nothing to verify
    for seq, params in enumerate(all_params):
        prompt, depth = random_tokens(4, seed + seq), rng.randrange(6)
        drafted: list[int] = []
        for i in range(depth):
            answer = runner.forward(StepPlan([Row(seq, 0, [*prompt, *drafted], 1)]))[0]
            runner.truncate(seq, 0)
            drafted.append(int(answer.argmax()) if rng.random() < 0.8 else i)
        rows.append(Row(seq, 0, [*prompt, *drafted], 1 + depth))
        cases.append(Case(request_with(params), Draft(drafted, "ngram") if depth else None))
    result = executor_of(runner)(StepPlan(rows), cases)
    assert result.verdicts == HostVerifier().verify(cases, cast(Any, result.logits))
    for row in rows:
        runner.free(row.seq)
    return [verdict.num_accepted for verdict in result.verdicts]


def test_greedy_verdicts_are_the_references(runner: NativeRunner) -> None:
    accepted = [n for seed in range(20) for n in verified_alike(runner, [GREEDY] * 5, seed)]
    assert 0 in accepted and max(accepted) > 2


@pytest.mark.parametrize("other", OTHERS)
def test_requests_that_need_more_are_verified_by_the_verifier(runner: NativeRunner, kind: str, other: str) -> None:
    if kind == "not numbers":
        pytest.skip("only an argmax is defined over rows that are not numbers")
    for seed in range(5):
        verified_alike(runner, [OTHERS[other]], seed)
        verified_alike(runner, [GREEDY, OTHERS[other], GREEDY], seed)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_constrained_verdicts_are_the_references(runner: NativeRunner, kind: str, temperature: float) -> None:
    if kind == "not numbers":
        pytest.skip("only an argmax is defined over rows that are not numbers")
    constraint = Constraints(ByteTokenizer(), VOCAB_SIZE).compile(StructuredOutput(regex="([^a-f]|abc)*z"))
    accepted: list[int] = []
    for seed in range(10):
        rng = random.Random(seed)
        rows, cases = [], []
        for seq in range(4):
            params = SamplingParams(temperature=temperature, seed=None if seq % 2 else seed)
            request, prompt, drafted = request_with(params), random_tokens(4, seed + seq), list[int]()
            if seq:  # the first has no grammar
                request.matcher = request.shaper.matcher = constraint.matcher(STOP_IDS)
                request.shaper.may_adjust = True
            for i in range(rng.randrange(5)):
                logits = runner.forward(StepPlan([Row(seq, 0, [*prompt, *drafted], 1)]))[0]
                runner.truncate(seq, 0)
                drafted.append(request.shaper.greedy(logits, drafted) if rng.random() < 0.8 else i)
            rows.append(Row(seq, 0, [*prompt, *drafted], 1 + len(drafted)))
            cases.append(Case(request, Draft(drafted, "ngram") if drafted else None))
        result = executor_of(runner)(StepPlan(rows), cases)
        assert result.verdicts == HostVerifier().verify(cases, cast(Any, result.logits))
        accepted += [verdict.num_accepted for verdict in result.verdicts]
        for row in rows:
            runner.free(row.seq)
    assert temperature or max(accepted) > 1


def test_prompt_steps_have_nothing_to_verify(runner: NativeRunner) -> None:
    result = executor_of(runner)(StepPlan([Row(0, 0, [1, 2, 3], 0)]), [])
    assert result.verdicts == []
    runner.free(0)

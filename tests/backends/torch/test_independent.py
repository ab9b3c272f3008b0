"""Unseeded drafts on the device: drawn independently of the target, verified by rejection, and of the target's law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from outpace import LLM, SamplingParams
from outpace.backends.base import Capacity, HeadTask
from outpace.backends.torch.device import TorchOptions
from outpace.backends.torch.execution.drafting import DraftLoop
from outpace.backends.torch.runner import TorchModel
from outpace.backends.torch.sampling import independent, verifier
from outpace.backends.torch.sampling.independent import DeviceProbs
from outpace.backends.torch.sampling.rejection import Rejection
from outpace.core import Row, StepPlan
from outpace.decoding.sampling import Shaper
from tests.goodness import SMALLEST_P, fits
from tests.tiny_gguf import write_model
from tests.tiny_head import IDS, request_of, write_head

PROMPT = [IDS[i % len(IDS)] for i in (3, 1, 4, 1, 5, 9, 2, 6)]
LENGTH = 3
NUM_RUNS, BATCH = 800, 80
OPTIONS = TorchOptions("cpu", "float32", 0.9)
FILTERED = {"temperature": 1.4, "top_k": 4}
WHOLE: dict[str, Any] = {"temperature": 0.5}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A target, a head for it that knows nothing, and a draft model: the target, coarsely rounded."""
    folder = tmp_path_factory.mktemp("models")
    target = write_model(folder / "target.gguf", "llama")
    return target, write_head(folder / "head.gguf", target), write_model(folder / "draft.gguf", "llama", "Q4_0")


def law_of(target: Path, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The exact probability of every text of LENGTH tokens; rare ones together, as the empty text."""
    runner = TorchModel(target, OPTIONS).start(Capacity(1, 256, 64, 64), 1).runner
    shaper = Shaper(params, PROMPT, frozenset())
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for text, chance in law.items():
            logits = runner.forward(StepPlan([Row(0, 0, [*PROMPT, *text], 1)]))[0]
            runner.free(0)
            probs = shaper.probs(logits, list(text))
            longer |= {(*text, token): chance * float(probs[token]) for token in np.flatnonzero(probs).tolist()}
        law = {text: chance for text, chance in longer.items() if chance > 4e-3}
    runner.close()
    return law | {(): 1.0 - sum(law.values())}


def texts_of(target: Path, drafting: Path, params: SamplingParams, method: str) -> tuple[list[tuple[int, ...]], int]:
    """Texts of many unseeded requests, in batches, and how many draft tokens were accepted."""
    found, num_accepted = [], 0
    options: Any = {"backend": "torch", "device": "cpu", "dtype": "float32", "threads": 1, "max_context": 64}
    options |= {"speculation": "on", "method": method, "depth": 3, "max_sequences": BATCH}
    with LLM(str(target), str(drafting), **options) as llm:
        for begin in range(0, NUM_RUNS, BATCH):
            seeds = [1_000_003 * (begin + i) + 17 for i in range(BATCH)]
            requests = [llm.engine.submit(PROMPT, params, seed=seed) for seed in seeds]
            while llm.engine.has_requests:
                llm.engine.step()
            found += [tuple(request.tokens[len(PROMPT) :]) for request in requests]
            num_accepted += sum(request.spec.num_accepted for request in requests)
    return found, num_accepted


def p_of(paths: tuple[Path, Path, Path], features: dict[str, Any]) -> tuple[float, int]:
    """The p-value of the first tokens of texts drafted by the draft model, and how many it drafted well."""
    target, _, draft = paths
    params = SamplingParams(max_tokens=LENGTH + 1, ignore_eos=True, **features)
    law = law_of(target, params)
    found, num_accepted = texts_of(target, draft, params, "draft")
    return fits([text[:LENGTH] if text[:LENGTH] in law else () for text in found], law), num_accepted


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the verdicts by rejection; no other verification may be needed."""
    used = Counter[str]()
    original = Rejection.verdicts

    def counting(rejection: Rejection, drafted: Any) -> Any:
        verdicts = original(rejection, drafted)
        used["by rejection"] += len(verdicts)
        return verdicts

    monkeypatch.setattr(Rejection, "verdicts", counting)
    monkeypatch.setattr(verifier, "verify", lambda *_: pytest.fail("the device decides all of these"))
    return used


@pytest.mark.parametrize("features", [FILTERED, WHOLE], ids=str)
def test_the_law_is_the_targets(
    paths: tuple[Path, Path, Path], features: dict[str, Any], decided: Counter[str]
) -> None:
    p, num_accepted = p_of(paths, features)
    assert p > SMALLEST_P
    assert num_accepted > NUM_RUNS and decided["by rejection"] >= NUM_RUNS


def test_the_law_is_the_targets_whatever_a_head_drafts(paths: tuple[Path, Path, Path], decided: Counter[str]) -> None:
    """At a high temperature, where distributions of unrelated models overlap; the law of the second token."""
    target, head, _ = paths
    params = SamplingParams(temperature=5.0, max_tokens=LENGTH + 1, ignore_eos=True)
    runner = TorchModel(target, OPTIONS).start(Capacity(1, 256, 64, 64), 1).runner
    shaper = Shaper(params, PROMPT, frozenset())
    first = shaper.probs(runner.forward(StepPlan([Row(0, 0, PROMPT, 1)]))[0], [])
    law = np.zeros(len(first))
    for token, chance in enumerate(first.tolist()):
        runner.truncate(0, len(PROMPT))
        law += chance * shaper.probs(runner.forward(StepPlan([Row(0, len(PROMPT), [token], 1)]))[0], [token])
    runner.close()
    found, num_accepted = texts_of(target, head, params, "head")
    assert fits([text[1] for text in found], dict(enumerate(law.tolist()))) > SMALLEST_P
    assert num_accepted > NUM_RUNS // 2 and decided["by rejection"] >= NUM_RUNS


def test_a_wrong_distribution_would_be_noticed(paths: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: drafts claim another distribution than their tokens were drawn from."""
    original = DraftLoop.keep

    def keep(loop: DraftLoop) -> None:
        original(loop)
        if loop.kept is not None:
            loop.kept.fill_(1.0 / loop.kept.shape[-1])

    monkeypatch.setattr(DraftLoop, "keep", keep)
    assert p_of(paths, FILTERED)[0] < SMALLEST_P


@pytest.fixture
def head(paths: tuple[Path, Path, Path]) -> Iterator[Any]:
    target, head, _ = paths
    runner = (
        TorchModel(target, TorchOptions("cpu", "float32", 0.9), head=head)
        .start(Capacity(max_sequences=8, cache_tokens=1024, max_context=64, max_step_tokens=64), 1)
        .runner
    )
    yield runner
    runner.close()


def test_tokens_are_drawn_from_the_distributions_that_are_kept(head: Any) -> None:
    params = SamplingParams(temperature=0.6, max_tokens=20)
    first = request_of(9)
    head.forward(StepPlan([Row(0, 0, first.tokens[:-1], 0)]))
    drawn = Counter[tuple[int, ...]]()
    law: dict[tuple[int, ...], float] = {}
    for seed in range(300):
        request = request_of(9)
        request.params, request.shaper, request.seed = params, Shaper(params, request.tokens, frozenset()), seed
        request.num_computed = len(request.tokens) - 1
        (drafted,) = head.capabilities.head.draft([HeadTask(request, 2)])
        assert isinstance(drafted.probs, DeviceProbs) and len(drafted.probs) == 2
        drawn[(drafted.tokens[0],)] += 1
        law = {(int(token),): float(p) for token, p in enumerate(drafted.probs[0]) if p > 0}
        assert abs(float(drafted.probs.tensor.sum()) - 2.0) < 1e-5
        head.truncate(0, len(request.tokens) - 1)
    assert fits(drawn.elements(), law) > SMALLEST_P


@pytest.mark.parametrize(
    "features", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.8, "logprobs": 1}]
)
def test_other_requests_use_the_targets_noise(features: dict[str, Any]) -> None:
    request = request_of(5)
    request.params = SamplingParams(**features)
    request.shaper = Shaper(request.params, request.tokens, frozenset())
    assert not independent.draws_independently([request])
    unseeded = request_of(5)
    unseeded.params = SamplingParams(temperature=0.8)
    unseeded.shaper = Shaper(unseeded.params, unseeded.tokens, frozenset())
    assert independent.draws_independently([unseeded])
    assert independent.draws_independently([request, unseeded]) is request.params.is_greedy

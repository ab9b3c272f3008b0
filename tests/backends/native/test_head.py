"""Draft heads in the native backend: compared with numpy, and independent of batches, chunks, forks and rewinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace import LLM
from outpace.backends.base import Capacity, DraftedTokens, HeadTask
from outpace.backends.native.library import load_library
from outpace.backends.native.runner import NativeModel, NativeRunner
from outpace.config import SamplingParams
from outpace.core import Request, Row, StepPlan
from outpace.errors import BackendError, ModelError, UsageError
from outpace.models.llama_library import load_library as load_llama
from tests.tiny_gguf import FAMILIES, VOCAB_SIZE, write_model
from tests.tiny_head import IDS, ReferenceHead, request_of, write_head

try:
    load_library()
except BackendError as error:
    pytest.skip(str(error), allow_module_level=True)

CAPACITY = Capacity(max_sequences=8, cache_tokens=1024, max_context=512, max_step_tokens=64)


class Drafting:
    """A started model with a head; `feed` computes the target's cache of a request, all but its last token."""

    def __init__(self, folder: Path, family: str = "llama", kind: str = "F32", threads: int = 2) -> None:
        self.target = write_model(folder / "target.gguf", family, kind)
        self.path = write_head(folder / "head.gguf", self.target, kind=kind)
        runner = NativeModel(self.target, load_llama(), self.path).start(CAPACITY, threads).runner
        assert isinstance(runner, NativeRunner) and runner.capabilities.head is not None
        self.runner, self.head = runner, runner.capabilities.head

    def feed(self, request: Request, chunk: int = 64) -> None:
        assert request.seq is not None
        while request.num_computed < len(request.tokens) - 1:
            tokens = request.tokens[request.num_computed : len(request.tokens) - 1][:chunk]
            self.runner.forward(StepPlan([Row(request.seq, request.num_computed, tokens, 0)]))
            request.num_computed += len(tokens)

    def draft(self, request: Request, depth: int) -> DraftedTokens:
        (drafted,) = self.head.draft([HeadTask(request, depth, GoOn())])
        return drafted


class GoOn:
    """A rule that asks for the confidence and ends no draft."""

    is_over = False

    def __call__(self, confidence: float) -> bool:
        return True


@pytest.fixture
def drafting(tmp_path: Path):
    made = Drafting(tmp_path)
    yield made
    made.runner.close()


def same(a: DraftedTokens, b: DraftedTokens) -> bool:
    return a.tokens == b.tokens and a.confidence == b.confidence


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [2, 3, 32, 33, 70])
def test_drafts_are_those_of_the_reference(tmp_path: Path, family: str, length: int) -> None:
    made = Drafting(tmp_path, family)
    request = request_of(length, text=length)
    made.feed(request)
    drafted = made.draft(request, 5)
    tokens, logits = ReferenceHead(made.path, made.target).draft(request.tokens, 5)
    assert drafted.tokens == tokens
    shares = [float(1 / np.exp(each - each.max()).sum()) for each in logits]
    assert drafted.confidence == pytest.approx(shares, rel=5e-2)  # halves in the cache, bfloat16 taps
    assert drafted.probs is None
    made.runner.close()


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_quantised_heads_draft_nearly_as_their_dequantised_weights(tmp_path: Path, kind: str) -> None:
    made = Drafting(tmp_path, kind=kind)
    reference = ReferenceHead(made.path, made.target)
    agreed = 0
    for seed in range(20):
        request = request_of(12, text=seed)
        made.feed(request)
        agreed += made.draft(request, 1).tokens == reference.draft(request.tokens, 1)[0]
        made.runner.free(0)
    assert agreed >= 18  # activations are rounded to eight bits
    made.runner.close()


def test_how_the_text_was_fed_does_not_matter(drafting: Drafting) -> None:
    whole, parts = request_of(100, seq=0), request_of(100, seq=1)
    drafting.feed(whole)
    tokens = parts.tokens
    # Drafts made on the way leave temporary entries. Few tokens are taken in by a draft's first pass, more by another.
    for length in (2, 4, 31, 32, 33, 40, 48, 57, 90, 100):
        parts.tokens = tokens[:length]
        drafting.feed(parts, chunk=7)
        last = drafting.draft(parts, 6)
    assert same(last, drafting.draft(whole, 6))
    assert same(last, drafting.draft(whole, 6))  # drafting again changes nothing


def test_requests_that_share_a_step_do_not_change_each_other(drafting: Drafting) -> None:
    requests = [request_of(5 + 11 * i, seq=i, text=i, temperature=0.7 * (i % 2), seed=i) for i in range(5)]
    for request in requests:
        drafting.feed(request)
    together = drafting.head.draft([HeadTask(request, 1 + i, GoOn()) for i, request in enumerate(requests)])
    for i, request in enumerate(requests):
        drafting.runner.free(i)
        request.num_computed = 0
        drafting.feed(request)
        assert same(together[i], drafting.draft(request, 1 + i))


class StopAfter:
    """Ends a draft at a given token, which is kept if the rule knows beforehand that no further pass pays."""

    def __init__(self, num_tokens: int, *, knows: bool) -> None:
        self.is_over = False
        self.seen: list[float] = []
        self._num_tokens, self._knows = num_tokens, knows

    def __call__(self, confidence: float) -> bool:
        self.seen.append(confidence)
        self.is_over = len(self.seen) > self._num_tokens - self._knows
        return len(self.seen) <= self._num_tokens


def test_a_stopped_draft_is_the_beginning_of_the_whole_one(drafting: Drafting) -> None:
    requests = [request_of(5 + 11 * i, seq=i, text=i, temperature=0.7 * (i % 2), seed=i) for i in range(6)]
    for request in requests:
        drafting.feed(request)
    whole = drafting.head.draft([HeadTask(request, 5, GoOn()) for request in requests])
    stops = [None, StopAfter(0, knows=False), *(StopAfter(i, knows=i % 2 == 0) for i in (2, 3, 4, 9))]
    drafts = drafting.head.draft([HeadTask(*each) for each in zip(requests, [5] * 6, stops, strict=True)])
    assert [len(each.tokens) for each in drafts] == [5, 0, 2, 3, 4, 5]
    assert [len(each.confidence) for each in drafts] == [0, 1, 2, 4, 4, 5]  # with that of the token it stopped before
    for stop, draft, expected in zip(stops, drafts, whole, strict=True):
        assert draft.tokens == expected.tokens[: len(draft.tokens)]
        assert draft.confidence == expected.confidence[: len(draft.confidence)]
        assert stop is None or stop.seen == draft.confidence
    again = drafting.head.draft([HeadTask(request, 5, GoOn()) for request in requests])
    assert all(same(a, b) for a, b in zip(again, whole, strict=True))


def test_without_a_rule_the_same_tokens_are_drafted_and_no_confidence(drafting: Drafting) -> None:
    request = request_of(40, temperature=0.7, seed=2)
    drafting.feed(request)
    (bare,) = drafting.head.draft([HeadTask(request, 5)])
    assert bare.tokens == drafting.draft(request, 5).tokens
    assert bare.confidence == []


def test_an_error_of_the_rule_that_stops_a_draft_is_raised(drafting: Drafting) -> None:
    class Broken(StopAfter):
        def __call__(self, confidence: float) -> bool:
            raise ZeroDivisionError("no rule")

    request = request_of(20)
    drafting.feed(request)
    with pytest.raises(ZeroDivisionError, match="no rule"):
        drafting.head.draft([HeadTask(request, 3, Broken(1, knows=True))])
    assert len(drafting.draft(request, 3).tokens) == 3


def test_forks_share_entries_and_diverge(drafting: Drafting) -> None:
    for num_shared in (1, 20, 32, 40, 64):
        source = request_of(80, seq=0, text=3)
        drafting.feed(source)
        expected = drafting.draft(source, 4)
        fork = request_of(80, seq=1, text=4)
        fork.tokens = source.tokens[:num_shared] + fork.tokens[num_shared:]
        drafting.runner.fork(0, 1, num_shared)
        fork.num_computed = num_shared
        assert drafting.head.num_uncached(1, 80) == 80 - num_shared
        drafting.feed(fork)
        drafted = drafting.draft(fork, 4)
        alone = request_of(80, seq=2, text=4)
        alone.tokens = fork.tokens
        drafting.feed(alone)
        assert same(drafted, drafting.draft(alone, 4))
        assert same(expected, drafting.draft(source, 4))
        for seq in range(3):
            drafting.runner.free(seq)


def test_rewound_entries_are_computed_again(drafting: Drafting) -> None:
    request = request_of(50)
    drafting.feed(request)
    drafting.draft(request, 4)
    drafting.runner.truncate(0, 40)
    assert drafting.head.num_uncached(0, 41) == 1
    request.tokens, request.num_computed = [*request.tokens[:40], 7, 8, 9], 40
    drafting.feed(request)
    fresh = request_of(50, seq=1)
    fresh.tokens = request.tokens
    drafting.feed(fresh)
    assert same(drafting.draft(request, 4), drafting.draft(fresh, 4))


def test_a_closed_model_does_not_draft(drafting: Drafting) -> None:
    request = request_of(5)
    drafting.feed(request)
    drafting.runner.close()
    with pytest.raises(BackendError, match="closed"):
        drafting.draft(request, 2)


def test_sampled_drafts_carry_the_distributions_they_were_drawn_from(drafting: Drafting) -> None:
    request = request_of(20, temperature=1.0, top_p=0.9)
    drafting.feed(request)
    drafted = drafting.draft(request, 3)
    assert drafted.probs is not None
    drawn_from = np.stack(drafted.probs)
    assert drawn_from.shape == (3, VOCAB_SIZE)
    unknown = np.setdiff1d(np.arange(VOCAB_SIZE), IDS)
    assert (drawn_from[:, unknown] == 0).all()
    assert drawn_from.sum(-1) == pytest.approx(np.ones(3), abs=1e-5)
    assert all(drawn_from[i, token] > 0 for i, token in enumerate(drafted.tokens))
    _, logits = ReferenceHead(drafting.path, drafting.target).draft(request.tokens, 1)
    expected = np.full(VOCAB_SIZE, -np.inf, np.float32)
    expected[list(IDS)] = logits[0]
    probs = drafting.runner.capabilities.verifier.probs(request, [], expected)  # type: ignore[union-attr]
    assert drawn_from[0] == pytest.approx(probs, abs=2e-3)


def test_seeded_drafts_use_the_targets_noise(drafting: Drafting) -> None:
    """With equal distributions, draft and target pick the same token: the noise belongs to the target's token ids."""
    seeded = request_of(20, temperature=1.0, seed=5)
    drafting.feed(seeded)
    drafted = drafting.draft(seeded, 1)
    _, logits = ReferenceHead(drafting.path, drafting.target).draft(seeded.tokens, 1)
    expected = np.full(VOCAB_SIZE, -np.inf, np.float32)
    expected[list(IDS)] = logits[0]
    assert drafted.probs is None
    assert drafted.tokens == [drafting.runner.capabilities.verifier.own_token(seeded, [], expected)]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("metadata", "change", "cause"),
    [
        ({"target": "0123456789abcdef"}, {}, "was trained for tiny \\(0123456789abcdef\\)"),
        ({"format": 9}, {}, "it has format 9"),
        ({"taps": "1,3"}, {}, "do not fit"),
        ({"taps": "2,1"}, {}, "not in order"),
        ({"taps": "1,x"}, {}, "not numbers"),
        ({"num_kv_heads": 3}, {}, "do not divide"),
        ({"epsilon": float("nan")}, {}, "epsilon"),
        ({"width": 32}, {}, "of shape"),
        ({}, {"target_ids": np.array([5, 5, *IDS[2:]], np.int32)}, "do not fit"),
        ({}, {"target_ids": np.array([VOCAB_SIZE, *IDS[1:]], np.int32)}, "do not fit"),
        ({}, {"target_ids": None}, "target_ids"),
        ({}, {"fuse.weight": None}, "no tensor fuse.weight"),
        ({}, {"surprise": np.zeros(4, np.float32)}, "unknown tensor surprise"),
        ({}, {"output_norm.weight": np.full(64, np.nan, np.float32)}, "not finite"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    tmp_path: Path, metadata: dict[str, Any], change: dict[str, Any], cause: str
) -> None:
    target = write_model(tmp_path / "target.gguf")
    head = write_head(tmp_path / "head.gguf", target, metadata=metadata, change=change)
    with pytest.raises(ModelError, match=cause):
        NativeModel(target, load_llama(), head)


# Through the engine. At a high temperature the noise decides more than the model, so that even a random head, which
# draws with the same noise, is often right.

SAMPLED = {"temperature": 4.0, "seed": 11}


def outputs(folder: Path, params: dict[str, Any], **options: Any) -> tuple[list[list[int]], int, int]:
    """Tokens of six texts, some with a common beginning; numbers of drafted and accepted tokens."""
    texts = [[5] * 40 + [i, 7, i] for i in range(3)] + [[9 + i] * (3 + 30 * i) for i in range(3)]
    if not (folder / "target.gguf").exists():
        write_head(folder / "head.gguf", write_model(folder / "target.gguf"))
    with LLM(str(folder / "target.gguf"), str(folder / "head.gguf"), backend="native", **options) as llm:
        done = llm.generate(texts, SamplingParams(max_tokens=40, ignore_eos=True, **params), progress=False)
        counts = [each.outputs[0].speculation for each in done]
        return (
            [d.outputs[0].token_ids for d in done],
            sum(c.num_drafted for c in counts),
            sum(c.num_accepted for c in counts),
        )


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, SAMPLED, SAMPLED | {"top_k": 20, "presence_penalty": 0.5}], ids=str
)
def test_speculation_with_a_head_changes_nothing(tmp_path: Path, params: dict[str, Any]) -> None:
    plain, *_ = outputs(tmp_path, params, speculation="off")
    for depth in (1, 3, 8):
        tokens, num_drafted, num_accepted = outputs(tmp_path, params, speculation="on", method="head", depth=depth)
        assert tokens == plain
        assert num_drafted > 0 and (num_accepted > 0 or params["temperature"] == 0)
    assert outputs(tmp_path, params)[0] == plain  # auto


def test_preempted_and_chunked_requests_draft_on(tmp_path: Path) -> None:
    small = {"cache_tokens": 160, "max_context": 140, "max_step_tokens": 24, "max_sequences": 4}
    plain, *_ = outputs(tmp_path, SAMPLED, speculation="off")
    tokens, _, num_accepted = outputs(tmp_path, SAMPLED, speculation="on", method="head", depth=4, **small)
    assert tokens == plain and num_accepted > 0


def test_unseeded_drafts_are_verified_by_their_distributions(tmp_path: Path) -> None:
    _, num_drafted, num_accepted = outputs(tmp_path, {"temperature": 4.0}, speculation="on", method="head", depth=3)
    assert 0 < num_accepted < num_drafted


def test_a_head_is_refused_where_hidden_states_cannot_be_had(tmp_path: Path) -> None:
    write_head(tmp_path / "head.gguf", write_model(tmp_path / "target.gguf"))
    with pytest.raises(UsageError, match=r"hidden states, which the llama\.cpp backend does not give"):
        LLM(str(tmp_path / "target.gguf"), str(tmp_path / "head.gguf"), backend="llamacpp")

"""Draft heads in the torch backend, on the CPU: compared with numpy, and through the engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from outpace import LLM, SamplingParams
from outpace.backends.base import USUAL_UNCACHED, Capacity, DraftedTokens, HeadTask
from outpace.backends.torch.device import TorchOptions
from outpace.backends.torch.execution.head_passes import HeadPass, HeadPasses
from outpace.backends.torch.execution.step import StepShape
from outpace.backends.torch.head import TorchHead
from outpace.backends.torch.runner import TorchModel, TorchRunner
from outpace.core import Request, Row, StepPlan
from outpace.errors import BackendError, ModelError
from tests.tiny_folder import write_folder
from tests.tiny_gguf import FAMILIES, write_model
from tests.tiny_head import ReferenceHead, request_of, write_head

CAPACITY = Capacity(max_sequences=8, cache_tokens=1024, max_context=512, max_step_tokens=64)
OPTIONS = TorchOptions("cpu", "float32", 0.9)


class Drafting:
    def __init__(self, folder: Path, family: str = "llama") -> None:
        self.target = write_model(folder / "target.gguf", family)
        self.path = write_head(folder / "head.gguf", self.target)
        runner = TorchModel(self.target, OPTIONS, head=self.path).start(CAPACITY, 1).runner
        assert isinstance(runner, TorchRunner) and runner.capabilities.head is not None
        self.runner, self.head = runner, runner.capabilities.head

    def feed(self, request: Request, chunk: int = 64) -> None:
        assert request.seq is not None
        while request.num_computed < len(request.tokens) - 1:
            tokens = request.tokens[request.num_computed : len(request.tokens) - 1][:chunk]
            self.runner.forward(StepPlan([Row(request.seq, request.num_computed, tokens, 0)]))
            request.num_computed += len(tokens)

    def draft(self, *requests: Request, depth: int = 4) -> list[DraftedTokens]:
        return self.head.draft([HeadTask(request, depth) for request in requests])


@pytest.fixture
def drafting(tmp_path: Path) -> Iterator[Drafting]:
    made = Drafting(tmp_path)
    yield made
    made.runner.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [2, 5, 33, 70, 150])
def test_drafts_are_those_of_the_reference(tmp_path: Path, family: str, length: int) -> None:
    """Short texts are one pass of the loop, longer ones are caught up first, in chunks of 64."""
    made = Drafting(tmp_path, family)
    request = request_of(length, text=length)
    made.feed(request)
    (drafted,) = made.draft(request, depth=5)
    assert drafted.tokens == ReferenceHead(made.path, made.target, rounds_taps=False).draft(request.tokens, 5)[0]
    made.runner.close()


def test_batches_forks_and_rewinds_draft_as_alone(drafting: Drafting) -> None:
    reference = ReferenceHead(drafting.path, drafting.target, rounds_taps=False)
    first, second = request_of(40, seq=0), request_of(9, seq=1, text=1)
    for request in (first, second):
        drafting.feed(request)
    drafted = drafting.draft(first, second)
    fork = request_of(50, seq=2, text=2)
    fork.tokens[:32] = first.tokens[:32]  # a whole page is shared
    drafting.runner.fork(0, 2, 32)
    fork.num_computed = 32
    drafting.feed(fork)
    drafting.runner.truncate(1, 5)
    second.tokens, second.num_computed = [*second.tokens[:5], 3, 4], 5
    drafting.feed(second)
    drafted += drafting.draft(fork, second, first)
    texts = [first.tokens, request_of(9, text=1).tokens, fork.tokens, second.tokens, first.tokens]
    for found, tokens in zip(drafted, texts, strict=True):
        assert found.tokens == reference.draft(tokens, 4)[0]


def test_rows_that_are_behind_catch_up_together(drafting: Drafting, monkeypatch: pytest.MonkeyPatch) -> None:
    """In passes of at most 64 tokens; rows begin and end anywhere in a pass."""
    reference = ReferenceHead(drafting.path, drafting.target, rounds_taps=False)
    requests = [request_of(length, seq=seq, text=seq) for seq, length in enumerate((40, 90, 9, 3, 70))]
    for request in requests:
        drafting.feed(request)
    passes, run = list[int](), HeadPass.run

    def counting(one: HeadPass, rows: Sequence[Row], tables: Any) -> None:
        passes.append(len(rows))
        run(one, rows, tables)

    monkeypatch.setattr(HeadPass, "run", counting)
    drafted = drafting.draft(*requests)
    for request, one in zip(requests, drafted, strict=True):
        assert one.tokens == reference.draft(request.tokens, 4)[0]
    assert passes == [2, 2, 3, 1]  # 202 entries, the last of each row left out: 38 + 26, 62 + 2, 5 + 1 + 58, 10


def test_a_pass_with_unused_places_computes_the_same(drafting: Drafting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured passes have fixed shapes. Here they run without a graph, twice with different rows."""
    reference = ReferenceHead(drafting.path, drafting.target, rounds_taps=False)
    requests = [request_of(length, seq=seq, text=seq) for seq, length in enumerate((30, 3, 21, 40))]
    for request in requests:
        drafting.feed(request)
    assert isinstance(drafting.head, TorchHead)
    shape = StepShape(128, 8, 8, 64, drafting.runner.tables.shape[1], is_packed=True)
    padded = HeadPass(drafting.head._model, shape, None)
    monkeypatch.setattr(HeadPasses, "find", lambda passes, rows: padded)
    for group in (requests[:3], requests[3:]):
        for request, one in zip(group, drafting.draft(*group), strict=True):
            assert one.tokens == reference.draft(request.tokens, 4)[0]
    # The entries that the padded passes left are right, too.
    for request in requests:
        request.tokens = [*request.tokens, 5, 6]
        drafting.feed(request)
    for request, one in zip(requests, drafting.draft(*requests), strict=True):
        assert one.tokens == reference.draft(request.tokens, 4)[0]


def test_a_few_tokens_more_than_the_depth_need_no_pass_of_their_own(
    drafting: Drafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a deeper draft, or after plain steps."""
    reference = ReferenceHead(drafting.path, drafting.target, rounds_taps=False)
    request = request_of(30)
    drafting.feed(request)
    drafting.draft(request, depth=2)
    monkeypatch.setattr(HeadPass, "run", None)
    for num_emitted in (4, USUAL_UNCACHED):
        request.tokens = [*request.tokens, *request_of(num_emitted, text=num_emitted).tokens]
        drafting.feed(request)
        (drafted,) = drafting.draft(request, depth=2)
        assert drafted.tokens == reference.draft(request.tokens, 2)[0]


def test_steps_that_emit_several_tokens_are_followed(drafting: Drafting) -> None:
    """As in decoding: each draft begins with the tokens of the step before, in one pass of the captured kind."""
    reference = ReferenceHead(drafting.path, drafting.target, rounds_taps=False)
    request = request_of(4)
    for num_emitted in (1, 3, 5, 2, 40, 1):
        request.tokens = [*request.tokens, *request_of(num_emitted, text=num_emitted).tokens]
        drafting.feed(request)
        (drafted,) = drafting.draft(request)
        assert drafted.tokens == reference.draft(request.tokens, 4)[0]


SAMPLED = {"temperature": 4.0, "seed": 11}


@pytest.mark.parametrize("params", [{"temperature": 0.0}, SAMPLED], ids=str)
def test_speculation_with_a_head_changes_nothing(tmp_path: Path, params: dict[str, Any]) -> None:
    texts = [[5] * 40 + [i, 7, i] for i in range(3)] + [[9 + i] * (3 + 30 * i) for i in range(3)]
    target = write_model(tmp_path / "target.gguf")
    head = write_head(tmp_path / "head.gguf", target)
    options: dict[str, Any] = {"backend": "torch", "device": "cpu", "dtype": "float32", "threads": 1}

    def outputs(**more: Any) -> tuple[list[list[int]], int]:
        with LLM(str(target), str(head), **options, **more) as llm:
            done = llm.generate(texts, SamplingParams(max_tokens=30, ignore_eos=True, **params), progress=False)
        return [d.outputs[0].token_ids for d in done], sum(d.outputs[0].speculation.num_accepted for d in done)

    plain, _ = outputs(speculation="off")
    for depth in (1, 4):
        tokens, num_accepted = outputs(speculation="on", method="head", depth=depth)
        assert tokens == plain
        assert num_accepted > 0 or params["temperature"] == 0
    small = {"cache_tokens": 160, "max_context": 140, "max_step_tokens": 24, "max_sequences": 4}
    assert outputs(speculation="on", method="head", depth=3, **small)[0] == plain


def test_a_head_of_another_model_is_refused(tmp_path: Path) -> None:
    target, other = write_model(tmp_path / "target.gguf"), write_model(tmp_path / "other.gguf", "qwen2")
    head = write_head(tmp_path / "head.gguf", other)
    with pytest.raises(ModelError, match="was trained for tiny"):
        TorchModel(target, OPTIONS, head=head)


def test_a_head_in_a_gguf_file_drafts_for_a_folder(tmp_path: Path) -> None:
    target = write_folder(tmp_path)
    head = write_head(tmp_path / "head.gguf", target, width=32, head_dim=8)
    runner = TorchModel(target, OPTIONS, head=head).start(CAPACITY, 1).runner
    request = request_of(9)
    runner.forward(StepPlan([Row(0, 0, request.tokens[:-1], 0)]))
    request.num_computed = 8
    assert runner.capabilities.head is not None
    (drafted,) = runner.capabilities.head.draft([HeadTask(request, 3)])
    assert len(drafted.tokens) == 3
    runner.close()


def test_a_closed_model_does_not_draft(drafting: Drafting) -> None:
    request = request_of(5)
    drafting.feed(request)
    head = drafting.head
    drafting.runner.close()
    with pytest.raises(BackendError, match="closed"):
        head.draft([HeadTask(request, 2)])


def test_a_machine_with_little_besides_torch_can_load_a_gguf() -> None:
    """Training may run where no server's packages are."""
    code = (
        "import sys\n"
        "for name in ('pydantic', 'jinja2', 'fastapi', 'llama_cpp', 'transformers'): sys.modules[name] = None\n"
        "import outpace.backends.torch.runner, outpace.training.distill\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""As many requests at once as the settings allow, on the CPU: each gets the tokens that it gets in a small batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")
pytest.importorskip("safetensors", reason="safetensors is not installed; pip install outpace[torch]")
pytest.importorskip("tokenizers", reason="tokenizers is not installed; pip install outpace[torch]")

from outpace import LLM, SamplingParams
from outpace.backends.torch.execution.graphs import Graphs
from outpace.config import MAX_SEQUENCES
from outpace.errors import UsageError
from tests.tiny_folder import write_folder
from tests.tiny_gguf import write_model

COUNT = MAX_SEQUENCES
PROMPTS = [f"{i} the {'cat sat on' if i % 3 else 'mat sat on'} the {i * 7919 % 1000}" for i in range(COUNT)]
PARAMS = [
    SamplingParams(max_tokens=5, temperature=0.0 if i % 2 else 0.8, seed=i, ignore_eos=True) for i in range(COUNT)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def generate(folder: Path, at_once: int, **options: Any) -> tuple[list[list[int]], int]:
    """The tokens of every prompt, and the most rows that a step had."""
    settings = {"max_context": 128, "max_step_tokens": 16384, "cache_tokens": 64 * at_once, "threads": 1} | options
    most, find = 0, Graphs.find

    def counted(self: Graphs, plan: Any, **options: Any) -> Any:
        nonlocal most
        most = max(most, len(plan.rows))
        return find(self, plan, **options)

    with pytest.MonkeyPatch.context() as patch, LLM(
        str(folder), backend="torch", device="cpu", dtype="float32", max_sequences=at_once, **settings
    ) as llm:  # fmt: skip
        patch.setattr(Graphs, "find", counted)
        outputs = llm.generate(PROMPTS, PARAMS)
    return [output.outputs[0].token_ids for output in outputs], most


def test_many_requests_at_once_get_the_tokens_of_small_batches(folder, monkeypatch):
    expected, few = generate(folder, 16, speculation="off")
    found, many = generate(folder, COUNT, speculation="off")
    assert (few, many) == (16, COUNT)
    assert found == expected
    # The same in the steps that a GPU captures, with drafts.
    made = Graphs.__init__

    def as_if_captured(self: Graphs, *args: Any) -> None:
        made(self, *args)
        self._captures = True

    monkeypatch.setattr(Graphs, "__init__", as_if_captured)
    found, many = generate(folder, COUNT, speculation="on", method="ngram", depth=1)
    assert found == expected and many == COUNT


def test_llama_cpp_says_how_many_it_runs(tmp_path):
    path = write_model(tmp_path / "tiny.gguf", "llama", "Q8_0")
    with pytest.raises(UsageError, match=r"max_sequences is 257, and llama.cpp runs at most 256 at once; lower it, or"):
        LLM(str(path), backend="llamacpp", max_sequences=257, max_context=64)

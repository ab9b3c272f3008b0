"""With `batch_invariant`, a token has the same logits alone, in a batch, in a draft and in any chunk of a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")
pytest.importorskip("safetensors", reason="safetensors is not installed; pip install outpace[torch]")
pytest.importorskip("tokenizers", reason="tokenizers is not installed; pip install outpace[torch]")

from benchmarks.gpu_invariant import compare
from outpace import LLM, SamplingParams
from outpace.backends.base import Capacity
from outpace.backends.torch.device import TorchOptions
from outpace.backends.torch.kernels.base import fixed_shares
from outpace.backends.torch.runner import TorchModel, TorchRunner
from outpace.errors import BackendError, UsageError
from tests.tiny_folder import write_folder
from tests.tiny_gguf import write_model

SMALL: dict[str, Any] = {"backend": "torch", "device": "cpu", "threads": 1, "max_context": 256, "cache_tokens": 2048}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    # Wide enough that products of one and of several tokens are computed differently.
    return write_folder(tmp_path_factory.mktemp("model"), hidden_size=256, intermediate_size=320, head_dim=64)


@pytest.mark.parametrize(
    ("options", "is_same"),
    [({}, True), ({"quantization": "int8", "kv_cache_dtype": "int8"}, True), ({"batch_invariant": False}, False)],
    ids=str,
)
def test_logits_do_not_depend_on_what_shares_the_step(folder, options, is_same):
    """The last case shows that the comparison can fail."""
    chosen = TorchOptions("cpu", **{"dtype": "bfloat16", "batch_invariant": True} | options)
    capacity = Capacity(max_sequences=9, cache_tokens=9 * 160, max_context=160, max_step_tokens=512)
    runner = TorchModel(folder, chosen).start(capacity, 1).runner
    assert isinstance(runner, TorchRunner)
    found = compare(runner, length=50, prompt=35, batches=(8,))
    assert len(found) == 1 + 8 + 1
    assert all(row.num_different == 0 for row in found) == is_same, found


def test_answers_do_not_depend_on_other_requests_or_drafts(folder):
    prompts = ["the cat sat on the mat", "mat mat mat mat", "on on the the cat"]
    params = [SamplingParams(max_tokens=10, temperature=0.9 if i else 0.0, seed=i, ignore_eos=True) for i in range(3)]
    with LLM(str(folder), dtype="bfloat16", batch_invariant=True, speculation="off", **SMALL) as llm:
        alone = [
            llm.generate(prompt, each)[0].outputs[0].token_ids for prompt, each in zip(prompts, params, strict=True)
        ]
    with LLM(
        str(folder), dtype="bfloat16", batch_invariant=True, speculation="on", method="suffix", depth=3, **SMALL
    ) as llm:
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert together == alone


def test_shares_of_a_context_do_not_depend_on_it():
    for most in (64, 256, 257, 8192, 8224, 131_072, 1_000_000):
        share, count = fixed_shares(most)
        assert share % 64 == 0 and count <= 32 and (count - 1) * share < most <= count * share


def test_what_has_no_such_kernels_is_refused_in_one_sentence(folder, tmp_path):
    path = write_model(tmp_path / "tiny.gguf", "llama", "Q8_0")
    with pytest.raises(UsageError, match=r"batch_invariant is set, and llama.cpp runs this model"):
        LLM(str(path), backend="llamacpp", batch_invariant=True)
    with pytest.raises(BackendError, match=r"set quantization 'none', 'fp8' or 'int8'"):
        TorchModel(folder, TorchOptions("cpu", quantization="int4", batch_invariant=True))
    with pytest.raises(BackendError, match=r"how 2 devices add their parts depends on the step; use one device"):
        TorchModel(folder, TorchOptions("cpu", tensor_parallel_size=2, batch_invariant=True))
    with LLM(str(path), backend="native", batch_invariant=True, max_context=64) as llm:
        assert llm.config.batch_invariant, "the native backend always is"


def test_the_workspace_is_planned(folder):
    capacity = Capacity(max_sequences=1, cache_tokens=8192, max_context=8192, max_step_tokens=512)
    usual, invariant = (
        TorchModel(folder, TorchOptions("cpu", batch_invariant=each)).plan(capacity).workspace for each in (False, True)
    )
    heads, dim, (_, shares) = 4, 64, fixed_shares(8192 + 32)
    assert invariant - usual == 512 * 4 * heads * (dim + 2) * shares

"""A KV cache in 8 bits: near the dense one, half as large, and the same tokens with and without speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")
pytest.importorskip("safetensors", reason="safetensors is not installed; pip install outpace[torch]")
pytest.importorskip("tokenizers", reason="tokenizers is not installed; pip install outpace[torch]")

import torch

from outpace import LLM, SamplingParams
from outpace.backends.base import Capacity
from outpace.backends.torch.device import TorchOptions
from outpace.backends.torch.execution.pages import PAGE_TOKENS, Pages, choose_cache_dtype
from outpace.backends.torch.runner import TorchModel, TorchRunner
from outpace.backends.torch.self_draft import SelfDraft
from outpace.config import KVCacheDtype, Method, SpeculationParams
from outpace.core import Row, StepPlan
from outpace.errors import BackendError, UsageError
from tests.numpy_reference import Floats
from tests.tiny_folder import write_folder
from tests.tiny_gguf import write_model

CAPACITY = Capacity(max_sequences=4, cache_tokens=512, max_context=128, max_step_tokens=128)
KINDS: tuple[KVCacheDtype, ...] = ("fp8", "int8")
LARGEST_ERROR: dict[KVCacheDtype, float] = {"fp8": 0.1, "int8": 0.02}  # of logits, relative to their norm
SMALL: dict[str, Any] = {"backend": "torch", "device": "cpu", "threads": 1, "max_context": 128, "cache_tokens": 512}
PROMPTS = ["the cat sat", "on the mat the cat sat on the mat the", "mat mat mat mat mat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"), head_dim=16)


def start(folder: Path, kind: KVCacheDtype) -> TorchRunner:
    runner = TorchModel(folder, TorchOptions("cpu", kv_cache_dtype=kind)).start(CAPACITY, 1).runner
    assert isinstance(runner, TorchRunner)
    return runner


def some_tokens(count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(0).integers(4, 300, count)]


def logits(runner: TorchRunner, sizes: list[int], seq: int = 0) -> Floats:
    """Of the same text, in steps of these sizes."""
    tokens, at, found = some_tokens(100), 0, []
    for size in sizes:
        found.append(runner.forward(StepPlan([Row(seq, at, tokens[at : at + size], size)])).copy())
        at += size
    runner.free(seq)
    return np.concatenate(found)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_near_those_of_a_dense_cache(folder, kind):
    dense, rounded = start(folder, "auto"), start(folder, kind)
    expected, found = logits(dense, [100]), logits(rounded, [100])
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert 1e-4 < error < LARGEST_ERROR[kind], "a cache that is not rounded, or that is wrong"


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_same_cache_in_whatever_portion_it_came(folder, kind):
    """What is rounded is a token alone, so portions change logits only as they do with a dense cache."""
    runner = start(folder, kind)
    expected = logits(runner, [100])
    for sizes in ([40, 1, 1, 5, 53], [1] * 100):
        assert np.abs(logits(runner, sizes) - expected).max() < 1e-4 * np.abs(expected).max()
    # A fork copies its last page, with the scales, before it writes there.
    tokens = some_tokens(100)
    runner.forward(StepPlan([Row(0, 0, tokens[:41], 1)]))
    runner.fork(0, 1, 41)
    runner.forward(StepPlan([Row(0, 41, tokens[:9], 1)]))
    found = runner.forward(StepPlan([Row(1, 41, tokens[41:60], 19)]))
    assert np.abs(found - expected[41:60]).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("kind", KINDS)
def test_values_far_from_the_usual_range_survive(kind):
    """FP8 without scales ends at 448, and has no numbers below 0.002."""
    pages = Pages(1, 1, 1, 16, choose_cache_dtype(kind, torch.float32, torch.device("cpu")), torch.device("cpu"))
    from outpace.backends.torch.execution.step import HostStep, StepShape, views
    from outpace.backends.torch.kernels.reference import ReferenceOps, _numbers

    host = HostStep(StepShape(3, 1, 3, 3, 2), pinned=False)
    host.positions[:], host.lengths[0], host.contexts[0] = range(3), 3, 3
    qkv = torch.randn(3, 3 * 16) * torch.tensor([[1e4], [1e-6], [0.0]])
    rope = torch.cat([torch.ones(3, 8), torch.zeros(3, 8)], 1)  # no rotation
    ReferenceOps().attend(qkv, pages.caches[0], views(host.buffer, host.shape), rope, None, None, 1e-5)
    [cache] = pages.caches
    found = torch.cat([_numbers(cache.keys, cache.key_scales), _numbers(cache.values, cache.value_scales)])[:, 0, :3]
    expected = qkv[:, 16:].view(3, 2, 16).transpose(0, 1)
    errors = (found - expected).norm(dim=2) / expected.norm(dim=2).clamp(min=1e-30)
    assert errors.max() < {"fp8": 0.05, "int8": 0.01}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_speculation_changes_no_token(folder, kind):
    said = {}
    methods: tuple[Method, ...] = ("none", "suffix", "draft")
    for method in methods:
        speculation = SpeculationParams(mode="off") if method == "none" else SpeculationParams(mode="on", method=method)
        wanted = [
            SamplingParams(max_tokens=20, ignore_eos=True, speculation=speculation, temperature=temperature, seed=3)
            for temperature in (0.0, 0.9)
        ]
        with LLM(str(folder), draft="self:int8", kv_cache_dtype=kind, **SMALL) as llm:
            assert llm.config.kv_cache_dtype == kind and f"cache in {kind}" in llm._target.description
            outputs = [llm.generate(PROMPTS, each) for each in wanted]
        said[method] = [output.outputs[0].token_ids for each in outputs for output in each]
        num_accepted = sum(output.outputs[0].speculation.num_accepted for each in outputs for output in each)
        assert method == "none" or num_accepted, method
    assert said["suffix"] == said["draft"] == said["none"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_has_the_bytes_that_are_allocated(folder, kind):
    model = TorchModel(folder, TorchOptions("cpu", kv_cache_dtype=kind))
    c, plan = model.config, model.plan(CAPACITY)
    assert plan.cache_token == 2 * c.num_layers * c.num_kv_heads * (c.head_dim + 4)
    pages = Pages(c.num_layers, plan.num_cache_tokens // PAGE_TOKENS, c.num_kv_heads, c.head_dim, model.cache_dtype,
                  model.device)  # fmt: skip
    assert pages.scales is not None and pages.numbers.nbytes + pages.scales.nbytes == plan.cache
    assert SelfDraft(model, "int4").plan(CAPACITY).cache_token == plan.cache_token


def test_a_sharded_model_has_such_a_cache_too(folder):
    whole, sharded = (
        LLM(str(folder), kv_cache_dtype="int8", tensor_parallel_size=size, speculation="off", **SMALL)
        for size in (1, 2)
    )
    wanted = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    try:
        said = [[output.outputs[0].token_ids for output in llm.generate(PROMPTS, wanted)] for llm in (whole, sharded)]
    finally:
        whole.close()
        sharded.close()
    assert said[0] == said[1]


def test_what_cannot_be_is_refused_in_one_sentence(folder, tmp_path, monkeypatch):
    path = write_model(tmp_path / "tiny.gguf", "llama", "Q8_0")
    with pytest.raises(
        UsageError, match=r"kv_cache_dtype is 'fp8', a setting of the torch backend, and another backend"
    ):
        LLM(str(path), backend="native", kv_cache_dtype="fp8")
    with pytest.raises(UsageError, match="kv_cache_dtype must be one of auto, fp8, int8; got 'fp4'"):
        LLM(str(folder), kv_cache_dtype="fp4")
    with pytest.raises(BackendError, match=r"kv_cache_dtype 'int8' needs dtype 'bfloat16' or 'float32'"):
        TorchModel(folder, TorchOptions("cpu", "float16", kv_cache_dtype="int8"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    cuda = torch.device("cuda", 0)
    with pytest.raises(BackendError, match=r"needs a GPU of compute capability 8.9; use kv_cache_dtype 'int8'"):
        choose_cache_dtype("fp8", torch.bfloat16, cuda)
    assert choose_cache_dtype("int8", torch.bfloat16, cuda) == torch.int8

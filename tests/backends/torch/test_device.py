"""A missing GPU, an old driver or too little GPU memory, simulated on a CPU: each gives one clear error message."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")

import torch

from outpace.backends.torch.device import MemoryPlan, choose_device, choose_dtype, usable_bytes
from outpace.backends.torch.execution.graphs import (
    ROW_BUCKETS,
    TOKEN_BUCKETS,
    find_bucket,
    find_packed_bucket,
    find_prefill_bucket,
    num_captured_tokens,
)
from outpace.errors import BackendError

GB = 10**9
CUDA = torch.device("cuda", 0)
PLAN = MemoryPlan("big", weights=16 * GB, workspace=GB, cache_token=131072, num_cache_tokens=65536)


@pytest.fixture
def cuda(monkeypatch):
    """A torch built for CUDA that starts or fails as the test says; and a GPU with the given memory."""

    def pretend(start: Exception | int, *, free: int = 80 * GB, total: int = 80 * GB) -> None:
        def init() -> None:
            if isinstance(start, Exception):
                raise start

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0 if isinstance(start, Exception) else start)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))

    return pretend


DRIVER = RuntimeError(
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver.\nMore words."
)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (DRIVER, "torch cannot use CUDA here: The NVIDIA driver on your system is too old (found version 11040)"),
        (RuntimeError("Found no NVIDIA driver on your system."), "here: Found no NVIDIA driver on your system; use"),
        (AssertionError("Torch not compiled with CUDA enabled"), "here: Torch not compiled with CUDA enabled; use"),
        (0, "here: no GPU is visible; use device 'cpu', or backend 'native'"),
    ],
    ids=["driver too old", "no driver", "no CUDA", "no GPU"],
)
def test_why_there_is_no_cuda_is_said_in_one_line(cuda, start, words, caplog):
    cuda(start)
    with pytest.raises(BackendError) as caught:
        choose_device("cuda")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert choose_device("auto").type == "cpu"
    assert "runs on the CPU, which is slow" in caplog.text


def test_a_build_without_cuda_names_itself(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(BackendError, match=r"torch .* was built without it; install a CUDA build of torch"):
        choose_device("cuda")


def test_a_gpu_is_taken_where_there_is_one(cuda):
    cuda(1)
    assert choose_device("auto") == CUDA
    assert choose_device("cpu").type == "cpu"
    assert choose_dtype("auto", CUDA) == torch.float16, "older than Ampere"
    assert choose_dtype("bfloat16", CUDA) == torch.bfloat16


def test_what_others_use_of_a_gpu_is_not_ours(cuda):
    cuda(1, free=60 * GB)
    assert usable_bytes(CUDA, 0.9) == 52 * GB
    assert usable_bytes(CUDA, 0.2) == 0


def test_a_cache_too_large_for_the_gpu_says_what_fits_and_which_settings_to_change(cuda):
    cuda(1, free=22 * GB, total=24 * GB)
    with pytest.raises(BackendError) as caught:
        PLAN.check(CUDA, 0.9)
    sentence = str(caught.value)
    assert "big needs 16.00 GB for weights, 8.59 GB for 65,536 tokens of cache and 1.00 GB for workspace" in sentence
    assert "25.59 GB in total, but 19.60 GB may be used on cuda:0" in sentence
    assert "at most 19,836 tokens of cache fit: lower cache_tokens or max_context" in sentence
    assert sentence.endswith("or raise gpu_memory_utilization")


def test_a_model_too_large_for_the_gpu_says_so(cuda):
    cuda(1, free=8 * GB, total=8 * GB)
    with pytest.raises(BackendError, match="use a smaller model or another device, or raise gpu_memory_utilization"):
        PLAN.check(CUDA, 0.9)
    cuda(1, free=80 * GB)
    PLAN.check(CUDA, 0.9)


def test_every_bucket_that_can_be_met_is_in_the_plan_of_graphs():
    """All buckets share the logits of the largest, whatever their kind."""
    for most_rows in (1, 2, 5, 8, 40, 128, 130, 512):
        met = set[int]()
        for rows in {*(size for size in ROW_BUCKETS if size < most_rows), most_rows}:
            padded = [find_bucket(rows, tokens) for tokens in range(1, TOKEN_BUCKETS[-1] + 1)]
            packed = [find_packed_bucket(rows, 8, tokens) for tokens in range(rows, rows * TOKEN_BUCKETS[-1] + 1)]
            prefill = [find_prefill_bucket(rows, tokens) for tokens in (rows, 4096)]
            met |= {bucket[0] * bucket[1] for bucket in padded if bucket is not None}
            met |= {bucket[1] for bucket in packed if bucket is not None}
            met |= {bucket[0] for bucket in prefill if bucket is not None}
        assert max(met) <= num_captured_tokens(most_rows)
        assert most_rows not in ROW_BUCKETS or max(met) == num_captured_tokens(most_rows)
    assert num_captured_tokens(5) == num_captured_tokens(8) > num_captured_tokens(4)
    assert num_captured_tokens(1000) == num_captured_tokens(512)

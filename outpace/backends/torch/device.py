"""Chooses the device and the dtype, and plans the memory before allocating any."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from outpace.backends.memory import available_bytes
from outpace.config import DeviceName, DtypeName, KVCacheDtype, Quantization
from outpace.errors import BackendError

_BFLOAT16_CAPABILITY = (8, 0)  # Ampere; older GPUs emulate bfloat16 slowly

log = logging.getLogger("outpace.backends.torch")


@dataclass(frozen=True, slots=True)
class TorchOptions:
    device: DeviceName = "auto"
    dtype: DtypeName = "auto"
    memory_utilization: float = 0.9  # share of the device's memory that may be used
    tensor_parallel_size: int = 1  # devices, and processes, that share the model
    quantization: Quantization = "auto"
    head_quantization: Quantization = "auto"  # of a draft head
    kv_cache_dtype: KVCacheDtype = "auto"
    batch_invariant: bool = False


def choose_device(wanted: DeviceName) -> torch.device:
    if wanted == "cpu":
        return torch.device("cpu")
    reason = why_no_cuda()
    if reason is None:
        return torch.device("cuda", torch.cuda.current_device())
    if wanted == "cuda":
        raise BackendError(f"torch cannot use CUDA here: {reason}; use device 'cpu', or backend 'native'")
    log.warning("the torch backend runs on the CPU, which is slow: %s", reason)
    return torch.device("cpu")


def why_no_cuda() -> str | None:
    """None if CUDA works; else the reason, as torch reports it: no CUDA build, no driver, a driver too old."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without it; install a CUDA build of torch"
    try:
        torch.cuda.init()
        return None if torch.cuda.device_count() else "no GPU is visible"
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0].rstrip(".")


def choose_dtype(wanted: DtypeName, device: torch.device) -> torch.dtype:
    if wanted != "auto":
        dtype: torch.dtype = getattr(torch, wanted)
        return dtype
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= _BFLOAT16_CAPABILITY else torch.float16


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that a model needs on its device."""

    name: str
    weights: int
    workspace: int  # activations of the largest step, logits, captured graphs
    cache_token: int  # one token's keys and values
    num_cache_tokens: int

    @property
    def cache(self) -> int:
        return self.cache_token * self.num_cache_tokens

    def check(self, device: torch.device, utilization: float) -> None:
        usable = usable_bytes(device, utilization)
        needed = self.weights + self.workspace + self.cache
        if usable is None or needed <= usable:
            return
        left = usable - self.weights - self.workspace
        remedy = (
            f"at most {max(left, 0) // self.cache_token:,} tokens of cache fit: lower cache_tokens or max_context"
            if left > 0
            else "use a smaller model or another device"
        )
        raise BackendError(
            f"{self.name} needs {_gb(self.weights)} for weights, {_gb(self.cache)} for {self.num_cache_tokens:,} "
            f"tokens of cache and {_gb(self.workspace)} for workspace, {_gb(needed)} in total, but {_gb(usable)} may "
            f"be used on {device}; {remedy}{', or raise gpu_memory_utilization' if device.type == 'cuda' else ''}"
        )


def usable_bytes(device: torch.device, utilization: float) -> int | None:
    """Bytes that may still be allocated. On a GPU: its share less the memory in use. None if unknown."""
    if device.type != "cuda":
        return available_bytes()
    free, total = torch.cuda.mem_get_info(device)
    return max(int(utilization * total) - (total - free), 0)


def out_of_memory(error: Exception, plan: MemoryPlan, device: torch.device) -> BackendError:
    """The error for a device that ran out of memory despite the plan, for instance because other processes use it."""
    return BackendError(
        f"{device} ran out of memory while loading {plan.name}, which needs {_gb(plan.weights)} for weights, "
        f"{_gb(plan.cache)} for its cache and {_gb(plan.workspace)} for workspace ({str(error).splitlines()[0]}); "
        "lower cache_tokens, max_context or gpu_memory_utilization"
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"

"""Starts a sharded model: the other ranks in processes of their own, this rank's part here, and the group of all."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from outpace.backends.base import Capacity
from outpace.backends.torch.kernels import ops_for
from outpace.backends.torch.model.loader import Checkpoint, choose_formats
from outpace.backends.torch.parallel.leader import Leader, LeadingModel
from outpace.backends.torch.parallel.messages import Setup
from outpace.backends.torch.parallel.ops import ShardedOps
from outpace.backends.torch.parallel.shard import Shard, load_shard
from outpace.errors import BackendError

_JOIN_TIMEOUT = timedelta(seconds=60)


def _check_devices(device: torch.device, size: int) -> None:
    """Raises if there are fewer GPUs than ranks."""
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise BackendError(
            f"tensor_parallel_size is {size} and torch sees {torch.cuda.device_count()} GPUs; lower it, or let it see "
            "more (CUDA_VISIBLE_DEVICES)"
        )


def start(
    path: Path,
    checkpoint: Checkpoint,
    shard: Shard,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
    capacity: Capacity,
    num_pages: int,
    threads: int,
    quantization: str,
) -> LeadingModel:
    """Rank 0's part of a model, once every rank has loaded its own."""
    _check_devices(device, shard.size)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_JOIN_TIMEOUT)
    leader = Leader(
        [
            Setup(
                model=str(path),
                rank=rank,
                size=shard.size,
                port=store.port,
                device=f"cuda:{rank}" if device.type == "cuda" else "cpu",
                dtype=str(dtype).removeprefix("torch."),
                cache_dtype=str(cache_dtype).removeprefix("torch."),
                capacity=capacity,
                num_pages=num_pages,
                threads=max(threads // shard.size, 1),
                quantization=quantization,
            )
            for rank in range(1, shard.size)
        ]
    )
    try:
        formats = choose_formats(checkpoint, quantization, dtype, device)
        weights = load_shard(checkpoint, shard, dtype, device, formats)
        group = leader.join(store, device)
    except BaseException:
        leader.close()
        raise
    ops = ShardedOps(ops_for(device), group, checkpoint.config.vocab_size)
    model = LeadingModel(shard.of(checkpoint.config), weights, ops, capacity.max_context)
    model.lead(leader, group)
    return model

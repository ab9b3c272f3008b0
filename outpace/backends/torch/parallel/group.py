"""The ranks' collective operations, on their device: NCCL between GPUs, gloo between CPUs.

A group belongs to one model and not to the process, so that a process can hold several. With NCCL, operations are
queued on the current stream and can be captured in graphs. The NCCL path was not run yet: it needs two GPUs.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_TIMEOUT = timedelta(minutes=5)  # of one operation: a rank may compile kernels meanwhile; a dead one is noticed sooner


class Group:
    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        """`store`: where the ranks meet, a torch.distributed.TCPStore."""
        self.rank, self.size = rank, size
        # As `Any`, because torch has no annotations for these classes.
        backend: Any = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
        self._ranks = backend(store, rank, size, _TIMEOUT)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        self._ranks.allreduce([x]).wait()
        return x

    def from_first(self, x: Tensor) -> None:
        """Replace `x` by that of rank 0."""
        self._ranks.broadcast(x, 0).wait()

    def to_first(self, x: Tensor) -> list[Tensor]:
        """Every rank's `x`, on rank 0; nothing on the others."""
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._ranks.gather([parts] if parts else [], [x], options).wait()
        return parts

    def abort(self) -> None:
        """End operations that wait for a dead rank, where the backend can."""
        self._ranks.abort()

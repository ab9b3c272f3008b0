"""Captures work of the device as a CUDA graph, so that one launch repeats it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Pool = Any  # torch's handle of the memory that graphs share; its type has no public name
T = TypeVar("T")


def captured(
    run: Callable[[], T], pool: Pool, device: torch.device, warm_ups: int = 1
) -> tuple[torch.cuda.CUDAGraph, T]:  # fmt: skip
    """The graph, and what `run` returned: tensors that every replay writes again.

    It runs on another stream first, to compile kernels and allocate the workspaces of libraries.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        found = run()
    return graph, found

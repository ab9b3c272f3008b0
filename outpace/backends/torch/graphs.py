"""CUDA graphs of whole steps: captured once per bucket of rows and tokens per row, replayed with new contents.

A step of a large model is two hundred kernels of a few microseconds each; launching them one by one from Python takes
longer than running them. A bucket's tensors have fixed places and sizes, so a plan is written into its buffer, padded
where it has fewer rows or shorter ones, and the whole step is a single launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.backends.torch.kernels.base import Cache
from outpace.backends.torch.model import Model
from outpace.backends.torch.step import PADDING, HostStep, StepInputs, StepShape, views
from outpace.core import StepPlan

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
TOKEN_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # per row
MAX_TOKENS = 1024  # in a bucket; larger steps keep the GPU busy whoever launches them
_WARM_UPS = 2  # before a capture: kernels are compiled and libraries make their workspaces


@dataclass(slots=True)
class Graph:
    """A captured step. Fill `host`, then replay."""

    host: HostStep
    step: StepInputs
    logits: Tensor  # on the device, [num_outputs, vocab_size]
    _words: Tensor
    _graph: torch.cuda.CUDAGraph
    _on_host: Tensor

    def launch(self) -> None:
        """Start the step; the device's logits are valid once its stream gets there."""
        self._words.copy_(self.host.buffer, non_blocking=True)
        self._graph.replay()

    def replay(self, num_logits: int) -> NDArray[np.float32]:
        """Run the step and bring the logits asked for to the host."""
        self.launch()
        wanted = self.host.outputs[:num_logits]
        last = int(wanted[-1]) + 1 if num_logits else 0
        self._on_host[:last].copy_(self.logits[:last], non_blocking=True)
        torch.cuda.current_stream().synchronize()
        found: NDArray[np.float32] = self._on_host[:last].numpy()
        return found if num_logits == last else found[wanted]


class Graphs:
    def __init__(self, model: Model, caches: list[Cache], table_width: int) -> None:
        self._model = model
        self._caches = caches
        self._table_width = table_width
        self._captured: dict[tuple[int, int], Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._on_host: Tensor | None = None

    def find(self, plan: StepPlan) -> Graph | None:
        """The graph of the smallest bucket the plan fits in, captured on first use; None where none would pay."""
        bucket = find_bucket(len(plan.rows), max(len(row.tokens) for row in plan.rows))
        if bucket is None:
            return None
        if bucket not in self._captured:
            self._captured[bucket] = self._capture(*bucket)
        return self._captured[bucket]

    def _capture(self, num_rows: int, row_tokens: int) -> Graph:
        num_tokens = num_rows * row_tokens
        shape = StepShape(num_tokens, num_rows, num_tokens, row_tokens, self._table_width)
        device = self._model.weights.embedding.device
        host = HostStep(shape, pinned=True)
        host.positions.fill(PADDING)
        words = host.buffer.to(device)
        step = views(words, shape)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._model.forward(step, self._caches)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._model.forward(step, self._caches)
        if self._on_host is None or len(self._on_host) < num_tokens:
            self._on_host = torch.empty((num_tokens, logits.shape[1]), dtype=torch.float32, pin_memory=True)
        return Graph(host, step, logits, words, graph, self._on_host)


def find_bucket(num_rows: int, row_tokens: int) -> tuple[int, int] | None:
    """(rows, tokens per row). A step of few long rows and many short ones is not padded: that would multiply it."""
    rows = next((size for size in ROW_BUCKETS if size >= num_rows), None)
    tokens = next((size for size in TOKEN_BUCKETS if size >= row_tokens), None)
    if rows is None or tokens is None or rows * tokens > MAX_TOKENS:
        return None
    return rows, tokens

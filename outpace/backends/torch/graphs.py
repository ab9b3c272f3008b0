"""CUDA graphs of whole steps: captured once per bucket of rows and tokens per row, replayed with new contents.

A step of a large model is two hundred kernels of a few microseconds each; launching them one by one from Python takes
longer than running them. A bucket's tensors have fixed places and sizes, so a plan is written into its buffer, padded
where it has fewer rows or shorter ones, and the whole step is a single launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.backends.torch.drafting import DraftLoop
from outpace.backends.torch.draws import Draws, Mode, Pool
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
    """A captured step. Fill `host`, then launch; draw from its logits, or fetch them."""

    host: HostStep
    step: StepInputs
    logits: Tensor  # on the device, [num_outputs, vocab_size]
    _words: Tensor
    _graph: torch.cuda.CUDAGraph
    _pool: Pool
    _draws: dict[Mode, Draws] = field(default_factory=dict)

    def launch(self) -> None:
        """Start the step; the device's logits are valid once its stream gets there."""
        self._words.copy_(self.host.buffer, non_blocking=True)
        self._graph.replay()

    @property
    def num_draws(self) -> int:
        return len(self._draws)

    def draws(self, mode: Mode) -> Draws:
        if mode not in self._draws:
            self._draws[mode] = Draws(self.logits, mode, self._pool)
        return self._draws[mode]


class Graphs:
    def __init__(self, model: Model, caches: list[Cache], table_width: int) -> None:
        self._model = model
        self._caches = caches
        self._table_width = table_width
        self._captured: dict[tuple[int, int], Graph] = {}
        self._loops: dict[tuple[int, int, Mode], DraftLoop] = {}
        self._pool: Pool = torch.cuda.graph_pool_handle()

    @property
    def num_captured(self) -> int:
        return len(self._captured) + len(self._loops) + sum(graph.num_draws for graph in self._captured.values())

    def loop(self, num_rows: int, num_steps: int, mode: Mode) -> DraftLoop | None:
        """Steps of a draft model after its first; None where there are more rows than any graph has."""
        rows = next((size for size in ROW_BUCKETS if size >= num_rows), None)
        if rows is None:
            return None
        key = (rows, num_steps, mode)
        if key not in self._loops:
            self._loops[key] = DraftLoop(
                self._model, self._caches, rows, num_steps, self._table_width, mode, self._pool
            )
        return self._loops[key]

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
        return Graph(host, step, logits, words, graph, self._pool)


def find_bucket(num_rows: int, row_tokens: int) -> tuple[int, int] | None:
    """(rows, tokens per row). A step of few long rows and many short ones is not padded: that would multiply it."""
    rows = next((size for size in ROW_BUCKETS if size >= num_rows), None)
    tokens = next((size for size in TOKEN_BUCKETS if size >= row_tokens), None)
    if rows is None or tokens is None or rows * tokens > MAX_TOKENS:
        return None
    return rows, tokens

"""The passes with which a head catches up: they write entries, and nothing else. They have fixed shapes, one per bucket
of rows and tokens, and are captured on first use.

Launched one by one, the few kernels of such a pass take longer to launch than to run, and each new shape makes Triton
load another variant of them. Unused places of a bucket write nothing to the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outpace.backends.torch.execution import staging
from outpace.backends.torch.execution.capturing import Pool, captured
from outpace.backends.torch.execution.graphs import MAX_PREFILL_ROW, Graphs, find_prefill_bucket
from outpace.backends.torch.execution.step import PADDING, HostStep, StepShape, views
from outpace.backends.torch.model.head import HeadModel
from outpace.core import Row


class HeadPasses:
    def __init__(self, model: HeadModel, graphs: Graphs) -> None:
        """Captured passes use the memory of `graphs` and count there."""
        self._model, self._graphs = model, graphs
        self._passes: dict[tuple[int, int], HeadPass] = {}

    def find(self, rows: Sequence[Row]) -> HeadPass:
        """The smallest captured pass that the rows fit in, or one made for them."""
        counts = [len(row.tokens) for row in rows]
        graphs, longest = self._graphs, max(counts)
        size = find_prefill_bucket(len(rows), sum(counts)) if graphs.pool is not None else None
        if size is None or longest > MAX_PREFILL_ROW:
            shape = StepShape(sum(counts), len(rows), len(rows), longest, graphs.table_width)
            return HeadPass(self._model, shape, None)
        if size not in self._passes:
            num_rows, num_tokens = size
            longest = min(num_tokens, MAX_PREFILL_ROW)
            shape = StepShape(num_tokens, num_rows, num_rows, longest, graphs.table_width, is_packed=True)
            self._passes[size] = HeadPass(self._model, shape, graphs.pool)
            graphs.captures.num += 1
        return self._passes[size]


class HeadPass:
    """One pass."""

    def __init__(self, model: HeadModel, shape: StepShape, pool: Pool | None) -> None:
        """Without `pool`, it runs without a graph."""
        device = model.device
        self._model = model
        self.host = HostStep(shape, pinned=device.type == "cuda")
        self.host.positions.fill(PADDING)
        self._step = views(self.host.buffer.to(device), shape)
        self._graph: torch.cuda.CUDAGraph | None = None
        if pool is not None:
            self._graph, _ = captured(lambda: model.enter(self._step), pool, device)

    def run(self, rows: Sequence[Row], tables: NDArray[np.int32]) -> None:
        if self._graph is not None:
            torch.cuda.current_stream().synchronize()  # the device may still read the words of the last run
        staging.fill(self.host, rows, tables)
        self._step.words.copy_(self.host.buffer, non_blocking=True)
        if self._graph is None:
            self._model.enter(self._step)
        else:
            self._graph.replay()

"""Steps of fixed shapes, one per bucket of rows and tokens per row: on a GPU captured once as CUDA graphs.

A step of a large model is two hundred kernels of a few microseconds each; launching them one by one from Python takes
longer than running them. A bucket's tensors have fixed places and sizes, so a plan is written into its buffer, padded
where it has fewer rows or shorter ones, and the whole step is a single launch. A bucket of one token a row can also go
on by itself: what is drawn becomes what it feeds next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.backends.torch.drafting import DraftLoop
from outpace.backends.torch.draws import Draws, Mode, Pool
from outpace.backends.torch.kernels.base import Cache
from outpace.backends.torch.model import Model
from outpace.backends.torch.step import PADDING, Advance, HostStep, StepShape, views
from outpace.core import StepPlan

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
TOKEN_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 17)  # per row; the last for a draft of 16 and the token before it
# Steps that read prompts, alone or beside rows that decode: tokens in all, by how many rows there is room for.
READ_BUCKETS = {
    1: (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
    8: (64, 128, 256, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 3584, 4096),
    32: (128, 256, 512, 1024, 1536, 2048, 2560, 3072, 3584, 4096),
    128: (256, 512, 1024, 1536, 2048, 2560, 3072, 3584, 4096),
}
MAX_READ_ROW = 1024  # tokens of one row in such a step
_LAUNCH_BOUND = 1.6e13  # operations of a step; one with more takes longer to compute than to launch
LARGEST_BUCKET = (ROW_BUCKETS[-1], 16)  # in either direction, the longest drafts aside; not in both at once
MAX_TOKENS = 1024  # in a bucket; larger steps keep the GPU busy whoever launches them
_WARM_UPS = 2  # before a capture: kernels are compiled and libraries make their workspaces


class Bucket:
    """A step whose tensors stay where they are. Fill `host`, then launch; draw from its logits, or fetch them."""

    def __init__(self, model: Model, caches: list[Cache], shape: StepShape, pool: Pool | None) -> None:
        device = model.weights.embedding.device
        self._model, self._caches, self._pool = model, caches, pool
        self.host = HostStep(shape, pinned=pool is not None)
        self.host.positions.fill(PADDING)
        self.step = views(self.host.buffer.to(device), shape)
        self._tables = [torch.zeros_like(self.step.tables, device="cpu", pin_memory=pool is not None) for _ in range(2)]
        self._draws: dict[Mode, Draws] = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        if pool is None:
            self.logits = torch.empty((shape.num_outputs, model.config.vocab_size), device=device)
        else:
            self.logits = self._captured(pool, device)  # valid once the stream gets there

    def _captured(self, pool: Pool, device: torch.device) -> Tensor:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._model.forward(self.step, self._caches)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            return self._model.forward(self.step, self._caches)

    def launch(self, drafted: Tensor | None = None) -> None:
        """Start what `host` says; with drafts [depth, rows] on the device, of rows that feed a token and theirs."""
        self.step.words.copy_(self.host.buffer, non_blocking=True)
        if drafted is not None:
            shape, most = self.step.shape, self._model.config.vocab_size - 1
            places = self.step.tokens.view(shape.num_rows, shape.max_row_tokens)[:, 1 : 1 + len(drafted)]
            torch.clamp(drafted.T, max=most, out=places)  # what rows without a place drew may be no token at all
        self.replay()

    def replay(self) -> None:
        """Start what is on the device."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self.logits.copy_(self._model.forward(self.step, self._caches))

    def change_tables(self, changed: Mapping[int, Sequence[int]]) -> None:
        """The pages of some rows, for what is started next; what was started already may still be on its way."""
        for row, pages in changed.items():
            self.host.tables[row, : len(pages)] = pages
        self._tables.reverse()  # the other one may still be read
        self._tables[0].numpy()[:] = self.host.tables
        self.step.tables.copy_(self._tables[0], non_blocking=True)

    def lines(self, num_logits: int) -> tuple[NDArray[np.integer], Tensor]:
        """Where in the logits those asked for are, in order, on the host and on the device."""
        if self.step.shape.num_outputs < self.step.shape.num_tokens:  # they are all there is
            return np.arange(num_logits), torch.arange(num_logits, device=self.logits.device)
        return self.host.outputs[:num_logits].copy(), self.step.outputs[:num_logits]

    @property
    def num_draws(self) -> int:
        return len(self._draws)

    def has_draws(self, mode: Mode) -> bool:
        return mode in self._draws

    def draws(self, mode: Mode) -> Draws:
        if mode not in self._draws:
            advance = Advance(self.step) if self.host.shape.max_row_tokens == 1 else None
            self._draws[mode] = Draws(self.logits, mode, self._pool, advance)
        return self._draws[mode]


class Graphs:
    def __init__(self, model: Model, caches: list[Cache], table_width: int) -> None:
        self._model = model
        self._caches = caches
        self._table_width = table_width
        self._buckets: dict[tuple[int, int], Bucket] = {}
        self._readings: dict[tuple[int, int], Bucket] = {}
        self._num_parameters = model.weights.num_parameters
        self._loops: dict[tuple[int, int, int, Mode], DraftLoop] = {}
        self._first_logits = model.weights.embedding.new_empty(0, dtype=torch.float32)  # of drafts
        self._captures = model.weights.embedding.is_cuda
        self._pool: Pool | None = torch.cuda.graph_pool_handle() if self._captures else None

    @property
    def num_captured(self) -> int:
        buckets = [*self._buckets.values(), *self._readings.values()]
        return len(buckets) + len(self._loops) + sum(bucket.num_draws for bucket in buckets)

    def loop(self, num_rows: int, width: int, depth: int, mode: Mode) -> DraftLoop:
        """A draft model's steps for rows that bring up to `width` tokens; width 0: for logits that are there."""
        rows = next((size for size in ROW_BUCKETS if size >= num_rows), None) if self._captures else None
        if rows is None:  # more than any graph has
            return self._new_loop(num_rows, width, depth, mode, None)
        key = (rows, width, depth, mode)
        if key not in self._loops:
            self._loops[key] = self._new_loop(*key, self._pool)
        return self._loops[key]

    def _new_loop(self, rows: int, width: int, depth: int, mode: Mode, pool: Pool | None) -> DraftLoop:
        logits = None if width else self.first_logits(rows)
        return DraftLoop(self._model, self._caches, rows, width, depth, self._table_width, mode, pool, logits)

    def first_logits(self, num_rows: int) -> Tensor:
        """Where loops of width 0 find what to begin with; one place for all, made once."""
        if len(self._first_logits) < num_rows:
            most = max(num_rows, ROW_BUCKETS[-1] if self._captures else 0)
            self._first_logits = self._first_logits.new_zeros((most, self._model.config.vocab_size))
        return self._first_logits[:num_rows]

    def is_prepared(self, plan: StepPlan, mode: Mode) -> bool:
        """Whether nothing has to be captured for it; what is never captured always is."""
        size = find_bucket(len(plan.rows), max(len(row.tokens) for row in plan.rows))
        if not self._captures:
            return True
        return size is not None and size in self._buckets and self._buckets[size].has_draws(mode)

    def find(self, plan: StepPlan) -> Bucket | None:
        """The smallest bucket the plan fits in, made on first use; None where none would pay."""
        longest = max(len(row.tokens) for row in plan.rows)
        if not self._captures:  # nothing to be gained by padding, or by keeping what is seldom seen again
            size = (len(plan.rows), 1) if longest == 1 else None
        else:
            size = find_bucket(len(plan.rows), longest)
            if size is None:
                return self._find_reading(plan, longest)
        if size is None:
            return None
        if size not in self._buckets:
            num_tokens = size[0] * size[1]
            shape = StepShape(num_tokens, size[0], num_tokens, size[1], self._table_width)
            self._buckets[size] = Bucket(self._model, self._caches, shape, self._pool)
        return self._buckets[size]

    def _find_reading(self, plan: StepPlan, longest: int) -> Bucket | None:
        """For a plan that wants no logits but those of rows' last tokens."""
        size = find_read_bucket(len(plan.rows), plan.num_tokens)
        if size is None or longest > MAX_READ_ROW or any(row.num_logits > 1 for row in plan.rows):
            return None
        rows, tokens = size
        if 2 * tokens * self._num_parameters > _LAUNCH_BOUND:
            return None
        if size not in self._readings:
            shape = StepShape(tokens, rows, rows, min(tokens, MAX_READ_ROW), self._table_width, is_packed=True)
            self._readings[size] = Bucket(self._model, self._caches, shape, self._pool)
        return self._readings[size]


def find_bucket(num_rows: int, row_tokens: int) -> tuple[int, int] | None:
    """(rows, tokens per row). A step of few long rows and many short ones is not padded: that would multiply it."""
    rows = next((size for size in ROW_BUCKETS if size >= num_rows), None)
    tokens = next((size for size in TOKEN_BUCKETS if size >= row_tokens), None)
    if rows is None or tokens is None or rows * tokens > MAX_TOKENS:
        return None
    return rows, tokens


def find_read_bucket(num_rows: int, num_tokens: int) -> tuple[int, int] | None:
    """(rows, tokens in all)."""
    rows = next((size for size in READ_BUCKETS if size >= num_rows), None)
    tokens = None if rows is None else next((size for size in READ_BUCKETS[rows] if size >= num_tokens), None)
    return None if rows is None or tokens is None else (rows, tokens)


def num_captured_tokens(max_rows: int) -> int:
    """Of all buckets that so many rows can ever meet: each keeps logits of its own for every one."""
    most = next((size for size in ROW_BUCKETS if size >= max_rows), ROW_BUCKETS[-1])
    sizes = [rows * tokens for rows in ROW_BUCKETS if rows <= most for tokens in TOKEN_BUCKETS]
    most_read = next((size for size in READ_BUCKETS if size >= max_rows), max(READ_BUCKETS))
    read = sum(rows * len(tokens) for rows, tokens in READ_BUCKETS.items() if rows <= most_read)
    return sum(size for size in sizes if size <= MAX_TOKENS) + read

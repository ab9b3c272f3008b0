"""Steps of fixed shapes, one per bucket of rows and tokens per row. On a GPU each is captured once as a CUDA graph.

A step of a large model is two hundred kernels of a few microseconds each; launching them one by one from Python takes
longer than running them. A bucket's tensors have fixed addresses and sizes: a plan is written into its buffer, padded
if it has fewer or shorter rows, and the whole step is one launch. A bucket of one token per row can also continue
without the host: it feeds the token just drawn. Rows of very different lengths are packed one after the other, not
padded, so that a step costs no more than its tokens. All buckets write their logits into one tensor: the logits of a
step are valid until the next step, of whatever shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.backends.torch.execution.capturing import Pool, captured
from outpace.backends.torch.execution.drafting import DraftLoop, DraftModel, LoopModel
from outpace.backends.torch.execution.step import DRAFTED, PADDING, Advance, HostStep, StepInputs, StepShape, views
from outpace.backends.torch.kernels.base import Cache
from outpace.backends.torch.model.model import Model
from outpace.backends.torch.sampling.draws import Draws, Mode, mode_for
from outpace.backends.torch.sampling.independent import draws_independently, max_kept
from outpace.backends.torch.sampling.rejection import RejectionPass
from outpace.core import Request, StepPlan

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
TOKEN_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 17)  # per row; 17 is a draft of 16 and the token before it
# Packed rows: tokens in total.
PACKED_TOKENS = (8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 768, 1024)
PACKED_ROW_TOKENS = (8, TOKEN_BUCKETS[-1])  # of the longest packed row
_DENSE = 0.8  # rows are packed if that takes at most this share of the padded tokens
# Steps that prefill, with or without decoding rows: tokens in total, by number of rows.
PREFILL_BUCKETS = {
    1: (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
    8: (64, 128, 256, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 3584, 4096),
    32: (128, 256, 512, 1024, 1536, 2048, 2560, 3072, 3584, 4096),
    128: (256, 512, 1024, 1536, 2048, 2560, 3072, 3584, 4096),
    512: (512, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096),
}
MAX_PREFILL_ROW = 1024  # tokens of one row in such a step
_LAUNCH_BOUND = 1.6e13  # operations per step; above this, computing takes longer than launching
LARGEST_BUCKET = (ROW_BUCKETS[-1], 16)  # (rows, tokens per row), without drafts of 16; MAX_TOKENS forbids both at once
MAX_TOKENS = 1024  # in a bucket; larger steps keep the GPU busy without a graph
_WARM_UPS = 2  # runs before a capture, to compile kernels and allocate library workspaces


@dataclass(slots=True)
class Captures:
    """Counts graphs of all kinds."""

    num: int = 0


class Bucket:
    """A step whose tensors have fixed addresses. Fill `host`, then launch; then draw from its logits, or fetch them."""

    def __init__(
        self,
        model: Model,
        caches: list[Cache],
        shape: StepShape,
        pool: Pool | None,
        captures: Captures,
        room: Tensor,
    ) -> None:
        """`room` [num_outputs, vocab] receives the logits; buckets share it."""
        device = model.weights.embedding.device
        self._model, self._caches, self._pool, self._captures = model, caches, pool, captures
        captures.num += 1
        self.host = HostStep(shape, pinned=pool is not None)
        self.host.positions.fill(PADDING)
        self.step = views(self.host.buffer.to(device), shape)
        self._tables = [torch.zeros_like(self.step.tables, device="cpu", pin_memory=pool is not None) for _ in range(2)]
        # A step that verifies drafts first copies the host's words and the drafts on the device. A step that continues
        # without the host must not, and a prefill takes so long that a separate copy does not matter.
        verifies = shape.max_row_tokens > 1 and shape.num_outputs == shape.num_tokens
        depth = shape.max_row_tokens - 1
        self._drafted = torch.zeros((depth, shape.num_rows), dtype=torch.int32, device=device) if verifies else None
        self._draws: dict[Mode, Draws] = {}
        self._rejections: dict[tuple[Mode, int, int, bool], RejectionPass] = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        self.logits = room  # valid once the stream has run the graph
        if pool is not None:
            self._capture(pool, device)

    def _capture(self, pool: Pool, device: torch.device) -> None:
        self._graph, _ = captured(self._run, pool, device, _WARM_UPS)

    def _run(self) -> None:
        if self._drafted is not None:
            load_step(self.host.buffer, self.step, self._drafted, self._model.config.vocab_size - 1)
        self._model.forward(self.step, self._caches, self.logits)

    def launch(self, drafted: Tensor | None = None) -> None:
        """Start the step in `host`; `drafted` [depth, rows] on the device replaces its tokens that are DRAFTED."""
        if self._drafted is None:
            self.step.words.copy_(self.host.buffer, non_blocking=True)
        elif drafted is not None:
            depth = min(len(drafted), len(self._drafted))  # a loop may draft more than is verified
            self._drafted[:depth, : drafted.shape[1]].copy_(drafted[:depth])
        self.replay()

    def replay(self) -> None:
        """Start the step with the words on the device."""
        if self._graph is not None:
            self._model.replaying(self.step)
            self._graph.replay()
        else:
            self._run()

    def change_tables(self, changed: Mapping[int, Sequence[int]]) -> None:
        """Change the pages of some rows for the next launch; an earlier copy may still be running."""
        for row, pages in changed.items():
            self.host.tables[row, : len(pages)] = pages
        self._tables.reverse()  # the device may still read the other one
        self._tables[0].numpy()[:] = self.host.tables
        self.step.tables.copy_(self._tables[0], non_blocking=True)

    def lines(self, num_logits: int) -> tuple[NDArray[np.integer], Tensor]:
        """Indexes of the requested logits, in order, on the host and on the device."""
        if self.step.shape.num_outputs < self.step.shape.num_tokens:  # only requested logits are computed
            return np.arange(num_logits), torch.arange(num_logits, device=self.logits.device)
        return self.host.outputs[:num_logits].copy(), self.step.outputs[:num_logits]

    def has_draws(self, mode: Mode) -> bool:
        return mode in self._draws

    def draws(self, mode: Mode) -> Draws:
        if mode not in self._draws:
            advance = Advance(self.step) if self.host.shape.max_row_tokens == 1 else None
            self._draws[mode] = Draws(self.logits, mode, self._pool, advance)
            self._captures.num += 1
        return self._draws[mode]

    def rejection(self, draws: Draws, kept: Tensor, *, mixes_rules: bool) -> RejectionPass:
        """Verifies drafts with the distributions `kept` [rows, depth, vocab], whose address is fixed."""
        key = (draws.mode, kept.shape[0], kept.shape[1], mixes_rules)
        if key not in self._rejections:
            self._rejections[key] = RejectionPass(draws, kept, mixes_rules=mixes_rules, pool=self._pool)
            self._captures.num += 1
        return self._rejections[key]


def load_step(host: Tensor, step: StepInputs, drafted: Tensor, most: int) -> None:
    """Copy a step's words from the host; tokens that are DRAFTED come from `drafted` [depth, rows].

    Unused rows may hold invalid tokens, so tokens are clamped to `most`.
    """
    if step.words.is_cuda:
        from outpace.backends.torch.kernels import step_loading

        step_loading.load_step(host, step, drafted, most)
        return
    step.words.copy_(host)
    rows = step.token_rows.long()
    places = torch.arange(len(rows)) - 1 - step.begins[rows]
    is_there = (places >= 0) & (places < len(drafted))  # others are leftovers of an earlier step, in gaps
    tokens = torch.where(is_there, drafted[places.clamp(0, len(drafted) - 1), rows].clamp(max=most), 0)
    step.tokens.copy_(torch.where(step.tokens == DRAFTED, tokens, step.tokens))


class DraftLoops:
    """Draft loops by rows, tokens fed first, depth, mode and whether they keep probs; captured on first use."""

    def __init__(
        self,
        make: Callable[[int], LoopModel],
        vocab_size: int,
        table_width: int,
        pool: Pool | None,
        captures: Captures,
        max_rows: int,
    ) -> None:
        self._make = make
        self._vocab_size = vocab_size
        self._table_width = table_width
        self._pool = pool
        self._made = captures
        self._most_rows = row_bucket(max_rows)
        self._most_kept = max_kept(max_rows)  # distributions of one draft of all rows, if drawn independently
        self._loops: dict[tuple[int, int, int, Mode, bool], DraftLoop] = {}
        self._first_logits: Tensor | None = None
        self._probs: Tensor | None = None
        self._kept: Tensor | None = None

    def find(self, requests: Sequence[Request], width: int, depth: int, *, may_keep_probs: bool = True) -> DraftLoop:
        """The loop for rows that feed up to `width` tokens; width 0 starts from `first_logits`."""
        is_captured, key = self._key(requests, width, depth, may_keep_probs)
        if not is_captured:
            return self._new(*key, None)
        if key not in self._loops:
            self._loops[key] = self._new(*key, self._pool)
            self._made.num += 1
        return self._loops[key]

    def is_prepared(self, requests: Sequence[Request], width: int, depth: int) -> bool:
        """Whether `find` needs no new capture; always true without graphs."""
        is_captured, key = self._key(requests, width, depth, may_keep_probs=True)
        return not is_captured or key in self._loops

    def _key(
        self, requests: Sequence[Request], width: int, depth: int, may_keep_probs: bool
    ) -> tuple[bool, tuple[int, int, int, Mode, bool]]:
        """Whether such a loop is captured: not if it has more rows than any graph; and what distinguishes it."""
        num_rows = len(requests)
        rows = next((size for size in ROW_BUCKETS if size >= num_rows), None) if self._pool is not None else None
        fits = (rows or num_rows) * depth <= self._most_kept
        keeps_probs = may_keep_probs and fits and draws_independently(requests)
        mode: Mode = "greedy" if all(request.params.is_greedy for request in requests) else "sampled"
        if keeps_probs:
            mode = mode_for(requests)
        return rows is not None, (rows or num_rows, width, depth, mode, keeps_probs)

    def _new(
        self, rows: int, width: int, depth: int, mode: Mode, keeps_probs: bool, pool: Pool | None
    ) -> DraftLoop:  # fmt: skip
        model = self._make(rows)
        logits = None if width else self.first_logits(rows, model.device)
        probs = kept = None
        if keeps_probs:  # one tensor for all loops
            if self._probs is None or self._kept is None:
                self._probs = torch.zeros((self._most_kept, self._vocab_size), device=model.device)
                self._kept = torch.zeros_like(self._probs)
            probs, kept = (each[: rows * depth].view(rows, depth, -1) for each in (self._probs, self._kept))
        return DraftLoop(model, rows, width, depth, self._table_width, mode, pool, logits, probs, kept)

    def first_logits(self, num_rows: int, device: torch.device) -> Tensor:
        """The logits that loops of width 0 start from; one tensor for all loops."""
        if self._first_logits is None or len(self._first_logits) < num_rows:
            most = max(num_rows, self._most_rows if self._pool is not None else 0)
            self._first_logits = torch.zeros((most, self._vocab_size), device=device)
        return self._first_logits[:num_rows]


class Graphs:
    def __init__(self, model: Model, caches: list[Cache], table_width: int, max_rows: int) -> None:
        self._model = model
        self._caches = caches
        self.table_width = table_width
        self._max_rows = max_rows
        self.captures = Captures()
        self._buckets: dict[StepShape, Bucket] = {}
        self._prefill_buckets: dict[StepShape, Bucket] = {}
        self._num_parameters = model.weights.num_parameters
        self._logits: Tensor | None = None  # of all buckets
        self._captures = model.weights.embedding.is_cuda
        self.pool: Pool | None = torch.cuda.graph_pool_handle() if self._captures else None
        self.loops = self.loops_of(lambda _: DraftModel(model, caches))  # with this model as the draft

    def loops_of(self, make: Callable[[int], LoopModel]) -> DraftLoops:
        """Draft loops in the same memory pool; `make(rows)` makes what one runs."""
        vocab_size = self._model.config.vocab_size
        return DraftLoops(make, vocab_size, self.table_width, self.pool, self.captures, self._max_rows)

    @property
    def num_captured(self) -> int:
        return self.captures.num

    def is_prepared(self, plan: StepPlan, mode: Mode) -> bool:
        """Whether the plan runs without a new capture; always true without graphs."""
        if not self._captures:
            return True
        shape = self._shape(plan, mode == "peaks")
        return shape is not None and shape in self._buckets and self._buckets[shape].has_draws(mode)

    def find(self, plan: StepPlan, *, gives_peaks: bool) -> Bucket | None:
        """The smallest bucket the plan fits in, made on first use; None if a bucket would not pay."""
        longest = max(len(row.tokens) for row in plan.rows)
        if self._captures:
            shape = self._shape(plan, gives_peaks)
            if shape is None:
                return self._find_prefill(plan, longest, gives_peaks)
        elif longest == 1:
            num_rows = len(plan.rows)
            shape = StepShape(num_rows, num_rows, num_rows, 1, self.table_width, gives_peaks=gives_peaks)
        else:  # without graphs, padding gains nothing, and such shapes seldom repeat
            return None
        if shape not in self._buckets:
            self._buckets[shape] = self._new_bucket(shape)
        return self._buckets[shape]

    def _shape(self, plan: StepPlan, gives_peaks: bool) -> StepShape | None:
        """The shape of a step that may verify drafts: padded to one row length, or packed if that is much smaller."""
        num_rows, longest = len(plan.rows), max(len(row.tokens) for row in plan.rows)
        padded, packed = find_bucket(num_rows, longest), find_packed_bucket(num_rows, longest, plan.num_tokens)
        if packed is not None and (padded is None or packed[1] <= _DENSE * padded[0] * padded[1]):
            rows, num_tokens, row_tokens = packed
            return StepShape(
                num_tokens, rows, num_tokens, row_tokens, self.table_width, is_packed=True, gives_peaks=gives_peaks,
                has_trees=has_trees(plan),
            )  # fmt: skip
        if padded is None:
            return None
        num_tokens = padded[0] * padded[1]
        return StepShape(
            num_tokens, padded[0], num_tokens, padded[1], self.table_width, gives_peaks=gives_peaks,
            has_trees=has_trees(plan),
        )  # fmt: skip

    def _new_bucket(self, shape: StepShape) -> Bucket:
        device = self._model.weights.embedding.device
        if shape.gives_peaks:
            room = torch.empty((shape.num_outputs, self._model.num_columns(shape)), device=device)
        else:
            if self._logits is None:
                most = num_captured_tokens(self._max_rows) if self._captures else self._max_rows
                self._logits = torch.empty((most, self._model.config.vocab_size), device=device)
            room = self._logits[: shape.num_outputs]
        return Bucket(self._model, self._caches, shape, self.pool, self.captures, room)

    def _find_prefill(self, plan: StepPlan, longest: int, gives_peaks: bool) -> Bucket | None:
        """The bucket for a plan that needs only the logits of each row's last token."""
        size = find_prefill_bucket(len(plan.rows), plan.num_tokens)
        if size is None or longest > MAX_PREFILL_ROW or any(row.num_logits > 1 for row in plan.rows):
            return None
        rows, tokens = size
        if 2 * tokens * self._num_parameters > _LAUNCH_BOUND:
            return None
        longest = min(tokens, MAX_PREFILL_ROW)
        shape = StepShape(tokens, rows, rows, longest, self.table_width, is_packed=True, gives_peaks=gives_peaks)
        if shape not in self._prefill_buckets:
            self._prefill_buckets[shape] = self._new_bucket(shape)
        return self._prefill_buckets[shape]


def has_trees(plan: StepPlan) -> bool:
    return any(row.tree is not None for row in plan.rows)


def find_bucket(num_rows: int, row_tokens: int) -> tuple[int, int] | None:
    """(rows, tokens per row). Large results are refused: padding many short rows to a long one costs too much."""
    rows = next((size for size in ROW_BUCKETS if size >= num_rows), None)
    tokens = next((size for size in TOKEN_BUCKETS if size >= row_tokens), None)
    if rows is None or tokens is None or rows * tokens > MAX_TOKENS:
        return None
    return rows, tokens


def find_packed_bucket(num_rows: int, longest: int, num_tokens: int) -> tuple[int, int, int] | None:
    """(rows, tokens in total, most tokens of one row), for rows of which at least one has several tokens."""
    rows = next((size for size in ROW_BUCKETS if size >= num_rows), None)
    tokens = next((size for size in PACKED_TOKENS if size >= num_tokens), None)
    row_tokens = next((size for size in PACKED_ROW_TOKENS if size >= longest), None)
    if longest == 1 or rows is None or tokens is None or row_tokens is None:
        return None
    return rows, tokens, row_tokens


def row_bucket(max_rows: int) -> int:
    """The rows of the largest bucket that `max_rows` rows can use."""
    return next((size for size in ROW_BUCKETS if size >= max_rows), ROW_BUCKETS[-1])


def find_prefill_bucket(num_rows: int, num_tokens: int) -> tuple[int, int] | None:
    """(rows, tokens in total)."""
    rows = next((size for size in PREFILL_BUCKETS if size >= num_rows), None)
    tokens = None if rows is None else next((size for size in PREFILL_BUCKETS[rows] if size >= num_tokens), None)
    return None if rows is None or tokens is None else (rows, tokens)


def num_captured_tokens(max_rows: int) -> int:
    """Rows of logits of the largest bucket that `max_rows` rows can use: a packed one."""
    most = row_bucket(max_rows) * TOKEN_BUCKETS[-1]
    return next((size for size in PACKED_TOKENS if size >= most), PACKED_TOKENS[-1])

"""Drafts `depth` tokens per row with a draft model on the device, without the host between steps.

The first step feeds the tokens that the draft cache lacks: one per row, or two if the last draft was fully accepted.
Later steps feed the token just drawn. All steps and draws are captured. A row that is further behind is first prefilled
by an ordinary step, and drawing starts from its logits.

Tokens are drawn with the target's own noise and verified by `acceptance.match`, which compares them with the target's
tokens, so no draft probabilities are kept; such a draft ignores filters and penalties, which verification applies. Or,
if no request of the batch needs that noise, they are drawn independently and their distributions are kept on the device
(`sampling/independent.py`).

A loop may also begin before the host knows the tokens it feeds: see `following.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.backends.base import DraftedTokens, DraftTask
from outpace.backends.torch.execution import following, staging
from outpace.backends.torch.execution.capturing import Pool, captured
from outpace.backends.torch.execution.following import Verified
from outpace.backends.torch.execution.step import ALIGNMENT, PADDING, Advance, HostStep, StepInputs, StepShape, views
from outpace.backends.torch.kernels.base import Cache
from outpace.backends.torch.model.model import Model
from outpace.backends.torch.sampling.draws import NUM_FIELDS, DrawWords, Mode, draw_rows
from outpace.backends.torch.sampling.independent import DeviceProbs, draft_seed
from outpace.core import Row

WIDTHS = (1, 2)  # tokens per row that a loop feeds in its first step; a loop of width 0 starts from logits


class LoopModel(Protocol):
    """What a loop runs: a draft model, or a draft head."""

    device: torch.device

    @property
    def columns(self) -> Tensor | None:
        """The only tokens that it drafts; None: all."""
        ...

    def begin(self, step: StepInputs) -> Tensor:
        """Logits of the requested tokens, [rows, vocab], after the tokens that the cache lacks."""
        ...

    def go_on(self, step: StepInputs) -> Tensor:
        """The same after one more token per row."""
        ...


class DraftModel:
    def __init__(self, model: Model, caches: list[Cache]) -> None:
        self._model, self._caches = model, caches
        self.device = model.weights.embedding.device
        self.columns = None

    def begin(self, step: StepInputs) -> Tensor:
        return self._model.forward(step, self._caches)

    go_on = begin


class _HostWords:
    """The words of a loop on the host, and where its results arrive."""

    def __init__(self, first: StepShape | None, later: StepShape, depth: int, *, pinned: bool) -> None:
        rows = later.num_rows
        num_words = sum(map(_aligned, _sizes(first, later)))
        self.buffer = torch.zeros(num_words, dtype=torch.int32, pin_memory=pinned)
        first_words, later_words, draw_words, left, lines = _parts(self.buffer, first, later)
        self.first = HostStep(first, pinned=pinned, buffer=first_words) if first is not None else None
        self.later = HostStep(later, pinned=pinned, buffer=later_words)
        self.draws = DrawWords(rows, pinned=pinned, buffer=draw_words.view(torch.int64).view(NUM_FIELDS, -1))
        self.left: NDArray[np.int32] = left.numpy()
        self.lines: NDArray[np.int32] = lines.view(2, -1).numpy()
        numbers = np.arange(rows)
        self.later.token_rows[:], self.later.begins[:], self.later.outputs[:] = numbers, numbers, numbers
        if self.first is not None:
            self.first.positions.fill(PADDING)
        self.clear()
        self.drawn = torch.zeros((depth, 2, rows), dtype=torch.int32, pin_memory=pinned)
        self.fed = torch.zeros((2, rows), dtype=torch.int32, pin_memory=pinned)
        self.drawn_arrived: Any = torch.cuda.Event(enable_timing=True) if pinned else None
        self.fed_arrived: Any = torch.cuda.Event(enable_timing=True) if pinned else None

    def clear(self) -> None:
        """Mark all rows as unused after the first step."""
        self.later.positions.fill(PADDING)
        self.later.lengths.fill(0)
        self.left.fill(0)
        self.lines[1].fill(following.UNUSED)


def _sizes(first: StepShape | None, later: StepShape) -> list[int]:
    """Of the parts of a loop's words: the first step, the later ones, the draws, the tokens left to draw, and the lines
    that a loop follows."""
    rows = later.num_rows
    return [first.num_words if first is not None else 0, later.num_words, 2 * NUM_FIELDS * rows, rows, 2 * rows]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _parts(words: Tensor, first: StepShape | None, later: StepShape) -> list[Tensor]:
    """The parts, which are one buffer, so one transfer."""
    sizes = _sizes(first, later)
    return [part[:size] for part, size in zip(words.split([*map(_aligned, sizes)]), sizes, strict=True)]


class _Fed(Protocol):
    """Where arrives what a loop fed, and when."""

    fed: Tensor
    fed_arrived: Any


@dataclass(frozen=True, slots=True)
class Run:
    """A launched loop. Its tokens are on the device until the loop's next run, and on the host until the one after."""

    _host: _Fed
    rows: list[int]  # of the loop: those that are used, in any order

    def only(self, rows: list[int]) -> Self:
        """Some rows of it."""
        return replace(self, rows=[self.rows[row] for row in rows])

    def columns(self, drawn: Tensor) -> Tensor:
        """Of what was drawn on the device, its rows in their order."""
        if self.rows == list(range(len(self.rows))):
            return drawn[:, : len(self.rows)]
        return drawn[:, torch.tensor(self.rows).to(drawn.device, non_blocking=True)]

    def fed(self) -> NDArray[np.int32]:
        """What a loop that followed a verification fed, [2, rows]: draft tokens before the last one, and that one."""
        if self._host.fed_arrived is not None:
            self._host.fed_arrived.synchronize()
        found: NDArray[np.int32] = self._host.fed.numpy()
        return found[:, self.rows]


@dataclass(frozen=True, slots=True)
class LoopRun(Run):
    _host: _HostWords
    loop: DraftLoop

    def tokens(self) -> Tensor:
        """[depth, rows], on the device."""
        return self.columns(self.loop.drawn[:, 0])

    def seconds_behind(self) -> float:
        """How long the device drafted, once that is done, for a loop that followed a verification."""
        if self._host.drawn_arrived is None:
            return 0.0
        return 1e-3 * float(self._host.fed_arrived.elapsed_time(self._host.drawn_arrived))

    def fetch(self, tasks: Sequence[DraftTask]) -> list[DraftedTokens]:
        """The drafts of the tasks; waits for them."""
        if self._host.drawn_arrived is not None:
            self._host.drawn_arrived.synchronize()
        found: NDArray[np.int32] = self._host.drawn.numpy()[:, :, self.rows]
        columns = found[:, 0].T.tolist()
        kept = self.loop.kept
        if kept is None:
            return [DraftedTokens(columns[i][: task.depth], []) for i, task in enumerate(tasks)]
        # A draft ends before a distribution that is not exactly known: that does not depend on the drawn token.
        known = (found[:, 1] != 0).cumprod(axis=0).sum(axis=0).tolist()
        depths = [min(task.depth, known[i]) for i, task in enumerate(tasks)]
        return [
            DraftedTokens(columns[i][:depth], [], DeviceProbs(kept, row, depth))
            for i, (row, depth) in enumerate(zip(self.rows, depths, strict=True))
        ]


class DraftLoop:
    """Draws up to `depth` tokens per row; a row may want fewer."""

    def __init__(
        self,
        model: LoopModel,
        num_rows: int,
        width: int,
        depth: int,
        table_width: int,
        mode: Mode,
        pool: Pool | None,
        logits: Tensor | None,
        probs: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> None:
        """`logits` [rows, vocab]: the start of a loop of width 0. `probs` [rows, depth, vocab] receives what the tokens
        are drawn from, if they are drawn independently of the target (`sampling/independent.py`), and `kept` what of
        that is being verified while the loop may run again."""
        device = model.device
        self.model, self._mode, self._depth, self._width = model, mode, depth, width
        self._logits = logits
        self._probs, self.kept = probs, kept
        first = StepShape(num_rows * width, num_rows, num_rows, width, table_width) if width else None
        later = StepShape(num_rows, num_rows, num_rows, 1, table_width)
        # Two, because the loop may run again before the host has read what it drew.
        self._hosts = [_HostWords(first, later, depth, pinned=device.type == "cuda") for _ in range(2)]
        self._words = self._hosts[0].buffer.to(device)
        first_words, later_words, draw_words, self._device_left, lines = _parts(self._words, first, later)
        self._first_step = views(first_words, first) if first is not None else None
        self._step = views(later_words, later)
        self._draw_words = draw_words.view(torch.int64).view(NUM_FIELDS, -1)
        self._lines = lines.view(2, -1)
        self.drawn = torch.zeros((depth, 2, num_rows), dtype=torch.int32, device=device)
        self._num_used = 0  # rows, of the latest fill
        self._fed = torch.zeros((2, num_rows), dtype=torch.int32, device=device)
        # Two graphs, first token and later tokens: the device starts while the host launches the second.
        self._graphs: list[torch.cuda.CUDAGraph] = []
        if pool is not None:
            for run in (self._run_first, self._run_others)[: 1 if depth == 1 else 2]:
                self._graphs.append(captured(run, pool, device)[0])

    def fill(self, tasks: Sequence[DraftTask], tables: NDArray[np.int32]) -> None:
        """Pages for fed and drafted tokens are reserved; `tables` holds the pages of every sequence."""
        self._fill(tasks, tables, None if self._probs is None else [draft_seed(task.request) for task in tasks])

    def fill_following(self, tasks: Sequence[DraftTask], tables: NDArray[np.int32], verified: Verified) -> None:
        """The same, where the device will know which tokens are fed: those that `verified` accepts.

        Tasks have the rows of the step that verifies: the token at their end is the first that may be accepted.
        """
        rows = [Row(task.row.seq, len(task.request.tokens), [0] * self._width, 1) for task in tasks]
        tasks = [DraftTask(row, task.request, self._depth) for row, task in zip(rows, tasks, strict=True)]
        self._fill(tasks, tables, None)  # the seeds of independent draws depend on where a draft begins
        self._hosts[0].lines[:, : len(tasks)] = verified.first_lines, verified.counts

    def _fill(self, tasks: Sequence[DraftTask], tables: NDArray[np.int32], seeds: list[int] | None) -> None:
        self._hosts.reverse()  # the device may still read the other one
        host, self._num_used = self._hosts[0], len(tasks)
        host.clear()
        rows, requests = [task.row for task in tasks], [task.request for task in tasks]
        used, later = slice(0, len(rows)), host.later
        if host.first is not None:
            staging.fill(host.first, rows, tables)
        ends = np.array([row.start + len(row.tokens) for row in rows])
        later.positions[used], later.contexts[used], later.lengths[used] = ends - 1, ends, 1  # drawing advances it
        tables.take([row.seq for row in rows], axis=0, out=later.tables[used], mode="clip")
        host.left[used] = [task.depth for task in tasks]
        host.draws.fill(used, requests, [len(request.tokens) for request in requests], seeds)

    @torch.inference_mode()
    def launch(self, verified: Verified | None = None) -> LoopRun:
        """Start the filled loop; after `fill_following`, behind the verification whose result it follows."""
        host = self._hosts[0]
        self._words.copy_(host.buffer, non_blocking=True)
        if verified is not None:
            assert self._first_step is not None
            following.follow(
                verified, self._lines, self._first_step, self._step, self._draw_words, self._fed,
                is_independent=self._probs is not None,
            )  # fmt: skip
            host.fed.copy_(self._fed, non_blocking=True)
            if host.fed_arrived is not None:
                host.fed_arrived.record()
        for graph in self._graphs:
            graph.replay()
        if not self._graphs:
            self._run_first()
            self._run_others()
        host.drawn.copy_(self.drawn, non_blocking=True)
        if host.drawn_arrived is not None:
            host.drawn_arrived.record()
        return LoopRun(host, list(range(self._num_used)), self)

    def keep(self) -> None:
        """Keep the distributions of the latest run for its verification: the next run may begin before that ends."""
        if self._probs is not None and self.kept is not None:
            self.kept.copy_(self._probs)

    @torch.inference_mode()
    def _run_first(self) -> None:
        if self._first_step is not None:
            self._draw(0, self.model.begin(self._first_step))
        else:
            assert self._logits is not None
            self._draw(0, self._logits)

    @torch.inference_mode()
    def _run_others(self) -> None:
        for i in range(1, self._depth):
            self._draw(i, self.model.go_on(self._step))

    def _draw(self, i: int, logits: Tensor) -> None:
        advance = Advance(self._step, self._device_left)
        probs = None if self._probs is None else self._probs[:, i]
        draw_rows(logits, self._draw_words, self._mode, advance, self.drawn[i], probs, self.model.columns)

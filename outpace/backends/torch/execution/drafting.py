"""Drafts `depth` tokens per row with a draft model on the device, without the host between steps.

The first step feeds the tokens that the draft cache lacks: one per row, or two if the last draft was fully accepted.
Later steps feed the token just drawn. All steps and draws are captured. A row that is further behind is first prefilled
by an ordinary step, and drawing starts from its logits.

Tokens are drawn with the target's own noise and verified by `acceptance.match`, which compares them with the target's
tokens, so no draft probabilities are kept; such a draft ignores filters and penalties, which verification applies. Or,
if no request of the batch needs that noise, they are drawn independently and their distributions are kept on the device
(`sampling/independent.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.backends.base import DraftedTokens, DraftTask
from outpace.backends.torch.execution import staging
from outpace.backends.torch.execution.step import ALIGNMENT, PADDING, Advance, HostStep, StepInputs, StepShape, views
from outpace.backends.torch.kernels.base import Cache
from outpace.backends.torch.model.model import Model
from outpace.backends.torch.sampling.draws import NUM_FIELDS, DrawWords, Mode, Pool, draw_rows
from outpace.backends.torch.sampling.independent import DeviceProbs, draft_seed

WIDTHS = (1, 2)  # tokens per row that a loop feeds in its first step; a loop of width 0 starts from logits


class LoopModel(Protocol):
    """What a loop runs: a draft model, or a draft head."""

    device: torch.device

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

    def begin(self, step: StepInputs) -> Tensor:
        return self._model.forward(step, self._caches)

    go_on = begin


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
    ) -> None:
        """`logits` [rows, vocab]: the start of a loop of width 0. `probs` [rows, depth, vocab] receives what the tokens
        are drawn from, if they are drawn independently of the target (`sampling/independent.py`)."""
        device = model.device
        on_gpu = device.type == "cuda"
        self.model, self._mode, self._depth = model, mode, depth
        self._logits = logits
        self.probs = probs
        first = StepShape(num_rows * width, num_rows, num_rows, width, table_width)
        later = StepShape(num_rows, num_rows, num_rows, 1, table_width)
        # One buffer, so one transfer.
        sizes = [first.num_words if width else 0, later.num_words, 2 * NUM_FIELDS * num_rows, num_rows]
        ends = np.cumsum([-(-size // ALIGNMENT) * ALIGNMENT for size in sizes])
        places = [slice(end - -(-size // ALIGNMENT) * ALIGNMENT, None) for size, end in zip(sizes, ends, strict=True)]
        self._host_words = torch.zeros(int(ends[-1]), dtype=torch.int32, pin_memory=on_gpu)
        self._words = torch.zeros(int(ends[-1]), dtype=torch.int32, device=device)

        def parts(words: Tensor) -> list[Tensor]:
            return [words[place][:size] for place, size in zip(places, sizes, strict=True)]

        first_words, later_words, draw_words, left = parts(self._host_words)
        self._first = HostStep(first, pinned=on_gpu, buffer=first_words) if width else None
        self._later = HostStep(later, pinned=on_gpu, buffer=later_words)
        self._draws = DrawWords(num_rows, pinned=on_gpu, buffer=draw_words.view(torch.int64).view(NUM_FIELDS, -1))
        self._left: NDArray[np.int32] = left.numpy()
        rows = np.arange(num_rows)
        self._later.token_rows[:], self._later.begins[:], self._later.outputs[:] = rows, rows, rows
        if self._first is not None:
            self._first.positions.fill(PADDING)
        self._clear()
        first_words, later_words, draw_words, self._device_left = parts(self._words)
        self._first_step = views(first_words, first) if width else None
        self._step = views(later_words, later)
        self._draw_words = draw_words.view(torch.int64).view(NUM_FIELDS, -1)
        self.drawn = torch.zeros((depth, 2, num_rows), dtype=torch.int32, device=device)
        self._on_host = torch.zeros((depth, 2, num_rows), dtype=torch.int32, pin_memory=on_gpu)
        self._arrived: Any = torch.cuda.Event() if on_gpu else None
        # Two graphs, first token and later tokens: the device starts while the host launches the second.
        self._graphs: list[torch.cuda.CUDAGraph] = []
        if pool is not None:
            self._words.copy_(self._host_words)
            for run in (self._run_first, self._run_others):
                stream = torch.cuda.Stream(device)
                stream.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(stream):
                    run()
                torch.cuda.current_stream(device).wait_stream(stream)
                self._graphs.append(torch.cuda.CUDAGraph())
                with torch.cuda.graph(self._graphs[-1], pool=pool):
                    run()
                if depth == 1:
                    break

    def _clear(self) -> None:
        """Mark all rows as unused after the first step."""
        self._later.positions.fill(PADDING)
        self._later.lengths.fill(0)
        self._left.fill(0)

    def fill(self, tasks: Sequence[DraftTask], tables: NDArray[np.int32]) -> None:
        """Pages for fed and drafted tokens are reserved; `tables` holds the pages of every sequence."""
        self._clear()
        rows, requests = [task.row for task in tasks], [task.request for task in tasks]
        used, later = slice(0, len(rows)), self._later
        if self._first is not None:
            staging.fill(self._first, rows, tables)
        ends = np.array([row.start + len(row.tokens) for row in rows])
        later.positions[used], later.contexts[used], later.lengths[used] = ends - 1, ends, 1  # drawing advances it
        tables.take([row.seq for row in rows], axis=0, out=later.tables[used], mode="clip")
        self._left[used] = [task.depth for task in tasks]
        seeds = None if self.probs is None else [draft_seed(request) for request in requests]
        self._draws.fill(used, requests, [len(request.tokens) for request in requests], seeds)

    @torch.inference_mode()
    def launch(self) -> None:
        """Start the filled loop."""
        self._words.copy_(self._host_words, non_blocking=True)
        for graph in self._graphs:
            graph.replay()
        if not self._graphs:
            self._run_first()
            self._run_others()
        self._on_host.copy_(self.drawn, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def fetch(self, tasks: Sequence[DraftTask]) -> list[DraftedTokens]:
        """The drafts of the filled tasks; waits for them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: NDArray[np.int32] = self._on_host.numpy()
        columns = found[:, 0].T.tolist()
        if self.probs is None:
            return [DraftedTokens(columns[i][: task.depth], []) for i, task in enumerate(tasks)]
        # A draft ends before a distribution that is not exactly known: that does not depend on the drawn token.
        known = (found[:, 1] != 0).cumprod(axis=0).sum(axis=0).tolist()
        depths = [min(task.depth, known[i]) for i, task in enumerate(tasks)]
        return [
            DraftedTokens(columns[i][:depth], [], DeviceProbs(self.probs, i, depth)) for i, depth in enumerate(depths)
        ]

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
        kept_probs = None if self.probs is None else self.probs[:, i]
        draw_rows(logits, self._draw_words, self._mode, advance, self.drawn[i], kept_probs)

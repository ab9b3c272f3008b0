"""A draft model's tokens one after the other without the host between them: depth steps, drawn on the device.

The first step feeds whatever the draft has not read yet and is an ordinary one; the steps after it feed what was drawn,
one token a row, and are one graph. Tokens are drawn with the target's own noise, to be judged by `acceptance.match`: a
draft that is compared with the target's own token needs no probabilities, so none have to be kept or moved. Filters and
penalties are left out of a draft: what it says is checked anyway.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.backends.torch.draws import DrawWords, Mode, Pool, draw_rows
from outpace.backends.torch.kernels.base import Cache
from outpace.backends.torch.model import Model
from outpace.backends.torch.step import PADDING, HostStep, StepShape, views


class DraftLoop:
    """`num_steps` steps of one token a row; rows may stop earlier."""

    def __init__(
        self,
        model: Model,
        caches: list[Cache],
        num_rows: int,
        num_steps: int,
        table_width: int,
        mode: Mode,
        pool: Pool | None,
    ) -> None:
        device = model.weights.embedding.device
        on_gpu = device.type == "cuda"
        self._model, self._caches, self._mode, self._num_steps = model, caches, mode, num_steps
        self.host = HostStep(StepShape(num_rows, num_rows, num_rows, 1, table_width), pinned=on_gpu)
        self.draws = DrawWords(num_rows, pinned=on_gpu)
        self._depths = torch.zeros(num_rows, dtype=torch.int32, pin_memory=on_gpu)
        self.depths: NDArray[np.int32] = self._depths.numpy()
        self.clear()
        rows = np.arange(num_rows)
        self.host.token_rows[:], self.host.begins[:], self.host.outputs[:] = rows, rows, rows
        self._words = self.host.buffer.to(device)
        self._draw_words = self.draws.buffer.to(device)
        self._device_depths = self._depths.to(device)
        self._step = views(self._words, self.host.shape)
        self._drawn = torch.zeros((num_steps, num_rows), dtype=torch.int32, device=device)
        self._on_host = torch.zeros((num_steps, num_rows), dtype=torch.int32, pin_memory=on_gpu)
        self._graph: torch.cuda.CUDAGraph | None = None
        if pool is not None:
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                self._run()
            torch.cuda.current_stream(device).wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool):
                self._run()

    def clear(self) -> None:
        """No row has anything to do."""
        self.host.positions.fill(PADDING)
        self.host.lengths.fill(0)
        self.depths.fill(0)

    @torch.inference_mode()
    def launch(self, first_tokens: Tensor) -> None:
        """`first_tokens`: on the device, what the steps begin with; of the rows in use."""
        self._words.copy_(self.host.buffer, non_blocking=True)
        self._draw_words.copy_(self.draws.buffer, non_blocking=True)
        self._device_depths.copy_(self._depths, non_blocking=True)
        self._step.tokens[: len(first_tokens)].copy_(first_tokens)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._run()
        self._on_host.copy_(self._drawn, non_blocking=True)

    def fetch(self) -> NDArray[np.int32]:
        """[num_steps, num_rows]; waits for the device."""
        if self._on_host.is_pinned():
            torch.cuda.current_stream().synchronize()
        return self._on_host.numpy()

    @torch.inference_mode()
    def _run(self) -> None:
        step = self._step
        for i in range(self._num_steps):
            tokens = draw_rows(self._model.forward(step, self._caches), self._draw_words, self._mode)[0]
            self._drawn[i].copy_(tokens)
            goes_on = (self._device_depths > i + 2).int()  # of its depth, a row has the first token and i + 1 more
            step.tokens.copy_(tokens * goes_on)  # what rows without a place drew may be no token at all
            step.positions.add_(1).mul_(goes_on).sub_(1 - goes_on)
            step.contexts.add_(goes_on)
            step.lengths.copy_(goes_on)
            self._draw_words[1].add_(1)

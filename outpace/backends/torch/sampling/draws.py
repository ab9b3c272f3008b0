"""Draws tokens from logits on the device and copies them to the host: the one small transfer of a step.

The inputs of a draw (temperature, filters, seed and position) are one buffer of words. The host fills it while the
device computes the logits. Rows are independent; the most demanding row decides which kernels run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.backends.torch.execution.capturing import Pool, captured
from outpace.backends.torch.execution.step import Advance
from outpace.backends.torch.parallel.peaks import tokens_of
from outpace.backends.torch.sampling.filters import RowParams, draw, greedy_tokens, probs
from outpace.backends.torch.sampling.noise import signed
from outpace.config import SamplingParams
from outpace.core import Request

Mode = Literal["greedy", "sampled", "filtered", "peaks"]  # peaks: greedy, from the largest logit of each rank
NUM_FIELDS = 7
_WORDLESS: tuple[Mode, ...] = ("greedy", "peaks")  # these modes draw from logits alone


def mode_for(requests: Iterable[Request]) -> Mode:
    mode: Mode = "greedy"
    for request in requests:
        if is_filtered(request.params):
            return "filtered"
        if not request.params.is_greedy:
            mode = "sampled"
    return mode


def is_filtered(params: SamplingParams) -> bool:
    return not params.is_greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)


class DrawWords:
    """The inputs of `num_rows` draws, on the host."""

    def __init__(self, num_rows: int, *, pinned: bool, buffer: Tensor | None = None) -> None:
        """`buffer`: int64 zeros [NUM_FIELDS, rows] to use, if they are part of a larger buffer."""
        if buffer is None:
            buffer = torch.zeros((NUM_FIELDS, num_rows), dtype=torch.int64, pin_memory=pinned)
        self.buffer = buffer
        words: NDArray[np.int64] = self.buffer.numpy()
        self._seeds, self.positions, sharpness, self._greedy, self._top_k, top_p, min_p = words
        self._sharpness, self._top_p, self._min_p = (part.view(np.float64) for part in (sharpness, top_p, min_p))
        self._top_p.fill(1.0)
        self._known: tuple[slice, list[int], list[SamplingParams]] | None = None  # in the buffer, except positions

    def fill(
        self,
        lines: NDArray[np.integer] | slice,
        requests: Sequence[Request],
        positions: Sequence[int],
        seeds: list[int] | None = None,
    ) -> None:
        """Line i draws the token of `requests[i]` at `positions[i]`, with the request's own seed or with `seeds[i]`."""
        params = [request.params for request in requests]
        seeds = [request.seed for request in requests] if seeds is None else seeds
        self.positions[lines] = positions
        known = (lines, seeds, params) if isinstance(lines, slice) else None
        if known is not None and known == self._known:
            return
        self._known = known
        self._seeds[lines] = [signed(seed) for seed in seeds]
        self._sharpness[lines] = [request.shaper.sharpness for request in requests]
        self._greedy[lines] = [p.is_greedy for p in params]
        if any(is_filtered(p) for p in params):
            self._top_k[lines] = [min(p.top_k, 1 << 62) for p in params]
            self._top_p[lines] = [p.top_p for p in params]
            self._min_p[lines] = np.array([p.min_p for p in params], np.float32)


def draw_rows(
    logits: Tensor,
    words: Tensor,
    mode: Mode,
    advance: Advance | None = None,
    out: Tensor | None = None,
    kept_probs: Tensor | None = None,
    columns: Tensor | None = None,
) -> Tensor:
    """int32 [2, rows]: tokens, and whether each is exact. With `advance`, positions in `words` increase by 1.

    `kept_probs` [rows, vocab] receives the distributions of sampled rows. `columns`: the only tokens that can be drawn;
    the logits of all others are -inf, and `kept_probs` holds zeros there.
    """
    seed, position, sharpness, is_greedy, top_k, top_p, min_p = words
    sharpness, top_p, min_p = (part.view(torch.float64) for part in (sharpness, top_p, min_p))
    if logits.is_cuda and mode != "peaks":
        from outpace.backends.torch.kernels import drawing

        rows = drawing.Rows(sharpness, is_greedy, top_k, top_p, min_p, seed, position)
        return drawing.draw(
            logits, rows, samples=mode != "greedy", has_filters=mode == "filtered", advance=advance, out=out,
            probs=kept_probs, columns=columns,
        )  # fmt: skip
    if mode == "peaks":
        tokens = tokens_of(logits).int()
    elif mode == "greedy":
        tokens = greedy_tokens(logits).int()
    else:
        params = RowParams(sharpness.float(), is_greedy != 0, top_k, top_p, min_p.float())
        tokens = draw(logits, params, seed, position, kept_probs).int()
    if advance is not None:
        step = advance.step
        if advance.left is not None:
            advance.left.sub_(1)
            step.lengths.mul_((advance.left > 0).int())
            step.positions.add_(1).mul_(step.lengths).sub_(1 - step.lengths)
        else:
            step.positions.add_(step.lengths)
        step.tokens.copy_(tokens * step.lengths)
        step.contexts.add_(step.lengths)
        position.add_(1)
    return torch.stack([tokens, torch.ones_like(tokens)], out=out)


def distributions(logits: Tensor, words: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
    """What `draw_rows` draws the tokens of sampled rows from, [rows, vocab], and whether each row is exact, [rows]."""
    seed, position, sharpness, is_greedy, top_k, top_p, min_p = words
    sharpness, top_p, min_p = (part.view(torch.float64) for part in (sharpness, top_p, min_p))
    if logits.is_cuda:
        from outpace.backends.torch.kernels import drawing

        found = torch.empty_like(logits)
        rows = drawing.Rows(sharpness, is_greedy, top_k, top_p, min_p, seed, position)
        return found, drawing.distributions(logits, rows, has_filters=mode == "filtered", out=found)
    params = RowParams(sharpness.float(), is_greedy != 0, top_k, top_p, min_p.float())
    return probs(logits, params), torch.ones_like(is_greedy)


@dataclass(frozen=True, slots=True)
class Fetch:
    """A running copy of tokens to the host."""

    _arrived: Tensor
    _event: Any | None  # a CUDA event

    def wait(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Tokens, and whether each is exact, for all rows; valid until the fetch after the next."""
        if self._event is not None:
            self._event.synchronize()
        tokens, exact = self._arrived.numpy()
        return tokens, exact


class Draws:
    """Draws repeatedly from one tensor of logits; captured on a GPU."""

    def __init__(self, logits: Tensor, mode: Mode, pool: Pool | None, advance: Advance | None = None) -> None:
        on_gpu = logits.is_cuda
        self.device = logits.device
        self.words = DrawWords(len(logits), pinned=on_gpu)
        self._device_words = self.words.buffer.to(logits.device)
        self._logits, self.mode, self._advance = logits, mode, advance
        self.on_device = torch.zeros((2, len(logits)), dtype=torch.int32, device=logits.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if pool is not None:
            kept = None if advance is None else advance.step.words.clone()  # the warm-up changes them
            self._graph, _ = captured(self._draw, pool, logits.device)
            if kept is not None and advance is not None:
                advance.step.words.copy_(kept)
        # Two, because a step may start before the host has read the tokens of the previous one.
        self._on_host = [torch.zeros((2, len(logits)), dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
        self._events = [torch.cuda.Event() if on_gpu else None for _ in range(2)]

    def _draw(self) -> None:
        self.on_device = draw_rows(self._logits, self._device_words, self.mode, self._advance)

    def fill(self, lines: NDArray[np.integer], requests: Sequence[Request], positions: Sequence[int]) -> None:
        """Say for which request and position each line draws."""
        if self.mode not in _WORDLESS:
            self.words.fill(lines, requests, positions)

    def distributions(self) -> tuple[Tensor, Tensor]:
        """What the launched draws of sampled rows draw from, [rows, vocab], and whether each is exact, [rows]."""
        return distributions(self._logits, self._device_words, self.mode)

    def launch(self, *, needs_tokens: bool = True) -> None:
        """Start to draw. If nobody needs the tokens, only `distributions` is valid afterwards: a draw takes longer."""
        if self.mode not in _WORDLESS:
            self._device_words.copy_(self.words.buffer, non_blocking=True)
        if needs_tokens:
            self.replay()

    def replay(self) -> None:
        """Draw again with the words on the device."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._draw()

    def fetch(self) -> Fetch:
        self._on_host.reverse()
        self._events.reverse()
        arrived, event = self._on_host[0], self._events[0]
        arrived.copy_(self.on_device, non_blocking=True)
        if event is not None:
            event.record()
        return Fetch(arrived, event)

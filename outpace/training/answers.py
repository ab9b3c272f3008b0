"""The target answers prompts: many rows at once over the torch backend's paged cache, one captured graph per token.

Rows are independent. The device draws each row's next token, notices its end and stops feeding it; every few steps the
host collects what ended and gives the free rows new prompts, so the device is always full.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.backends.torch.device import usable_bytes
from outpace.backends.torch.execution.step import PADDING, HostStep, StepInputs, StepShape, views
from outpace.backends.torch.kernels import ops_for
from outpace.backends.torch.kernels.base import Cache
from outpace.backends.torch.model.model import Model
from outpace.errors import BackendError
from outpace.training.target import Target

Prompt = Sequence[int] | NDArray[np.integer]
PAGE_TOKENS = 32
_PREFILL_TOKENS = 32768  # of prompts read at once
_STEPS_BETWEEN_VISITS = 16  # of the host


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt to answer. `key` comes back with the answer."""

    key: int
    prompt: Prompt
    temperature: float


@dataclass(frozen=True, slots=True)
class Answer:
    key: int
    temperature: float
    prompt: Prompt
    tokens: NDArray[np.int64]  # the end token included, if it came


class Answerer:
    """Rows of a cache that fit on the device, and the step that extends all of them by one token."""

    def __init__(self, target: Target, *, max_prompt: int, max_answer: int, end_ids: Iterable[int],
                 most_rows: int | None = None) -> None:  # fmt: skip
        """`most_rows`: more would stay empty."""
        config, device = target.config, target.device
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what an earlier one used is free memory
        self.max_prompt, self.max_answer, self.device = max_prompt, max_answer, device
        self._table_width = -(-(max_prompt + max_answer) // PAGE_TOKENS)
        row_bytes = self._table_width * PAGE_TOKENS * config.cache_elements_per_token * target.dtype.itemsize
        row_bytes += 6 * 4 * config.vocab_size  # logits, noise and their sum
        self.num_rows = min(_fitting_rows(device, row_bytes), most_rows or sys.maxsize)
        shape = (config.num_layers, 2, self.num_rows * self._table_width, config.num_kv_heads, PAGE_TOKENS,
                 config.head_dim)  # fmt: skip
        self._pages = torch.zeros(shape, dtype=target.dtype, device=device)
        self._caches = [Cache(layer[0], layer[1]) for layer in self._pages]
        self._model = Model(config, target.weights, ops_for(device), max_prompt + max_answer + 1)
        self._tables = np.arange(self.num_rows * self._table_width, dtype=np.int32).reshape(self.num_rows, -1)
        self._is_end = torch.zeros(config.vocab_size, dtype=torch.bool, device=device)
        self._is_end[list(end_ids)] = True
        self._step = self._empty_step()
        self._drawn = torch.zeros((self.num_rows, max_answer), dtype=torch.int64, device=device)
        self._num_drawn = torch.zeros(self.num_rows, dtype=torch.int64, device=device)
        self._temperatures = torch.zeros((self.num_rows, 1), device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def _empty_step(self) -> StepInputs:
        n = self.num_rows
        host = HostStep(StepShape(n, n, n, 1, self._table_width, is_packed=True), pinned=False)
        host.positions.fill(PADDING)
        host.token_rows[:] = host.begins[:] = host.outputs[:] = np.arange(n)
        host.tables[:] = self._tables
        return views(host.buffer.to(self.device), host.shape)

    def answer(self, asks: Iterable[Ask]) -> Iterator[Answer]:
        """Answers in the order in which they end. Nothing is read ahead beyond the free rows."""
        waiting, asks_by_row = iter(asks), dict[int, Ask]()
        free = deque(range(self.num_rows))
        is_more = True
        while True:
            new: list[tuple[int, Ask]] = []
            while is_more and free:
                ask = next(waiting, None)
                is_more = ask is not None
                if ask is not None:
                    new.append((free.popleft(), ask))
            self._prefill(new)
            asks_by_row |= dict(new)
            if not asks_by_row:
                return
            for _ in range(_STEPS_BETWEEN_VISITS):
                self._advance()
            lengths, num_drawn = self._step.lengths.tolist(), self._num_drawn.tolist()
            ended = [row for row in asks_by_row if not lengths[row]]
            tokens = self._drawn[ended].cpu().numpy()
            for row, found in zip(ended, tokens, strict=True):
                ask = asks_by_row.pop(row)
                free.append(row)
                yield Answer(ask.key, ask.temperature, ask.prompt, found[: num_drawn[row]].copy())

    @torch.inference_mode()
    def _prefill(self, new: list[tuple[int, Ask]]) -> None:
        """Read prompts, draw their first tokens, and let their rows join the step."""
        at = 0
        while at < len(new):
            end, total = at, 0
            while end < len(new) and (end == at or total + len(new[end][1].prompt) <= _PREFILL_TOKENS):
                total += len(new[end][1].prompt)
                end += 1
            self._read(new[at:end], total)
            at = end

    def _read(self, part: list[tuple[int, Ask]], num_tokens: int) -> None:
        rows = torch.tensor([row for row, _ in part], device=self.device)
        lengths = np.array([len(ask.prompt) for _, ask in part])
        shape = StepShape(num_tokens, len(part), len(part), int(lengths.max()), self._table_width, is_packed=True)
        host = HostStep(shape, pinned=False)
        begins = np.cumsum(lengths) - lengths
        host.tokens[:num_tokens] = np.concatenate([np.asarray(ask.prompt) for _, ask in part])
        host.positions[:num_tokens] = np.arange(num_tokens) - np.repeat(begins, lengths)
        host.token_rows[:num_tokens] = np.repeat(np.arange(len(part)), lengths)
        host.begins[:], host.lengths[:], host.contexts[:] = begins, lengths, lengths
        host.outputs[:] = begins + lengths - 1
        host.tables[:] = self._tables[[row for row, _ in part]]
        logits = self._model.forward(views(host.buffer.to(self.device), shape), self._caches)
        temperatures = torch.tensor([[ask.temperature] for _, ask in part], device=self.device)
        tokens = _draw(logits, temperatures)
        step = self._step
        self._temperatures[rows] = temperatures
        self._num_drawn[rows] = 1
        self._drawn[rows, 0] = tokens
        is_running = ~self._is_end[tokens] & (self.max_answer > 1)
        context = torch.from_numpy(lengths).to(self.device)
        step.tokens[rows] = tokens.int()
        step.lengths[rows] = is_running.int()
        step.contexts[rows] = (context + 1).int()
        step.positions[rows] = torch.where(is_running, context, PADDING).int()

    @torch.inference_mode()
    def _advance(self) -> None:
        """One more token for every running row."""
        if self.device.type != "cuda":
            self._run()
            return
        if self._graph is None:
            stream = torch.cuda.Stream(self.device)
            stream.wait_stream(torch.cuda.current_stream(self.device))
            saved = [each.clone() for each in (self._step.words, self._drawn, self._num_drawn)]
            with torch.cuda.stream(stream):
                self._run()  # compiles kernels; its effects are undone
            torch.cuda.current_stream(self.device).wait_stream(stream)
            for each, before in zip((self._step.words, self._drawn, self._num_drawn), saved, strict=True):
                each.copy_(before)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._run()
        self._graph.replay()

    def _run(self) -> None:
        step = self._step
        tokens = _draw(self._model.forward(step, self._caches), self._temperatures)
        is_running = step.lengths > 0
        place = self._num_drawn.clamp(max=self.max_answer - 1)[:, None]
        kept = torch.where(is_running[:, None], tokens[:, None], self._drawn.gather(1, place))
        self._drawn.scatter_(1, place, kept)
        self._num_drawn.add_(is_running)
        is_running &= ~self._is_end[tokens] & (self._num_drawn < self.max_answer)
        step.tokens.copy_(tokens)
        step.lengths.copy_(is_running)
        step.contexts.add_(step.lengths)
        step.positions.copy_(torch.where(is_running, step.positions + 1, PADDING))


def _draw(logits: Tensor, temperatures: Tensor) -> Tensor:
    """argmax(logits + T * gumbel) samples at temperature T, and is greedy at 0. [rows]"""
    noise = torch.empty_like(logits).exponential_().clamp_(min=1e-30).log_()  # minus a Gumbel variable, never infinite
    return torch.addcmul(logits, noise, temperatures, value=-1).argmax(-1)


def _fitting_rows(device: torch.device, row_bytes: int) -> int:
    """Rows for which half of the free memory suffices; beyond a few thousand a GPU gains nothing."""
    most = 3072 if device.type == "cuda" else 64
    usable = usable_bytes(device, 0.95)
    fitting = most if usable is None else usable // 2 // row_bytes
    if fitting < 1:
        raise BackendError(
            f"{device} has no room for the cache of one answer ({row_bytes / 1e9:.2f} GB); use a larger device, "
            "or shorter prompts and answers"
        )
    return min(most, fitting)


def until(asks: Iterable[Ask], deadline: float) -> Iterator[Ask]:
    """The asks until the clock (time.monotonic) reaches the deadline."""
    for ask in asks:
        if time.monotonic() > deadline:
            return
        yield ask

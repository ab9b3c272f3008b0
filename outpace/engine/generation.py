"""A caller's orders and the pieces of their output: the only objects shared by the engine's thread and the callers.

A `Generation` lives in the event loop. The engine's thread sends it `Piece`s and never touches them again. Pieces that
a slow reader has not taken are merged into one per completion. So a slow reader cannot stall the engine, and its queue
holds at most its own answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outpace.config import SamplingParams
from outpace.core import FinishReason, Request, TokenLogprob
from outpace.decoding.constraints import Constraint
from outpace.engine.stretches import Stretch, stretches
from outpace.errors import OutpaceError
from outpace.speculation.proposers.prediction_text import Prediction


class EngineFault(OutpaceError):
    """The engine failed on this request; sending it again may succeed."""


class EngineStopped(OutpaceError):
    """The engine accepts no more requests: it is shutting down, or failed and could not recover."""


class Overloaded(OutpaceError):
    """The queue is full."""

    def __init__(self, sentence: str, retry_after: float) -> None:
        super().__init__(sentence)
        self.retry_after = retry_after


@dataclass(slots=True)
class Order:
    """One requested completion. `seed` replaces `params.seed`; the rest is as in `Engine.submit`."""

    prompt: Sequence[int]
    params: SamplingParams
    seed: int | None = None
    cache_salt: str = ""
    priority: int = 0
    prediction: Prediction | None = None
    constraint: Constraint | None = None
    keep_drafts: bool = False


@dataclass(slots=True)
class Piece:
    """What was added to one completion. The last piece carries the request, which no longer changes."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    request: Request | None = None
    error: OutpaceError | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # in the first piece, if asked for
    stretches: list[Stretch] = field(default_factory=list)  # its text by origin, if asked for

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def merge(self, later: Piece) -> None:
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.stretches += later.stretches
        self.finish_reason, self.request, self.error = later.finish_reason, later.request, later.error


@dataclass(slots=True, eq=False)
class Ticket:
    """One completion, as tracked by the engine's thread."""

    generation: Generation
    index: int
    order: Order
    request: Request | None = None
    num_counted: int = 0  # tokens counted in the metrics
    counted_at: float | None = None
    num_sent: int = 0  # tokens sent to the reader
    num_segments: int = 0  # segments of text sent to the reader

    @property
    def group(self) -> tuple[int, int]:
        """The same for the n completions of one prompt, and for no others that run."""
        return id(self.generation), self.index // self.order.params.n

    @property
    def has_news(self) -> bool:
        return self.request is not None and self.request.num_output > self.num_sent

    def news(self) -> Piece:
        """What the request has emitted since the last call."""
        request = self.request
        assert request is not None
        writer, is_finished = request.writer, request.finish_reason is not None
        segments = writer.segments_after(self.num_segments)
        piece = Piece(
            self.index,
            "".join([segment.text for segment in segments]),
            request.tokens[len(request.prompt) + self.num_sent :],
            writer.logprobs[self.num_sent :],
            request.finish_reason,
            request if is_finished else None,
            prompt_logprobs=request.prompt_logprobs if not self.num_sent else [],
        )
        if request.drafts is not None:
            piece.stretches = stretches(segments, request.drafts)
        self.num_sent, self.num_segments = request.num_output, self.num_segments + len(segments)
        return piece


class Generation:
    """The answers to one call: an asynchronous iterator over lists of pieces, at most one piece per completion."""

    def __init__(self, orders: Sequence[Order], on_abort: Callable[[Generation], None], *, stream: bool) -> None:
        self.stream = stream  # False: the caller wants only whole answers
        self.tickets = [Ticket(self, i, order) for i, order in enumerate(orders)]
        self._unfinished = set(range(len(orders)))
        self._pending: dict[int, Piece] = {}
        self._reader: asyncio.Future[None] | None = None  # set while the caller waits for the next piece
        self._on_abort = on_abort

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    def put(self, piece: Piece) -> None:
        """Add a piece; called in the event loop. It is dropped if its completion is finished or aborted."""
        if piece.index not in self._unfinished:
            return
        if piece.is_last:
            self._unfinished.remove(piece.index)
        waiting = self._pending.get(piece.index)
        if waiting is None:
            self._pending[piece.index] = piece
        else:
            waiting.merge(piece)
        self._wake()

    def abort(self) -> None:
        """The caller has left: end its unfinished completions within a step."""
        if self._unfinished:
            self._on_abort(self)
            self._unfinished.clear()
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[Piece]:
        while not self._pending:
            if not self._unfinished:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        pieces = list(self._pending.values())
        self._pending.clear()
        return pieces

"""Runs an engine in its own thread behind an event loop: submit, stream, abort.

This module is the event loop's side; worker.py is the thread's side. The loop sends commands, the thread answers with
pieces, and neither waits for the other. If the engine fails and cannot recover, every caller gets an error and
`on_death` is called so that the process can end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread
from time import perf_counter
from typing import TypeVar

from outpace.engine.engine import Engine
from outpace.engine.generation import EngineStopped, Generation, Order, Overloaded, Piece
from outpace.engine.worker import Abort, Call, Parcel, Stop, Submit, Worker
from outpace.errors import BackendLost, UsageError
from outpace.metrics import EngineMetrics

log = logging.getLogger("outpace.engine")
R = TypeVar("R")


class AsyncEngine:
    """At most `max_queued` completions wait besides the running ones; further ones raise `Overloaded`."""

    def __init__(self, engine: Engine, *, max_queued: int) -> None:
        self.engine = engine
        self.metrics = EngineMetrics()
        self.on_death: Callable[[], None] = lambda: None
        self.failure: str | None = None  # why the engine stopped
        self._max_queued = max_queued
        self._worker = Worker(engine, self.metrics, self._post)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._is_draining = False
        self._open: set[Generation] = set()
        self._num_open = 0
        self._num_delivered = 0
        self._began = perf_counter()

    # ---- called from the event loop

    def start(self) -> None:
        """Start the engine's thread; results go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._began = perf_counter()
        self.engine.on_loss(self._fail)
        self._thread = Thread(target=self._run, name="outpace-engine", daemon=True)
        self._thread.start()

    @property
    def is_accepting(self) -> bool:
        return self.failure is None and not self._is_draining and self._thread is not None

    @property
    def num_open(self) -> int:
        """Completions that callers still wait for."""
        return self._num_open

    def submit(self, orders: Sequence[Order], *, stream: bool = True) -> Generation:
        """Queue all of these, or refuse all. Without `stream`, each completion arrives as one piece when it ends."""
        self.check_room(len(orders))
        generation = Generation(orders, self._abort, stream=stream)
        self._open.add(generation)
        self._num_open += len(orders)
        self._worker.inbox.put(Submit(generation.tickets))
        return generation

    def check_room(self, num_completions: int) -> None:
        """Raise an error if this number of completions cannot be queued now. Takes constant time."""
        if self.failure is not None:
            raise EngineStopped(f"the engine has stopped: {self.failure}; restart the server")
        if not self.is_accepting:
            raise EngineStopped("the server is shutting down; send the request to another one, or later")
        most = self.engine.max_running + self._max_queued
        if num_completions > most:
            raise UsageError(
                f"{num_completions} completions were requested at once and at most {most} fit; request fewer"
            )
        if self._num_open + num_completions > most:
            raise Overloaded(
                f"{self._num_open} completions are running or waiting and {num_completions} more were requested; at "
                f"most {most} fit; try again later",
                self._seconds_until_room(),
            )

    @contextmanager
    def reserve(self, num_completions: int) -> Iterator[None]:
        """Keep room for completions while their prompts are tokenised. Submit them right after that."""
        self.check_room(num_completions)
        self._num_open += num_completions
        try:
            yield
        finally:
            self._num_open -= num_completions

    def call(self, work: Callable[[], R]) -> Future[R]:
        """Run `work` in the engine's thread between two steps. Other threads must not touch a running engine."""
        result: Future[R] = Future()
        self._worker.inbox.put(Call(work, result))
        return result

    def forget(self) -> None:
        """Drop the data of finished requests. Requests submitted after this call run after that."""
        self.call(self.engine.forget)

    def drain(self) -> None:
        """Accept no new requests; queued and running ones continue."""
        self._is_draining = True

    def end_all(self, sentence: str) -> None:
        """Abort every request; its reader gets an error with this sentence."""
        for generation in list(self._open):
            tickets = generation.tickets
            self._worker.inbox.put(Abort(tickets))
            self._receive([(generation, Piece(t.index, error=EngineStopped(sentence))) for t in tickets])

    async def stop(self) -> None:
        """Abort unfinished requests and wait for the thread."""
        self.drain()
        self.end_all("the server was stopped before the answer was complete; ask again")
        await asyncio.to_thread(self.join)

    def join(self) -> None:
        """Stop the thread after its current step and wait; then the engine may be closed. Not from that thread."""
        self._worker.inbox.put(Stop())
        if self._thread is not None:
            self._thread.join()

    def _abort(self, generation: Generation) -> None:
        self._worker.inbox.put(Abort(generation.tickets))
        self._num_open -= generation.num_unfinished
        self._close(generation)

    def _close(self, generation: Generation) -> None:
        """Forget a finished generation. Its tickets refer back to it; the cycle would keep both in memory."""
        self._open.discard(generation)
        generation.tickets = []

    def _seconds_until_room(self) -> float:
        """The time to finish half of the queue, at the mean rate of completions since the start."""
        if not self._num_delivered:
            return 1.0
        each = (perf_counter() - self._began) / self._num_delivered
        return min(60.0, max(1.0, each * self._max_queued / 2))

    def _receive(self, parcels: Sequence[Parcel]) -> None:
        for generation, piece in parcels:
            before = generation.num_unfinished
            generation.put(piece)
            if generation.num_unfinished < before:
                self._num_open -= 1
                self._num_delivered += 1
                if not generation.num_unfinished:
                    self._close(generation)

    # ---- called from the engine's thread

    def _run(self) -> None:
        try:
            self._worker.run()
        except BaseException as error:
            self._fail(error)

    def _post(self, parcels: Sequence[Parcel]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._receive, parcels)

    def _fail(self, error: BaseException) -> None:
        if self.failure is not None:
            return
        if isinstance(error, BackendLost):
            self.failure = str(error)
        else:
            log.critical("the engine failed and cannot recover", exc_info=error)
            self.failure = f"{type(error).__name__}, and recovery failed; the log has the details"
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end_after_failure)

    def _end_after_failure(self) -> None:
        self.end_all(f"the engine has stopped: {self.failure}; restart the server")
        self.on_death()

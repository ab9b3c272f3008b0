"""An engine in a thread of its own, behind an event loop: submit, stream, abort.

This is the loop's side; the thread's is worker.py. The loop sends it commands, it answers with pieces, and neither side
waits for the other. If the engine dies, every caller hears of it and `on_death` is called so that the process can end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Thread
from time import perf_counter
from typing import TypeVar

from outpace.engine.engine import Engine
from outpace.engine.generation import EngineStopped, Generation, Order, Overloaded, Piece
from outpace.engine.worker import Abort, Call, Parcel, Stop, Submit, Worker
from outpace.errors import UsageError
from outpace.metrics import EngineMetrics

log = logging.getLogger("outpace.engine")
R = TypeVar("R")


class AsyncEngine:
    """`max_queued` completions may wait beyond those that run; one more is refused with `Overloaded`."""

    def __init__(self, engine: Engine, *, max_queued: int) -> None:
        self.engine = engine
        self.metrics = EngineMetrics()
        self.on_death: Callable[[], None] = lambda: None
        self.failure: str | None = None  # why the engine is dead
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
        """Begin to serve the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._began = perf_counter()
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
        """Queue these, or refuse them together. Without `stream` a completion comes in one piece, at its end."""
        if self.failure is not None:
            raise EngineStopped(f"the engine has stopped: {self.failure}; restart the server")
        if not self.is_accepting:
            raise EngineStopped("the server is shutting down; send the request to another one, or later")
        most = self.engine.max_running + self._max_queued
        if len(orders) > most:
            raise UsageError(
                f"{len(orders)} completions were asked for at once, where at most {most} fit; ask for fewer"
            )
        if self._num_open + len(orders) > most:
            raise Overloaded(
                f"{self._num_open} completions are running or waiting and {len(orders)} more were asked for, where at "
                f"most {most} fit; try again later",
                self._seconds_until_room(),
            )
        generation = Generation(orders, self._abort, stream=stream)
        self._open.add(generation)
        self._num_open += len(orders)
        self._worker.inbox.put(Submit(generation.tickets))
        return generation

    def call(self, work: Callable[[], R]) -> Future[R]:
        """Have the engine's thread do something between two steps: nobody else may touch the engine while it runs."""
        result: Future[R] = Future()
        self._worker.inbox.put(Call(work, result))
        return result

    def forget(self) -> None:
        """Drop what finished requests left behind, before anything that is submitted after this runs."""
        self.call(self.engine.forget)

    def drain(self) -> None:
        """Take no new requests; those that are here go on."""
        self._is_draining = True

    def end_all(self, sentence: str) -> None:
        """End every answer where it stands; its reader hears why."""
        for generation in list(self._open):
            tickets = generation.tickets
            self._worker.inbox.put(Abort(tickets))
            self._receive([(generation, Piece(t.index, error=EngineStopped(sentence))) for t in tickets])

    async def stop(self) -> None:
        """End what is unfinished and wait for the thread."""
        self.drain()
        self.end_all("the server was stopped before the answer was complete; ask again")
        await asyncio.to_thread(self.join)

    def join(self) -> None:
        """The thread ends after the step it is in; then the engine may be closed. From any thread but its own."""
        self._worker.inbox.put(Stop())
        if self._thread is not None:
            self._thread.join()

    def _abort(self, generation: Generation) -> None:
        self._worker.inbox.put(Abort(generation.tickets))
        self._num_open -= generation.num_unfinished
        self._close(generation)

    def _close(self, generation: Generation) -> None:
        """Nothing more will come of it. It lets go of its tickets, which hold it: a cycle would outlive the request."""
        self._open.discard(generation)
        generation.tickets = []

    def _seconds_until_room(self) -> float:
        """From how fast completions have been ending since the start: when half of the queue should be gone."""
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
            self._die(error)

    def _post(self, parcels: Sequence[Parcel]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._receive, parcels)

    def _die(self, error: BaseException) -> None:
        log.critical("the engine cannot go on", exc_info=error)
        self.failure = f"{type(error).__name__}, after which it could not be brought back; the log has the details"
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._bury)

    def _bury(self) -> None:
        self.end_all(f"the engine has stopped: {self.failure}; restart the server")
        self.on_death()

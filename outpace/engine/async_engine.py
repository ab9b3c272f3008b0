"""An engine in a thread of its own, behind an event loop: submit, stream, abort.

The thread owns the engine. The loop sends it orders through a queue, which it empties before every step, so an abort
takes effect within one step; it answers with pieces, one wake-up of the loop per step whatever the number of readers.
Neither side waits for the other. A step that breaks is recovered from (see recovery.py); if that fails too, the engine
is dead: every caller hears of it, and `on_death` is called so that the process can end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Any, TypeVar

from outpace.core import Delta, Request
from outpace.engine.engine import Engine
from outpace.engine.generation import EngineFault, EngineStopped, Generation, Order, Overloaded, Piece, Ticket
from outpace.engine.recovery import recover
from outpace.errors import OutpaceError, UsageError
from outpace.metrics import EngineMetrics

log = logging.getLogger("outpace.engine")
R = TypeVar("R")


@dataclass(slots=True)
class _Submit:
    tickets: list[Ticket]


@dataclass(slots=True)
class _Abort:
    tickets: list[Ticket]


@dataclass(slots=True)
class _Call:
    work: Callable[[], Any]
    result: Future[Any]


class _Stop:
    pass


# Writing an event costs about as much as a fifth of a small model's token, so they are rationed: many fast readers get
# several tokens at a time, and none waits longer than a pause nobody sees.
EVENTS_PER_SECOND = 150
LONGEST_PAUSE = 0.1

_Command = _Submit | _Abort | _Call | _Stop
_Parcel = tuple[Generation, Piece]


class AsyncEngine:
    """`max_queued` completions may wait beyond those that run; one more is refused with `Overloaded`."""

    def __init__(self, engine: Engine, *, max_queued: int) -> None:
        self.engine = engine
        self.metrics = EngineMetrics()
        self.on_death: Callable[[], None] = lambda: None
        self.failure: str | None = None  # why the engine is dead
        self._max_queued = max_queued
        self._inbox: SimpleQueue[_Command] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._is_draining = False
        # The loop's side
        self._open: set[Generation] = set()
        self._num_open = 0
        self._num_delivered = 0
        self._began = perf_counter()
        # The thread's side
        self._tickets: dict[int, Ticket] = {}  # by request id
        self._unsent: dict[int, Ticket] = {}  # those with something to send

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
        self._inbox.put(_Submit(generation.tickets))
        return generation

    def call(self, work: Callable[[], R]) -> Future[R]:
        """Have the engine's thread do something between two steps: nobody else may touch the engine while it runs."""
        result: Future[R] = Future()
        self._inbox.put(_Call(work, result))
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
            self._inbox.put(_Abort(tickets))
            self._receive([(generation, Piece(t.index, error=EngineStopped(sentence))) for t in tickets])

    async def stop(self) -> None:
        """End what is unfinished and wait for the thread."""
        self.drain()
        self.end_all("the server was stopped before the answer was complete; ask again")
        await asyncio.to_thread(self.join)

    def join(self) -> None:
        """The thread ends after the step it is in; then the engine may be closed. From any thread but its own."""
        self._inbox.put(_Stop())
        if self._thread is not None:
            self._thread.join()

    def _abort(self, generation: Generation) -> None:
        self._inbox.put(_Abort(generation.tickets))
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

    def _receive(self, parcels: Sequence[_Parcel]) -> None:
        for generation, piece in parcels:
            before = generation.num_unfinished
            generation.put(piece)
            if generation.num_unfinished < before:
                self._num_open -= 1
                self._num_delivered += 1
                if not generation.num_unfinished:
                    self._close(generation)

    # ---- the engine's thread

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self.engine.has_requests:
                    self._step()
        except BaseException as error:
            self._die(error)

    def _take_commands(self) -> bool:
        """Everything the loop has sent; waits for it where there is nothing else to do. False: stop."""
        while True:
            try:
                command = self._inbox.get(block=not self.engine.has_requests)
            except Empty:
                return True
            if isinstance(command, _Stop):
                return False
            if isinstance(command, _Submit):
                self._admit(command.tickets)
            elif isinstance(command, _Call):
                try:
                    command.result.set_result(command.work())
                except Exception as error:
                    command.result.set_exception(error)
            else:
                self._end(command.tickets)
            self.metrics.look_at(self.engine)

    def _admit(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            order = ticket.order
            try:
                ticket.request = self.engine.submit(order.prompt, order.params, seed=order.seed)
                self._tickets[ticket.request.id] = ticket
            except OutpaceError as error:
                self._send([(ticket.generation, Piece(ticket.index, error=error))])

    def _end(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            request = ticket.request
            if request is not None and self._tickets.pop(request.id, None) is not None:
                self._unsent.pop(request.id, None)
                self.engine.abort(request)
                self.metrics.ended(request, "abort")

    def _step(self) -> None:
        try:
            deltas = self.engine.step()
        except Exception as error:
            self.metrics.num_faults += 1
            self.metrics.step_done(self.engine.stats)
            log.error("a step broke; finding out whose fault it was", exc_info=error)
            recover(self.engine, [t.request for t in self._tickets.values() if t.request], error, self)
            return
        self.step_done(deltas)

    def step_done(self, deltas: Sequence[Delta]) -> None:
        """Count what a step did and hand it to the readers."""
        now = perf_counter()
        self.metrics.step_done(self.engine.stats)
        for delta in deltas:
            ticket = self._tickets.get(delta.request.id)
            if ticket is not None:
                self._take(ticket, "".join(segment.text for segment in delta.segments), delta.token_ids, now)
        self.metrics.look_at(self.engine)
        self._send(self._due(now))

    def catch_up(self, request: Request) -> None:
        """Hand on what a broken step had already said."""
        ticket = self._tickets[request.id]
        text = request.writer.text[ticket.num_characters :]
        tokens = request.tokens[len(request.prompt) + ticket.num_taken :]
        request.writer.take()
        if tokens or request.finish_reason:
            self._take(ticket, text, tokens, perf_counter())

    def failed(self, request: Request, error: Exception) -> None:
        """This request cannot go on; its reader hears a sentence, the log had the rest."""
        ticket = self._tickets.pop(request.id)
        self._unsent.pop(request.id, None)
        self.engine.abort(request)
        self.metrics.ended(request, "error")
        fault = EngineFault(
            f"the engine failed on this request ({type(error).__name__}); the server's log has the details"
        )
        self._send([(ticket.generation, Piece(ticket.index, error=fault))])

    def _take(self, ticket: Ticket, text: str, token_ids: list[int], now: float) -> None:
        """Note what a request has said; it goes out when it is due."""
        request = ticket.request
        assert request is not None
        logprobs = request.writer.logprobs[ticket.num_taken : ticket.num_taken + len(token_ids)]
        ticket.num_taken += len(token_ids)
        ticket.num_characters += len(text)
        self.metrics.advanced(request, len(token_ids), ticket.last_at, now)
        ticket.last_at = now
        reason = request.finish_reason
        if reason is not None:
            del self._tickets[request.id]
            self.metrics.ended(request, reason)
        piece = Piece(ticket.index, text, token_ids, logprobs, reason, request if reason else None)
        if ticket.unsent is None:
            ticket.unsent = piece
            self._unsent[request.id] = ticket
        else:
            ticket.unsent.merge(piece)

    def _due(self, now: float) -> list[_Parcel]:
        """First and last words at once; what comes between them, when the reader's pause is over."""
        pause = min(len(self._tickets) / EVENTS_PER_SECOND, LONGEST_PAUSE)
        parcels: list[_Parcel] = []
        for request_id, ticket in list(self._unsent.items()):
            piece = ticket.unsent
            assert piece is not None
            in_time = ticket.generation.stream and (ticket.sent_at is None or now - ticket.sent_at >= pause)
            if in_time or piece.is_last:
                parcels.append((ticket.generation, piece))
                ticket.unsent, ticket.sent_at = None, now
                del self._unsent[request_id]
        return parcels

    def _send(self, parcels: Sequence[_Parcel]) -> None:
        if parcels and self._loop is not None and not self._loop.is_closed():
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

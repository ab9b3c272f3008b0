"""The engine's thread: takes commands before every step, steps, and posts what requests have emitted.

It owns the engine. Commands come through a queue that is emptied before every step, so an abort takes effect within one
step. Output goes out as pieces, in one post per step for all readers. After a failed step the engine recovers (see
recovery.py); if that fails too, `run` raises and the engine is dead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

from outpace.core import Delta, Request
from outpace.engine.engine import Engine
from outpace.engine.generation import EngineFault, Generation, Piece, Ticket
from outpace.engine.recovery import recover
from outpace.errors import BackendLost, OutpaceError
from outpace.metrics import EngineMetrics

log = logging.getLogger("outpace.engine")

# Writing an event takes about a fifth of the time of a small model's token, so the rate of events is limited: many
# readers get several tokens per event. All readers are served together, because every wake-up of the event loop takes
# a core from the running step.
EVENTS_PER_SECOND = 150
LONGEST_PAUSE = 0.1  # seconds between two events of one reader; too short to notice


@dataclass(slots=True)
class Submit:
    tickets: list[Ticket]


@dataclass(slots=True)
class Abort:
    tickets: list[Ticket]


@dataclass(slots=True)
class Call:
    work: Callable[[], Any]
    result: Future[Any]


class Stop:
    pass


Command = Submit | Abort | Call | Stop
Parcel = tuple[Generation, Piece]


class Worker:
    """Everything but `inbox` belongs to the thread that calls `run`."""

    def __init__(self, engine: Engine, metrics: EngineMetrics, post: Callable[[Sequence[Parcel]], None]) -> None:
        self.inbox: SimpleQueue[Command] = SimpleQueue()
        self.tickets: dict[int, Ticket] = {}  # unfinished ones, by request id
        self._engine = engine
        self._metrics = metrics
        self._post = post
        self._served_at = 0.0  # when output was last sent to all streaming readers

    def run(self) -> None:
        """Serve until a Stop command. Raises if the engine cannot recover from a failure."""
        while self._take_commands():
            if self._engine.has_requests:
                self._step()

    def _take_commands(self) -> bool:
        """Execute all queued commands; waits for one if the engine has no requests. False: stop."""
        while True:
            try:
                command = self.inbox.get(block=not self._engine.has_requests)
            except Empty:
                return True
            if isinstance(command, Stop):
                return False
            if isinstance(command, Submit):
                self._admit(command.tickets)
            elif isinstance(command, Call):
                try:
                    command.result.set_result(command.work())
                except Exception as error:
                    command.result.set_exception(error)
            else:
                self._end(command.tickets)
            self._metrics.look_at(self._engine)

    def _admit(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            order = ticket.order
            try:
                ticket.request = self._engine.submit(
                    order.prompt,
                    order.params,
                    seed=order.seed,
                    cache_salt=order.cache_salt,
                    priority=order.priority,
                    prediction=order.prediction,
                    constraint=order.constraint,
                    keep_drafts=order.keep_drafts,
                )
                self.tickets[ticket.request.id] = ticket
            except OutpaceError as error:
                self._post([(ticket.generation, Piece(ticket.index, error=error))])

    def _end(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            request = ticket.request
            if request is not None and self.tickets.pop(request.id, None) is not None:
                self._engine.abort(request)
                self._metrics.ended(request, "abort", ticket.group)

    def _step(self) -> None:
        try:
            deltas = self._engine.step()
        except BackendLost:
            raise  # no request is at fault, and nothing can be tried again
        except Exception as error:
            self._metrics.num_faults += 1
            self._metrics.step_done(self._engine.stats)
            log.error("a step failed; looking for the request that caused it", exc_info=error)
            recover(self._engine, [t.request for t in self.tickets.values() if t.request], error, self)
            return
        self.step_done(deltas)

    def step_done(self, deltas: Sequence[Delta]) -> None:
        """Count a step. A request's first and last tokens are sent at once, others to all readers after the pause."""
        now = perf_counter()
        self._metrics.step_done(self._engine.stats)
        due: list[Ticket] = []
        for delta in deltas:
            ticket = self.tickets.get(delta.request.id)
            if ticket is not None:
                self._count(ticket, delta.request, now)
                if delta.finish_reason or (ticket.generation.stream and not ticket.num_sent):
                    due.append(ticket)
        parcels = [(ticket.generation, ticket.news()) for ticket in due]
        if now - self._served_at >= min(len(self.tickets) / EVENTS_PER_SECOND, LONGEST_PAUSE):
            self._served_at = now
            readers = [ticket for ticket in self.tickets.values() if ticket.generation.stream and ticket.has_news]
            parcels += [(ticket.generation, ticket.news()) for ticket in readers]
        self._metrics.look_at(self._engine)
        if parcels:
            self._post(parcels)

    def catch_up(self, request: Request) -> None:
        """Count the tokens that a failed step had emitted; if they finished the request, send them."""
        ticket = self.tickets[request.id]
        if request.num_output > ticket.num_counted or request.finish_reason:
            self._count(ticket, request, perf_counter())
        if request.finish_reason:
            self._post([(ticket.generation, ticket.news())])

    def failed(self, request: Request, error: Exception) -> None:
        """End a request that failed; its reader gets a short error, the log has the details."""
        ticket = self.tickets.pop(request.id)
        self._engine.abort(request)
        self._metrics.ended(request, "error", ticket.group)
        fault = EngineFault(
            f"the engine failed on this request ({type(error).__name__}); the server's log has the details"
        )
        self._post([(ticket.generation, Piece(ticket.index, error=fault))])

    def _count(self, ticket: Ticket, request: Request, now: float) -> None:
        self._metrics.advanced(request, request.num_output - ticket.num_counted, ticket.counted_at, now)
        ticket.num_counted, ticket.counted_at = request.num_output, now
        if request.finish_reason is not None:
            del self.tickets[request.id]
            self._metrics.ended(request, request.finish_reason, ticket.group)

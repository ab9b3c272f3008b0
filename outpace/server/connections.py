"""The HTTP connections: how long a client may take to finish a request, and whose connection ends when all are in use.

uvicorn's protocol does the HTTP. What it leaves open is closed here: a client that never finishes the head of a
request, one that does not take its answer, one that closes its sending side and waits, and bodies of tiny chunks.
"""

from __future__ import annotations

import asyncio
import json
import select
import socket
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from outpace.server.errors import ApiError
from outpace.server.logs import Seldom

HEAD_SECONDS = 10.0  # from the connection, or the end of the last answer, to the end of the next request's head
SPARE_CONNECTIONS = 32  # above --max-connections, so that /health is answered when that many requests are
ACCEPTED_AT_ONCE = 64  # between two turns of the connections that are open
_CHECK_SECONDS = 1.0
_MIN_TAKEN = 1024.0  # bytes a second: a client that takes an answer more slowly than this has left it
_FIRST_PROBE_SECONDS = 0.005
_READ_BYTES = 1 << 16  # at once from a connection; each takes its turn
# Parsing a chunk costs as much as parsing a kilobyte.
_FREE_CHUNKS, _MIN_CHUNK_BYTES = 1000, 256
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_seldom_full = Seldom("outpace.server", seconds=60.0)
_seldom_broken = Seldom("outpace.server", seconds=60.0)


class Room:
    """All connections of a server, and which of them wait for their client: for a request, or for its body.

    Only those can be too many: the gate limits how many requests are answered at once. So if there is no place for a
    new connection, the one that has waited longest is closed.
    """

    def __init__(self, max_connections: int) -> None:
        self._most = max_connections + SPARE_CONNECTIONS
        self._is_trimming = False
        self._all: set[Connection] = set()
        self._waiting: dict[Connection, tuple[float, int]] = {}  # since when, and the bytes unsent then; oldest first

    def enter(self, connection: Connection) -> None:
        self._all.add(connection)
        self.note(connection)
        if len(self._all) > self._most and not self._is_trimming:
            self._is_trimming = True
            # After the event loop has read from the new connections: most requests are there already.
            connection.loop.call_soon(connection.loop.call_soon, self._trim)

    def _trim(self) -> None:
        self._is_trimming = False
        _seldom_full.warning(
            "more than %d connections are open, so those that wait longest for their client are closed; a proxy can "
            "limit connections per client",
            self._most,
        )
        while len(self._all) > self._most and self._waiting:
            oldest = next(iter(self._waiting))
            self.leave(oldest)
            oldest.end()

    def leave(self, connection: Connection) -> None:
        self._all.discard(connection)
        self._waiting.pop(connection, None)

    def note(self, connection: Connection) -> None:
        """Note whether the connection waits for its client, from now on if it did not before."""
        if not connection.is_waiting:
            self._waiting.pop(connection, None)
        elif connection not in self._waiting and connection in self._all:
            now = asyncio.get_running_loop().time()
            self._waiting[connection] = now, connection.transport.get_write_buffer_size()

    def restart(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)
        self.note(connection)

    async def watch(self) -> None:
        """End connections whose clients take too long."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            self._check()

    def _check(self) -> None:
        now = asyncio.get_running_loop().time()
        for connection in list(self._all):
            self.note(connection)  # an answer that was given up ends without a call
            connection.look_for_end()
        for connection, (since, unsent) in list(self._waiting.items()):
            if now - since < HEAD_SECONDS or connection.is_receiving_body:  # the gate limits the time for bodies
                continue
            if unsent - connection.transport.get_write_buffer_size() >= _MIN_TAKEN * (now - since):
                self.restart(connection)
            else:
                connection.give_up()


class _Parser(h11.Connection):
    """Refuses a body that is cut into very many very small chunks."""

    _num_chunks = _num_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > _FREE_CHUNKS and self._num_bytes < self._num_chunks * _MIN_CHUNK_BYTES:
                raise h11.RemoteProtocolError("too many small chunks")
        return event


class Connection(H11Protocol):
    def __init__(self, room: Room, **options: Any) -> None:
        super().__init__(**options)
        self.limit_concurrency = None  # the gate limits requests, and this module connections
        self.conn = _Parser(h11.SERVER)
        self._room = room
        self._has_sent_all = False  # the client has closed its side of the connection
        self._probe: asyncio.TimerHandle | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it is the client's turn: to send a request or the rest of it, or to take the end of an answer."""
        cycle = self.cycle
        return cycle is None or cycle.more_body or cycle.response_complete or self.transport.is_closing()

    @property
    def is_receiving_body(self) -> bool:
        cycle = self.cycle
        unanswered = cycle is not None and not cycle.response_complete and not self.transport.is_closing()
        return unanswered and cycle.more_body

    # ---- asyncio calls these

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]
        self._room.enter(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._room.note(self)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection if an answer is due: the client may only have closed its sending side, and wait.

        A client that closed the whole connection looks the same until something is sent to it; then its system answers
        with a reset, and the next send fails. An answer in HTTP/1.1 may be preceded by any number of "100 Continue",
        so these are sent to find out. With HTTP/1.0 there is nothing to send, and the client counts as gone.
        """
        self._has_sent_all = True
        if not self._can_probe:
            return False
        self._begin_probing()
        return True

    @property
    def _can_probe(self) -> bool:
        return not self.is_waiting and (self.cycle.response_started or self.scope["http_version"] == "1.1")

    def _begin_probing(self) -> None:
        if self._probe is None:
            self._probe = self.loop.call_later(_FIRST_PROBE_SECONDS, self._ask_whether_gone, _FIRST_PROBE_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._room.leave(self)
        if self._probe is not None:
            self._probe.cancel()

    # ---- uvicorn calls these

    def handle_events(self) -> None:
        try:
            super().handle_events()
        except h11.LocalProtocolError:  # what the client sent does not go with the answer that has begun
            self._refuse(HTTPStatus.BAD_REQUEST, "the request is not valid HTTP")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._room.restart(self)
        if self._has_sent_all and self.is_waiting:
            self.transport.close()  # when all of the answer is sent

    def send_400_response(self, msg: str) -> None:
        # uvicorn warns of each; anyone could fill the log with these.
        _seldom_broken.warning("a client sent what is not valid HTTP; the last one was %s", self.client)
        self._refuse(HTTPStatus.BAD_REQUEST, "the request is not valid HTTP; check what your client sends")

    # ---- endings

    def look_for_end(self) -> None:
        """Find out whether a client is gone that has sent more than its request.

        That is not read before the answer ends, and so asyncio does not see the end of the connection behind it.
        """
        if self.flow.read_paused and self._probe is None and self._can_probe and _has_ended(self.transport):
            self._begin_probing()

    def give_up(self) -> None:
        """The client took too long. If it has begun a request, it hears why."""
        has_begun = self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]
        if has_begun and not self.transport.get_write_buffer_size():
            message = f"the head of the request did not arrive within {HEAD_SECONDS:g} seconds; send it again"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, message)
        else:
            self.end()

    def end(self) -> None:
        """Close the connection now. What a client has not taken by now is dropped."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer what is not a request, unless an answer has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            body = json.dumps(ApiError(status, message).body()).encode()
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        if self.cycle is not None:
            self.cycle.disconnected = True  # the app can send nothing more
            self.cycle.message_event.set()
        self.transport.close()

    def _ask_whether_gone(self, waited: float) -> None:
        if self.is_waiting:
            self._probe = None
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if not self.cycle.response_started:
            self.transport.write(_CONTINUE)
        self._probe = self.loop.call_later(waited, self._ask_whether_gone, 2 * waited)


def _has_ended(transport: asyncio.Transport) -> bool:
    """Whether the client has closed its side, even if there is something to read before that. Only Linux tells."""
    if not hasattr(select, "POLLRDHUP") or transport.is_closing():
        return False
    poll = select.poll()
    poll.register(transport.get_extra_info("socket"), select.POLLRDHUP)
    return bool(poll.poll(0))

"""Run the server for a loaded model until a signal or an engine failure, then shut down cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, cast

import uvicorn

from outpace.engine.async_engine import AsyncEngine
from outpace.errors import OutpaceError
from outpace.server import descriptors
from outpace.server.app import create_app
from outpace.server.config import ServerConfig
from outpace.server.connections import ACCEPTED_AT_ONCE, Connection, Room
from outpace.server.interpreter import keep_responsive

if TYPE_CHECKING:
    from fastapi import FastAPI

    from outpace.llm import LLM

log = logging.getLogger("outpace.server")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MOST_UNACCEPTED = 2048  # connections that the system keeps until they are accepted
_LAST_EVENTS_SECONDS = 5  # to write the error events of streams that are cut off


class Server(uvicorn.Server):
    """uvicorn, but after a signal answers may finish until the timeout; then each ends with an error event."""

    def __init__(self, app: FastAPI, engine: AsyncEngine, config: ServerConfig) -> None:
        self._room = room = Room(config.max_connections)
        super().__init__(
            uvicorn.Config(
                app,
                # Measured: httptools and uvloop save nothing here, because most of an event's cost is its system call.
                # h11 limits the size of headers.
                http=cast("type[asyncio.Protocol]", partial(Connection, room)),
                loop="asyncio",
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                backlog=ACCEPTED_AT_ONCE,
                timeout_graceful_shutdown=round(config.shutdown_timeout + _LAST_EVENTS_SECONDS),
            )
        )
        self._engine = engine
        self._shutdown_timeout = config.shutdown_timeout
        engine.on_death = self.end

    def end(self) -> None:
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's version, does not raise the signal again, so that a clean end has exit status 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(descriptors.log_loop_error)
        self._tasks = [asyncio.create_task(keep_responsive(self._engine)), asyncio.create_task(self._room.watch())]
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_MOST_UNACCEPTED)  # uvicorn's `backlog` sets this too

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.drain()
        if self._engine.num_open:
            log.info(
                "stopping; waiting up to %g s for %d answers to finish", self._shutdown_timeout, self._engine.num_open
            )
        cutoff = asyncio.create_task(self._cut_off_late_answers())
        await super().shutdown(sockets)
        cutoff.cancel()
        for task in self._tasks:
            task.cancel()

    async def _cut_off_late_answers(self) -> None:
        await asyncio.sleep(self._shutdown_timeout)
        self._engine.end_all("the server is shutting down and the answer was not complete in time; send it again")


def serve(llm: LLM, config: ServerConfig) -> int:
    """Serve until a signal or an engine failure. Returns the exit status."""
    config = descriptors.fit(config)
    listener = listen(config.host, config.port)
    engine = AsyncEngine(llm.engine, max_queued=config.max_queued)
    app = create_app(engine, llm.tokenizer, config, max_context=llm.config.max_context)
    host, port = listener.getsockname()[:2]
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    page = "page /, " if config.page else ""
    log.info("serving %s at %s (%sAPI /v1, reference /docs, metrics /metrics)", config.model_names[0], where, page)
    Server(app, engine, config).run(sockets=[listener])
    engine.join()  # needed after a second signal, which skips the clean shutdown
    if engine.failure is not None:
        log.critical("stopped because the engine failed: %s", engine.failure)
        return 1
    log.info("stopped")
    return 0


def listen(host: str, port: int) -> socket.socket:
    """Bind the port, before the server is announced. The error names a remedy."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        remedy = (
            "stop the program that uses it or choose another --port" if taken else "choose another --host or --port"
        )
        raise OutpaceError(f"cannot listen on {host} port {port}: {error.strerror or error}; {remedy}") from error
    return listener

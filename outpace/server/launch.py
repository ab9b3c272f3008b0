"""From a loaded model to a process that serves until it is told to stop, and ends cleanly when it is."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from outpace.engine.async_engine import AsyncEngine
from outpace.errors import OutpaceError
from outpace.server.app import create_app
from outpace.server.config import ServerConfig

if TYPE_CHECKING:
    from fastapi import FastAPI

    from outpace.llm import LLM

log = logging.getLogger("outpace.server")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# The engine's thread holds the interpreter between model passes, and every system call of the event loop has to ask for
# it back: with CPython's 5 ms that made streams to 64 readers late by tenths of a second.
_SWITCH_SECONDS = 0.0002
_COLLECTION_SECONDS, _MOST_ROUNDS, _NEVER = 10.0, 6, 10**9
_FAREWELL_SECONDS = 5  # for streams that were told to end to be written out


class Server(uvicorn.Server):
    """uvicorn, which in addition lets answers finish for a while after a signal and then ends them politely."""

    def __init__(self, app: FastAPI, engine: AsyncEngine, config: ServerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                # Measured: httptools and uvloop save nothing here, most of an event's cost being its system call; and
                # h11 bounds the size of headers.
                http="h11",
                loop="asyncio",
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                limit_concurrency=config.max_connections,
                timeout_graceful_shutdown=round(config.shutdown_timeout + _FAREWELL_SECONDS),
            )
        )
        self._engine = engine
        self._shutdown_timeout = config.shutdown_timeout
        engine.on_death = self.end

    def end(self) -> None:
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's own, does not raise the signal again afterwards: a clean end is exit status 0."""
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
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._collecting = asyncio.create_task(_collect_garbage(self._engine))
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.drain()
        if self._engine.num_open:
            log.info("stopping; up to %g s for %d answers to finish", self._shutdown_timeout, self._engine.num_open)
        ending = asyncio.create_task(self._end_late_answers())
        await super().shutdown(sockets)
        ending.cancel()
        self._collecting.cancel()

    async def _end_late_answers(self) -> None:
        await asyncio.sleep(self._shutdown_timeout)
        self._engine.end_all("the server is shutting down and the answer was not complete in time; ask again")


async def _collect_garbage(engine: AsyncEngine) -> None:
    """Full collections when nobody waits, or rarely.

    They stop every thread for as long as it takes to look at all that lives, the suffix store's many thousand objects
    among them: tenths of a second, which Python would choose to spend every few seconds of heavy traffic.
    """
    gc.freeze()  # what is here before the first request stays
    youngest, middle, oldest = gc.get_threshold()
    gc.set_threshold(youngest, middle, _NEVER)
    rounds = 0
    try:
        while True:
            await asyncio.sleep(_COLLECTION_SECONDS)
            rounds += 1
            if engine.num_open == 0 or rounds >= _MOST_ROUNDS:
                gc.collect()
                rounds = 0
    finally:
        gc.unfreeze()
        gc.set_threshold(youngest, middle, oldest)


def serve(llm: LLM, config: ServerConfig) -> int:
    """Serve until a signal or the engine's death; gives the exit status."""
    listener = listen(config.host, config.port)
    engine = AsyncEngine(llm.engine, max_queued=config.max_queued)
    app = create_app(engine, llm.tokenizer, config, max_context=llm.config.max_context)
    host, port = listener.getsockname()[:2]
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    log.info("serving %s at %s (API /v1, reference /docs, metrics /metrics)", config.model_names[0], where)
    Server(app, engine, config).run(sockets=[listener])
    engine.join()  # a second signal skips the orderly end
    if engine.failure is not None:
        log.critical("stopped, because the engine has failed: %s", engine.failure)
        return 1
    log.info("stopped")
    return 0


def listen(host: str, port: int) -> socket.socket:
    """A port, taken before the first request is promised anything; with a sentence where it is not to be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        remedy = "stop what uses it or choose another --port" if taken else "choose another --host or --port"
        raise OutpaceError(f"cannot listen on {host} port {port}: {error.strerror or error}; {remedy}") from error
    return listener

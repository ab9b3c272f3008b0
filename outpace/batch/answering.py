"""Answers requests by the server's own routes, in this process and without a network, so answers are the server's."""

from __future__ import annotations

import json
from dataclasses import replace
from types import TracebackType
from typing import Any

import httpx

from outpace.backends.base import Tokenizer
from outpace.batch.lines import BatchRequest, Line, answered
from outpace.engine.async_engine import AsyncEngine
from outpace.engine.engine import Engine
from outpace.errors import OutpaceError
from outpace.server.app import create_app
from outpace.server.config import ServerConfig

NO_LIMIT = 1 << 30  # for limits that protect a server from its clients
_UNAVAILABLE = 503
_KEPT_BUSY = 2  # requests at once, in multiples of what the engine runs at once: the next ones are ready when one ends


def unlimited(server: ServerConfig, timeout: float | None = None) -> ServerConfig:
    """The settings without the limits that protect a server from its clients. `timeout`: of an answer, in seconds."""
    return replace(
        server,
        api_keys=(),
        max_connections=NO_LIMIT,
        max_request_bytes=NO_LIMIT,
        request_timeout=NO_LIMIT if timeout is None else timeout,
        log_interval=0.0,
    )


class EngineEnded(OutpaceError):
    """The engine has stopped. The lines that it was answering have no result, and a resumed batch answers them."""


class Answerer:
    """`async with` starts and stops the engine's thread."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, config: ServerConfig, *, max_context: int) -> None:
        self.num_at_once = _KEPT_BUSY * engine.max_running
        self.engine = AsyncEngine(engine, max_queued=NO_LIMIT)
        self._app = create_app(self.engine, tokenizer, config, max_context=max_context)

    async def __aenter__(self) -> Answerer:
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()
        transport = httpx.ASGITransport(app=self._app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=None)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()
        await self._lifespan.__aexit__(kind, error, trace)

    async def answer(self, line: Line, request: BatchRequest) -> dict[str, Any]:
        """The result of one line. Raises EngineEnded if that is no fault of the line."""
        response = await self._client.post(
            request.url, content=json.dumps(request.body).encode(), headers={"content-type": "application/json"}
        )
        if response.status_code == _UNAVAILABLE:
            raise EngineEnded(f"the engine has stopped: {response.json()['error']['message']}")
        request_id = response.headers["x-request-id"]
        return answered(line, request.custom_id, response.status_code, request_id, response.json())

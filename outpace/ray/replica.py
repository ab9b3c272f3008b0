"""A replica: one engine with the server's own app around it, as a deployment of Ray Serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from outpace.engine.async_engine import AsyncEngine
from outpace.engine.learned import learned_by, setting_of, take
from outpace.llm import LLM
from outpace.ray.asgi import messages, send_text
from outpace.ray.board import METRICS_TYPE
from outpace.ray.priority import run_at_once
from outpace.server import logs
from outpace.server.app import create_app
from outpace.server.config import ServerConfig
from outpace.server.interpreter import keep_responsive

if TYPE_CHECKING:
    from outpace.models.generation_config import GenerationChoice

log = logging.getLogger("outpace.ray")
_REPORT_SECONDS = 2.0


class EngineReplica:
    """`generation`: where sampling settings of requests without their own come from."""

    def __init__(self, engine: dict[str, Any], config: ServerConfig, generation: GenerationChoice, board: Any) -> None:
        logs.configure(config.log_level, config.log_format)
        run_at_once()
        self._board = board
        self.name = serve.get_replica_context().replica_id.unique_id
        self._llm = LLM(**engine)
        defaults = generation.settle(Path(self._llm.config.model))
        config = replace(config, default_sampling=defaults.values)
        self._setting = setting_of(self._llm.engine)
        learned = ray.get(board.learned.remote(self._setting))
        if learned is not None:
            take(self._llm.engine, learned)
            log.info("took over what another replica has learned")
        self._llm.engine.calibrate()
        self._engine = AsyncEngine(self._llm.engine, max_queued=config.max_queued)
        self._app = create_app(self._engine, self._llm.tokenizer, config, max_context=self._llm.config.max_context)
        self._starting = asyncio.Lock()
        self._lifespan: Any = None

    async def _start(self) -> None:
        """Start the engine's thread; needs the event loop that requests run in."""
        async with self._starting:
            if self._lifespan is None:
                run_at_once()
                self._lifespan = self._app.router.lifespan_context(self._app)
                await self._lifespan.__aenter__()
                self._tasks = [asyncio.create_task(each) for each in (self._report(), keep_responsive(self._engine))]

    async def answer(
        self, scope: dict[str, Any], body: bytes, routed: bytes = b""
    ) -> AsyncIterator[list[dict[str, Any]]]:
        """The ASGI messages that answer a request from the front, some at a time. `routed` is for the router."""
        await self._start()
        async for some in messages(self._app, scope, body):
            yield some

    def __serve_build_asgi_app__(self) -> Any:
        """The app for requests that come from HAProxy. Ray calls this after the constructor."""

        async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                return  # `_start` runs the app's lifespan, as for the front
            await self._start()
            if scope["path"].removeprefix(scope.get("root_path", "")) == "/metrics":
                await send_text(send, 200, await self._board.metrics.remote(), METRICS_TYPE)
            else:
                await self._app(scope, receive, send)

        return app

    async def check_health(self) -> None:
        """Ray replaces a replica for which this raises."""
        if self._engine.failure is not None:
            raise RuntimeError(self._engine.failure)
        await self._start()

    async def _report(self) -> None:
        from prometheus_client import generate_latest

        registry = self._app.state.outpace.registry
        while True:
            self._board.report.remote(self.name, generate_latest(registry).decode())
            learned = self._engine.call(lambda: learned_by(self._llm.engine))
            self._board.teach.remote(self._setting, await asyncio.wrap_future(learned))
            await asyncio.sleep(_REPORT_SECONDS)

    async def __del__(self) -> None:
        """Ray calls this when the replica is to end, after its requests have ended."""
        self._board.leave.remote(self.name)
        if self._lifespan is not None:
            for task in self._tasks:
                task.cancel()
            await self._lifespan.__aexit__(None, None, None)
        self._llm.close()

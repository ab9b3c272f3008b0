"""The app factory: it builds an ASGI application from an AsyncEngine, a tokenizer and a ServerConfig. No globals."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

import outpace
from outpace.backends.base import Tokenizer
from outpace.engine.async_engine import AsyncEngine
from outpace.metrics import log_line, summary
from outpace.models import prompts
from outpace.server import completions, embeddings, errors, info
from outpace.server.config import ServerConfig
from outpace.server.gate import Gate
from outpace.server.messages import routes as messages
from outpace.server.page import page_router
from outpace.server.responses import route as responses
from outpace.server.state import ServerState

log = logging.getLogger("outpace.server")


def create_app(engine: AsyncEngine, tokenizer: Tokenizer, config: ServerConfig, *, max_context: int) -> FastAPI:
    """Build the app. The engine's thread runs from the application's startup to its shutdown."""
    state = ServerState(engine, tokenizer, config, max_context)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        state.workers.submit(prompts.prepare, tokenizer)
        tasks = [asyncio.create_task(state.http.watch_lag())]
        if config.log_interval:
            tasks.append(asyncio.create_task(_log_engine(engine, config.log_interval)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await engine.stop()
            state.workers.shutdown(wait=False)

    app = FastAPI(
        title="Outpace",
        version=outpace.__version__,
        summary="The OpenAI API, and Anthropic's, over speculative decoding: lossless, never slower, visible.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load scripts from elsewhere; server/page.py has our own
        redoc_url=None,
    )
    app.state.outpace = state
    app.root_path = config.root_path  # as uvicorn's, it would not work where the proxy leaves it in the path
    errors.install(app)
    app.include_router(completions.router)
    app.include_router(responses.router)
    app.include_router(messages.router)
    app.include_router(embeddings.router)
    app.include_router(info.router)
    app.include_router(page_router(has_page=config.page))
    app.add_middleware(Gate, config=config, metrics=state.http)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


async def _log_engine(engine: AsyncEngine, seconds: float) -> None:
    """Log one line about the engine every `seconds`, if its counters have changed."""
    before, began = summary(engine.metrics), perf_counter()
    while True:
        await asyncio.sleep(seconds)
        now, at = summary(engine.metrics), perf_counter()
        if now != before:
            log.info(log_line(before, now, at - began), extra={"facts": {"engine": now}})
        before, began = now, at

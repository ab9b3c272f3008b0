"""The event stream of the page's live view: snapshots of the engine, a few a second, shared by all who watch.

Nothing is looked at while nobody watches. Each snapshot is taken once in the engine's thread and encoded once. More
watchers get fewer of them: writing an event takes a core from the running step, so their rate is limited in total.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

import outpace
from outpace.engine.async_engine import AsyncEngine
from outpace.engine.watch import Watch
from outpace.server.errors import ApiError
from outpace.server.replies import event
from outpace.server.streaming import EVENT_HEADERS

if TYPE_CHECKING:
    from outpace.server.state import ServerState

MAX_WATCHERS = 64
_SHORTEST_PERIOD = 0.25  # seconds between snapshots
_EVENTS_PER_SECOND = 30  # to all watchers together
_PATIENCE = 1.0  # seconds to wait for a snapshot before looking whether the engine still runs


@dataclass(eq=False)
class Watcher:
    news: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False

    async def watch_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end()

    def end(self) -> None:
        self.is_over = True
        self.news.set()


class Live:
    """All watchers of one server. It belongs to the event loop."""

    def __init__(self, engine: AsyncEngine, max_connections: int) -> None:
        self._engine = engine
        self.max_watchers = max(1, min(MAX_WATCHERS, max_connections // 4))  # the others are for requests
        self._watch = Watch(engine.engine, engine.metrics)
        self._watchers: set[Watcher] = set()
        self._task: asyncio.Task[None] | None = None
        self.latest = b""  # an event

    @property
    def is_open(self) -> bool:
        return self._engine.is_accepting

    def enter(self, watcher: Watcher) -> None:
        if len(self._watchers) >= self.max_watchers:
            message = f"{self.max_watchers} others watch already, as many as allowed; try again later"
            raise ApiError(429, message, code="too_many_watchers", headers={"Retry-After": "10"})
        self._watchers.add(watcher)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look_while_watched())

    def leave(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)

    async def _look_while_watched(self) -> None:
        self._engine.call(self._watch.begin)
        try:
            while self._watchers and self.is_open:
                snapshot = await self._snapshot()
                if snapshot is not None:
                    self.latest = event(snapshot, "live")
                    for watcher in self._watchers:
                        watcher.news.set()
                await asyncio.sleep(max(_SHORTEST_PERIOD, len(self._watchers) / _EVENTS_PER_SECOND))
        finally:
            self._engine.call(self._watch.end)
            for watcher in self._watchers:  # if the server stops
                watcher.end()

    async def _snapshot(self) -> dict[str, Any] | None:
        """None if the engine has stopped: then nobody answers."""
        answer = asyncio.wrap_future(self._engine.call(self._watch.look))
        while self.is_open:
            with suppress(TimeoutError):
                return await asyncio.wait_for(asyncio.shield(answer), _PATIENCE)
        return None


class LiveStream(Response):
    def __init__(self, live: Live, facts: dict[str, Any]) -> None:
        super().__init__()
        self._live, self._facts = live, facts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = Watcher()
        self._live.enter(watcher)
        disconnect = asyncio.create_task(watcher.watch_disconnect(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
            await send({"type": "http.response.body", "body": event(self._facts, "about"), "more_body": True})
            while True:
                await watcher.news.wait()
                watcher.news.clear()
                if watcher.is_over:
                    break
                # A slow reader waits here and gets the newest snapshot next.
                await send({"type": "http.response.body", "body": self._live.latest, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            disconnect.cancel()
            self._live.leave(watcher)


def about(state: ServerState) -> dict[str, Any]:
    """What does not change while the server runs."""
    engine, config = state.engine.engine, state.engine.engine.config
    return {
        "version": outpace.__version__,
        "model": state.model_name,
        "backend": config.backend,
        "speculation": config.speculation,
        "methods": engine.methods,
        "depth": {"on": config.depth, "auto": config.auto_depth},
        "exact_to_the_bit": engine.exact_to_the_bit,
        "lossy": state.config.default_speculation.is_lossy,
        "allowed_loss": config.allowed_loss,
        "max_context": state.max_context,
        "max_output_tokens": state.config.max_output_tokens,
        "max_running": engine.max_running,
        "cache_tokens": engine.capacity.cache_tokens,
        "sampling": dict(state.config.default_sampling),
    }

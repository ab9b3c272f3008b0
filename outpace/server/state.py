"""The state that the routes share. It is one object on the app, so that a process can hold several servers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from threading import Event
from time import time
from typing import TYPE_CHECKING, TypeVar

from fastapi import Request
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from outpace.backends.base import Tokenizer
from outpace.engine.async_engine import AsyncEngine
from outpace.engine.engine import Engine
from outpace.metrics import Histogram
from outpace.models.reasoning import reasoning_for
from outpace.models.reasoning.syntax import ReasoningSyntax
from outpace.models.tool_calls import syntax_for
from outpace.server.config import ServerConfig
from outpace.server.errors import CLIENT_LEFT, ApiError
from outpace.server.exporter import Exporter
from outpace.server.live import Live
from outpace.server.scored import TokenTexts

if TYPE_CHECKING:
    from prometheus_client import Metric

R = TypeVar("R")
Check = Callable[[], None]  # raises an error if the work is no longer wanted

_SMALL_BYTES = 2048  # of a request body: up to here, tokenising costs less than switching threads
_LAG_SAMPLE_SECONDS = 0.05
_LAGS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class HttpMetrics(Collector):
    """HTTP responses and the lag of the event loop."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()  # by route and status
        self.lag = Histogram(_LAGS)

    async def watch_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_SAMPLE_SECONDS
            await asyncio.sleep(_LAG_SAMPLE_SECONDS)
            self.lag.observe(max(0.0, loop.time() - due))

    def collect(self) -> Iterator[Metric]:
        responses = CounterMetricFamily(
            "outpace_http_responses", "Responses, by route and status.", labels=["route", "status"]
        )
        for (route, status), count in sorted(dict(self.responses).items()):
            responses.add_metric([route, str(status)], count)
        yield responses
        lag = HistogramMetricFamily("outpace_event_loop_lag_seconds", "How late the event loop wakes a sleeping task.")
        lag.add_metric([], self.lag.buckets(), self.lag.total)
        yield lag


@dataclass
class ServerState:
    engine: AsyncEngine
    tokenizer: Tokenizer
    config: ServerConfig
    max_context: int
    created: int = field(default_factory=lambda: int(time()))
    http: HttpMetrics = field(default_factory=HttpMetrics)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    # Tokenise and render long prompts, which takes milliseconds and would block the event loop.
    workers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "outpace-text"))

    def __post_init__(self) -> None:
        self.texts = TokenTexts(self.tokenizer)
        self.live = Live(self.engine, self.config.max_connections)
        self.call_syntax = syntax_for(self.tokenizer.chat_template, self.config.tool_call_parser)
        if self.config.reasoning_parser != "auto":
            _ = self.reasoning_syntax  # a wrong name is reported now
        self.registry.register(Exporter(self.engine.metrics, self.model_name, _cache_facts(self.engine.engine)))
        self.registry.register(self.http)

    @cached_property
    def reasoning_syntax(self) -> ReasoningSyntax | None:
        """Looked up at the first chat: reading the added tokens takes a tenth of a second."""
        return reasoning_for(self.tokenizer, self.config.reasoning_parser)

    @property
    def model_name(self) -> str:
        return self.config.model_names[0]

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.config.model_names:
            message = f"the model {name!r} is not served here; /v1/models lists the names"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def offload(self, request: Request, work: Callable[[Check], R], *, is_long: bool = False) -> R:
        """Run `work` on the request's text, in a worker thread so that the event loop goes on if the request is large
        or the work takes long for another reason.

        If the client disconnects, work that waits for a thread is dropped. Running work should call its argument now
        and then: it raises an error once the client has left.
        """
        if not is_long and len(await request.body()) <= _SMALL_BYTES:
            return work(lambda: None)
        has_left = Event()

        def check() -> None:
            if has_left.is_set():
                raise _client_left()

        running = asyncio.get_running_loop().run_in_executor(self.workers, lambda: work(check))
        watcher = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait((running, watcher), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise _client_left()
            return running.result()
        finally:
            has_left.set()
            watcher.cancel()
            running.cancel()


def _cache_facts(engine: Engine) -> dict[str, str]:
    """The labels that vLLM gives its cache. Cache is counted in tokens here, so a block has one."""
    config = engine.config
    return {
        "block_size": "1",
        "num_gpu_blocks": str(engine.capacity.cache_tokens),
        "cache_dtype": config.dtype,
        "enable_prefix_caching": str(config.prefix_reuse),
        "gpu_memory_utilization": f"{config.gpu_memory_utilization:g}",
    }


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _client_left() -> ApiError:
    return ApiError(CLIENT_LEFT, "the client disconnected before its request was read")


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.outpace
    return state

"""A live server on a free port, in this process, over any engine."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.request import urlopen

from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from outpace.backends.base import Tokenizer
from outpace.engine.async_engine import AsyncEngine
from outpace.engine.engine import Engine
from outpace.server.app import create_app
from outpace.server.config import ServerConfig
from outpace.server.launch import Server, listen

R = TypeVar("R")


class LiveServer:
    def __init__(self, engine: Engine, tokenizer: Tokenizer, max_context: int, **options: Any) -> None:
        defaults: dict[str, Any] = {"model_names": ("fake",), "log_interval": 0.0}
        config = ServerConfig(**(defaults | options))
        self.engine = engine
        self.async_engine = AsyncEngine(engine, max_queued=config.max_queued)
        self.app = create_app(self.async_engine, tokenizer, config, max_context=max_context)
        self.server = Server(self.app, self.async_engine, config)
        listener = listen(config.host, options.get("port", 0))  # any free one, unless the test names one
        self.port: int = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        wait_until(lambda: self.server.started)

    def client(self, **options: Any) -> Any:
        defaults: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 60}
        return OpenAI(base_url=f"{self.url}/v1", **(defaults | options))

    def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> tuple[int, Any, dict[str, str]]:
        """Status, decoded JSON and headers of one request."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", path, data, {"content-type": "application/json"} | (headers or {}))

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any, dict[str, str]]:
        return self.ask("GET", path, None, headers or {})

    def ask(
        self, method: str, path: str, data: bytes | None, headers: dict[str, str]
    ) -> tuple[int, Any, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            text = response.read().decode()
            is_json = (response.headers.get_content_type()) == "application/json"
            return (
                response.status,
                json.loads(text) if is_json else text,
                {k.lower(): v for k, v in response.getheaders()},
            )
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """Every sample by its name, with all labels except model_name."""
        _, text, _ = self.get("/metrics")
        samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
                shown = "{" + ",".join(f"{k}={v}" for k, v in sorted(labels.items())) + "}" if labels else ""
                samples[sample.name + shown] = sample.value
        return samples

    def wait_until_idle(self) -> None:
        wait_until(lambda: not self.engine.has_requests and self.async_engine.num_open == 0)

    def check_clean(self) -> None:
        """Check that no sequence, cache cell or ticket is left when nothing runs; kept prefixes are dropped first."""
        self.wait_until_idle()
        self.aside(self._check_clean)

    def _check_clean(self) -> None:
        assert not self.async_engine._worker.tickets and not self.async_engine._open
        self.engine.scheduler.check_integrity()
        self.engine.scheduler.forget_kept()
        self.engine.scheduler.check_integrity()
        cache = self.engine._cache
        assert cache.num_open_sequences == 0
        assert cache.num_free_tokens == self.engine.capacity.cache_tokens

    def aside(self, work: Callable[[], R]) -> R:
        """Run `work` in the engine's own thread, between steps."""
        return self.async_engine.call(work).result(timeout=120)

    def loop_cpu_seconds(self) -> float:
        """CPU time of the event loop's thread."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server did not stop"


@contextmanager
def live(engine: Engine, tokenizer: Tokenizer, max_context: int, **options: Any) -> Iterator[LiveServer]:
    server = LiveServer(engine, tokenizer, max_context, **options)
    try:
        yield server
    finally:
        server.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def wait_until_healthy(port: int, child: subprocess.Popen[bytes]) -> str:
    """The address of a server in another process, once it answers."""

    def is_healthy() -> bool:
        assert child.poll() is None, f"the server ended with status {child.returncode}"
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    wait_until(is_healthy, 120.0)
    return f"http://127.0.0.1:{port}"


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)

"""`outpace serve --replicas` in a process of its own, on a Ray cluster that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openai import APIError, OpenAI

from tests.server_helper import free_port, wait_until


class Cluster:
    def __init__(self, num_replicas: int, *flags: str) -> None:
        """`num_replicas`: that run once it has started."""
        self.port = free_port()
        command = [sys.executable, "-m", "outpace", "serve", "--port", str(self.port), "--replica-cpus", "0.5", *flags]
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        self.process = subprocess.Popen(command, env=environment)
        try:
            wait_until(self._is_healthy, 300)
            wait_until(lambda: len(self.replicas()) == num_replicas, 120)
        except BaseException:
            self.process.kill()
            raise

    def client(self, **options: Any) -> Any:
        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", timeout=60, **options)

    def _is_healthy(self) -> bool:
        assert self.process.poll() is None, "the cluster did not start"
        try:
            return bool(self.client(max_retries=0).models.list().data)
        except APIError:
            return False

    def replicas(self) -> set[int]:
        """The processes of the engines."""
        found = set()
        for folder in Path("/proc").iterdir():
            try:
                is_engine = (folder / "cmdline").read_bytes().startswith(b"ray::ServeReplica:outpace:Engine")
            except OSError:
                continue
            if is_engine:
                found.add(int(folder.name))
        return found

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(120) == 0
        wait_until(lambda: not self.replicas(), 60)


class Clients:
    """Threads that ask again and again, one question each at a time, until they are stopped."""

    def __init__(self, number: int, ask: Callable[[int, bool], str]) -> None:
        """`ask(client, is_streamed)` gives an answer."""
        self._ask = ask
        self._is_over = threading.Event()
        self.answers: list[list[str]] = [[] for _ in range(number)]
        self.errors: list[str] = []
        self.longest = 0.0  # seconds of an answer
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(number)]
        for thread in self._threads:
            thread.start()

    def _run(self, client: int) -> None:
        while not self._is_over.is_set():
            begin = time.monotonic()
            try:
                self.answers[client].append(self._ask(client, bool(len(self.answers[client]) % 2)))
            except Exception as error:  # of whatever kind: the answer is lost
                self.errors.append(repr(error))
            self.longest = max(self.longest, time.monotonic() - begin)

    def wait_for_answers(self, more: int = 3) -> None:
        """Until each client has so many more."""
        wanted = [len(each) + more for each in self.answers]
        wait_until(lambda: all(len(each) >= n for each, n in zip(self.answers, wanted, strict=True)), 120)

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

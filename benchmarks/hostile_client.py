"""Abusive clients for `benchmarks.serve_load hostile`, in their own process: slow, huge, vanishing and malformed ones.

It reads a job from stdin (JSON, see `Job`), runs a quarter of the clients of each kind, each with one attack after the
other, and writes how many attacks of each kind ended how. To ask for as many completions as the queue holds is not
among them: without limits per client, nothing tells that from heavy use.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from random import Random
from threading import Thread
from time import perf_counter, process_time, sleep
from typing import Any

from tests.server.hostile_requests import as_http, broken_http, broken_json, deep, wrong_fields

_TIMEOUT = 5.0
_SLOW_CONNECTIONS = 16  # of one slow client at once
_SLOW_SECONDS = 2.0
_HUGE = 900_000  # bytes, a little less than --max-request-bytes
_LONG = {"prompt": "Write a very long story.", "max_tokens": 200, "ignore_eos": True, "stream": True, "logprobs": 5}
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})[^\r\n]*\r\n")
_HALF_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx: "


@dataclass(slots=True)
class Job:
    port: int
    seconds: float
    clients: int = 32
    seed: int = 1


def _long_request() -> bytes:
    return as_http("/v1/completions", json.dumps(_LONG).encode())


@cache
def _huge_requests() -> list[bytes]:
    prompts = (
        json.dumps("word " * (_HUGE // 5)),
        json.dumps("<|im_end|>" * (_HUGE // 10)),
        "[" + ",".join(["1.5"] * (_HUGE // 4)) + "]",
        "[" + ",".join(['"a"'] * (_HUGE // 4)) + "]",
        json.dumps("a" * 8 * _HUGE),
    )
    return [as_http("/v1/completions", f'{{"max_tokens": 8, "prompt": {prompt}}}'.encode()) for prompt in prompts]


class Abuser:
    def __init__(self, job: Job, number: int) -> None:
        self._job = job
        self._rng = Random(f"{job.seed}:{number}")
        kinds: tuple[Callable[[], str], ...] = (self._slow, self._huge, self._vanishing, self._malformed)
        self._attack = kinds[number % len(kinds)]
        self.outcomes: Counter[str] = Counter()

    def run(self) -> None:
        end = perf_counter() + self._job.seconds
        while perf_counter() < end:
            try:
                outcome = self._attack()
            except OSError as error:
                outcome = type(error).__name__
            self.outcomes[f"{self._attack.__name__.strip('_')}: {outcome}"] += 1

    def _slow(self) -> str:
        """Holds many connections: heads and bodies that come byte by byte, and answers that nobody reads."""
        half_body = as_http("/v1/completions", json.dumps({"prompt": "ab" * 500}).encode())[:-100]
        starts = [_HALF_HEAD] * (_SLOW_CONNECTIONS - 5) + [half_body] * 4 + [_long_request()]
        with ExitStack() as held:
            connections = [held.enter_context(self._connect()) for _ in starts]
            for connection, start in zip(connections, starts, strict=True):
                connection.sendall(start)
            end = perf_counter() + _SLOW_SECONDS
            while perf_counter() < end:
                sleep(0.05)
                for connection in connections[:-5]:
                    with suppress(OSError):  # the server may have closed it
                        connection.send(b"y")
        return f"{_SLOW_CONNECTIONS} connections held"

    def _huge(self) -> str:
        """Bodies just below the limit of a megabyte, whose text or lists cannot be meant, and bodies far above it."""
        return self._status(self._rng.choice(_huge_requests()))

    def _vanishing(self) -> str:
        """Asks for a long answer and leaves: at once or after some of it, in order or by a reset."""
        with self._connect() as connection:
            connection.sendall(_long_request())
            if self._rng.random() < 0.5:
                connection.recv(self._rng.choice((1, 1000)))
            if self._rng.random() < 0.5:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return "left"

    def _malformed(self) -> str:
        if self._rng.random() < 0.5:
            return self._status(broken_http(self._rng))
        return self._status(as_http(*self._rng.choice((broken_json, wrong_fields, deep))(self._rng)))

    def _status(self, data: bytes) -> str:
        with self._connect() as connection:
            with suppress(ConnectionError):  # refused before the end
                connection.sendall(data)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            with suppress(ConnectionError):
                while part := connection.recv(1 << 16):
                    answer += part
        statuses = [status for status in _STATUS.findall(answer) if status != b"100"]
        return statuses[0].decode() if statuses else "no answer"

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._job.port), timeout=_TIMEOUT)


def run(job: Job) -> dict[str, Any]:
    cpu_began = process_time()
    abusers = [Abuser(job, number) for number in range(job.clients)]
    threads = [Thread(target=abuser.run) for abuser in abusers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcomes = sum((abuser.outcomes for abuser in abusers), Counter[str]())
    return {"cpu_seconds": process_time() - cpu_began, "outcomes": dict(outcomes)}


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(run(Job(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()

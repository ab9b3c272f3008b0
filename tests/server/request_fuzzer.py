"""Sends hostile requests to a live server with the fake model, and checks what every server owes every client.

    python -m tests.server.request_fuzzer --seconds 600            a long run; prints counts, exits with 1 on a failure
    python -m tests.server.request_fuzzer --seed 1 --only 1234     one case again

No answer may have status 500, nothing may write a traceback or an error to the log, /health must answer all the time,
and afterwards no request, cache page or connection is left. A case depends only on the seed and its number.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from random import Random
from threading import Event, Lock, Thread
from typing import Any

from tests.fakes import ByteTokenizer, fake_engine
from tests.server.hostile_requests import BODIES, as_http, broken_http
from tests.server_helper import LiveServer, wait_until

HEALTH_SECONDS = 10.0  # a server that needs longer does not answer
ANSWER_SECONDS = 30.0
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})[^\r\n]*\r\n")
_WORKERS = 6
# Its few words about tools leave room for an answer in the short context.
_TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name[:20] }} {% endfor %}{% for m in messages %}{{ m.role }}: "
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}\n{% endfor %}"
    "assistant:"
)


class Fuzzer:
    def __init__(self, seed: int) -> None:
        engine = fake_engine(max_context=256, cache_tokens=2048, max_sequences=8)
        engine.calibrate()
        options: dict[str, Any] = {
            "max_request_bytes": 200_000,
            "max_queued": 32,
            "max_output_tokens": 32,
            "max_connections": 64,
        }
        self._log = _Log()
        tokenizer = ByteTokenizer()
        tokenizer.chat_template = _TEMPLATE
        options |= {"request_timeout": 20.0, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
        self._server = LiveServer(engine, tokenizer, 256, **options)
        self._seed = seed
        self._lock = Lock()
        self._done = Event()
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.longest_health = 0.0

    def run(self, *, seconds: float | None = None, cases: int | None = None, only: int | None = None) -> None:
        began = time.monotonic()
        numbers = iter([only]) if only is not None else count()

        def work() -> None:
            while seconds is None or time.monotonic() - began < seconds:
                with self._lock:
                    number = next(numbers, None)
                if number is None or (cases is not None and number >= cases):
                    return
                self.case(number)

        health = Thread(target=self._watch_health)
        health.start()
        with ThreadPoolExecutor(_WORKERS) as pool:
            for future in [pool.submit(work) for _ in range(_WORKERS)]:
                future.result()
        self._done.set()
        health.join()
        self._server.check_clean()
        wait_until(lambda: not self._server.server.server_state.connections)
        self._server.stop()
        self.failures += self._log.close()

    def case(self, number: int) -> None:
        rng = Random(f"{self._seed}:{number}")
        kind: Callable[[Random], str] = rng.choices(
            (self._whole, self._broken, self._half_closed, self._vanishing, self._slow), (10, 6, 1, 2, 1)
        )[0]
        try:
            outcome = kind(rng)
        except Exception as error:
            outcome = f"failed with {error!r}"
        name = kind.__name__.strip("_")
        with self._lock:
            self.counts[f"{name}: {outcome}"] += 1
            if outcome.startswith(("500", "failed")):
                self.failures.append(f"case {number}, {name}: {outcome}")

    # ---- the kinds of clients; each returns what came of it

    def _whole(self, rng: Random) -> str:
        return self._answer(as_http(*rng.choice(BODIES)(rng)))

    def _half_closed(self, rng: Random) -> str:
        return self._answer(as_http(*rng.choice(BODIES)(rng), extra=b""), half_close=True)

    def _slow(self, rng: Random) -> str:
        data = as_http(*rng.choice(BODIES)(rng))[:2000]
        with self._connect() as connection, suppress(ConnectionError):
            for at in range(0, len(data), 200):
                connection.sendall(data[at : at + 200])
                time.sleep(0.002)
        return "left"

    def _vanishing(self, rng: Random) -> str:
        """Leaves at some point before, in or after the answer, by a reset or in order."""
        data = as_http(*rng.choice(BODIES)(rng), extra=b"")
        with self._connect() as connection, suppress(ConnectionError):
            connection.sendall(data[: rng.choice((len(data), rng.randrange(len(data))))])
            if rng.random() < 0.5:
                connection.settimeout(rng.random() * 0.05)
                with suppress(TimeoutError):
                    connection.recv(rng.choice((1, 100, 10_000)))
            if rng.random() < 0.5:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return "left"

    def _broken(self, rng: Random) -> str:
        """What is not HTTP need not be answered; but no answer is 500, and the connection ends with the client's."""
        with self._connect() as connection:
            with suppress(ConnectionError):
                data = broken_http(rng)
                at = rng.randrange(len(data) + 1)
                connection.sendall(data[:at])
                time.sleep(rng.choice((0, 0.01)))  # an answer may come before the rest
                connection.sendall(data[at:])
                _half_close(connection)
            statuses = [int(status) for status in _STATUS.findall(_received(connection))]
        return "500" if 500 in statuses else str(statuses[0] if statuses else "closed")

    def _answer(self, data: bytes, *, half_close: bool = False) -> str:
        """The status of the answer to what is valid HTTP; whatever else is wrong is explained in an error object."""
        with self._connect() as connection:
            with suppress(ConnectionError):  # a refusal may come before the end of the body
                connection.sendall(data)
                if half_close:
                    _half_close(connection)
            answer = _received(connection).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        found = _STATUS.match(answer)
        if found is None:
            return f"failed: no answer, but {answer[:80]!r}"
        status = int(found[1])
        body = answer.partition(b"\r\n\r\n")[2]
        if status >= 400 and not json.loads(body)["error"]["message"]:
            return f"failed: {status} without a message"
        return str(status)

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._server.port), timeout=ANSWER_SECONDS)

    def _watch_health(self) -> None:
        while not self._done.wait(0.05):
            began = time.monotonic()
            try:
                with socket.create_connection(("127.0.0.1", self._server.port), timeout=HEALTH_SECONDS) as connection:
                    connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                    answer = _received(connection)
                if not answer.startswith(b"HTTP/1.1 200"):
                    self.failures.append(f"/health answered {answer[:80]!r}")
            except OSError as error:
                self.failures.append(f"/health failed: {error!r}")
            self.longest_health = max(self.longest_health, time.monotonic() - began)


class _Log(logging.Handler):
    """Collects errors and tracebacks of the server, of uvicorn and of asyncio."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()
        # A server that ran earlier in this process has taken its loggers from the root.
        own = [logging.getLogger(name) for name in ("outpace", "uvicorn", "asyncio")]
        self._loggers = [logging.getLogger(), *(logger for logger in own if not logger.propagate)]
        for logger in self._loggers:
            logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            error = record.exc_info[1] if record.exc_info else None
            self.lines[f"log: {record.name}: {record.getMessage()[:200]} {error!r:.300}"] += 1

    def close(self) -> list[str]:  # type: ignore[override]
        for logger in self._loggers:
            logger.removeHandler(self)
        super().close()
        return [f"{line} ({number} times)" for line, number in self.lines.items()]


def _half_close(connection: socket.socket) -> None:
    with suppress(OSError):  # the server may have closed the connection
        connection.shutdown(socket.SHUT_WR)


def _received(connection: socket.socket) -> bytes:
    parts = []
    with suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run only this case")
    options = parser.parse_args()
    fuzzer = Fuzzer(options.seed)
    fuzzer.run(seconds=options.seconds, only=options.only)
    for outcome, number in sorted(fuzzer.counts.items()):
        print(f"{outcome:40}{number:8}")
    print(f"{'requests':40}{fuzzer.counts.total():8}")
    print(f"the slowest answer of /health took {fuzzer.longest_health:.3f} s")
    for failure in fuzzer.failures[:50]:
        print("FAILURE:", failure)
    print(f"{len(fuzzer.failures)} failures")
    return bool(fuzzer.failures)


if __name__ == "__main__":
    sys.exit(main())

"""Load generator for benchmarks.serve_load. It runs in its own process, so it does not share the server's GIL.

It reads a job from stdin (JSON, see `Job`), keeps `concurrency` requests in flight, and writes the answers and its CPU
time to stdout. CPU time of clients is missing from the server on a small machine. So it uses one thread and raw
sockets, collects bytes while requests are in flight, and parses them only afterwards.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from selectors import EVENT_READ, DefaultSelector
from socket import create_connection, socket
from time import perf_counter, process_time
from typing import Any

_LAST_CHUNK = b"\r\n0\r\n\r\n"  # JSON escapes line breaks, so no event contains this
_HEAD_END = b"\r\n\r\n"


@dataclass(slots=True)
class Job:
    port: int
    bodies: list[dict[str, Any]]  # sent in turn, repeatedly
    concurrency: int
    seconds: float | None = None  # send no request after this time
    count: int | None = None  # send no more than this many requests
    keep_alive: bool = True  # False: one connection per request

    def requests(self) -> list[bytes]:
        connection = "keep-alive" if self.keep_alive else "close"
        lines = ("POST /v1/completions HTTP/1.1", "host: localhost", "content-type: application/json")
        head = "\r\n".join((*lines, f"connection: {connection}"))
        bodies = [json.dumps(body).encode() for body in self.bodies]
        return [f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body for body in bodies]


@dataclass(slots=True)
class Exchange:
    """One request and the bytes of its answer."""

    connection: socket
    body: int
    sent_at: float
    raw: bytearray
    first_at: float = 0.0
    last_at: float = 0.0
    length: int | None = None  # of head and body, if the head has a content-length

    def take(self, data: bytes) -> bool:
        """Add bytes; True if the answer is complete. Empty `data`: the server has closed the connection."""
        if not self.raw:
            self.first_at = perf_counter()
        self.raw += data
        if self.length is None and (at := self.raw.find(b"content-length: ")) >= 0 and _HEAD_END in self.raw:
            length = int(self.raw[at + 16 : self.raw.index(b"\r\n", at)])
            self.length = self.raw.index(_HEAD_END) + len(_HEAD_END) + length
        is_whole = not data or self.raw.endswith(_LAST_CHUNK) or len(self.raw) == self.length
        if is_whole:
            self.last_at = perf_counter()
        return is_whole


def run(job: Job) -> dict[str, Any]:
    requests, finished = job.requests(), list[Exchange]()
    indices = count()
    began, cpu_began = perf_counter(), process_time()
    with DefaultSelector() as selector:

        def send_next(connection: socket | None = None) -> bool:
            index = next(indices)
            if (job.count is not None and index >= job.count) or (
                job.seconds is not None and perf_counter() - began >= job.seconds
            ):
                return False
            sent_at = perf_counter()
            if connection is None:
                connection = create_connection(("127.0.0.1", job.port), timeout=120)
            with suppress(ConnectionError):  # then it has no answer
                connection.sendall(requests[index % len(requests)])
            exchange = Exchange(connection, index % len(requests), sent_at, bytearray())
            if connection in selector.get_map():
                selector.modify(connection, EVENT_READ, exchange)
            else:
                selector.register(connection, EVENT_READ, exchange)
            return True

        for _ in range(job.concurrency):
            send_next()
        while selector.get_map():
            for key, _ in selector.select():
                exchange: Exchange = key.data
                if not exchange.take(received(exchange.connection)):
                    continue
                finished.append(exchange)
                if not (job.keep_alive and send_next(exchange.connection)):
                    selector.unregister(exchange.connection)
                    exchange.connection.close()
                    if not job.keep_alive:
                        send_next()
    seconds, cpu_seconds = perf_counter() - began, process_time() - cpu_began
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "answers": [answer(exchange) for exchange in finished]}


def received(connection: socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except ConnectionError:
        return b""


def answer(exchange: Exchange) -> dict[str, Any]:
    times = {"first": exchange.first_at - exchange.sent_at, "total": exchange.last_at - exchange.sent_at}
    raw = bytes(exchange.raw)
    try:
        return {"body": exchange.body} | times | text_of(raw)
    except (ValueError, IndexError):
        lost = {"status": None, "text": None, "num_tokens": 0, "error": f"not a whole answer: {raw[:200]!r}"}
        return {"body": exchange.body} | times | lost


def text_of(raw: bytes) -> dict[str, Any]:
    """Status, text and counts of an answer, streamed or not."""
    head, _, body = raw.partition(_HEAD_END)
    status = int(head.split(None, 2)[1])
    if b"chunked" in head.lower():
        body = b"".join(_chunks(body))
    if status != 200:
        return {"status": status, "text": None, "error": body.decode(errors="replace")[:300]}
    if b"text/event-stream" not in head.lower():
        reply = json.loads(body)
        return {"status": 200, "text": reply["choices"][0]["text"], "num_tokens": reply["usage"]["completion_tokens"]}
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        raise ValueError("a stream ended without [DONE]")
    decoded = [json.loads(event) for event in events[:-1]]
    errors = [event for event in decoded if "error" in event]
    if errors:
        return {"status": 200, "text": None, "error": str(errors[0])}
    text = "".join(choice["text"] for event in decoded for choice in event["choices"])
    usage = decoded[-1].get("usage")
    return {"status": 200, "text": text, "num_events": len(events), "num_tokens": usage and usage["completion_tokens"]}


def _chunks(body: bytes) -> list[bytes]:
    parts: list[bytes] = []
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if size == 0:
            return parts
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2


def main() -> None:
    """Run one job per line of stdin. The process stays up, so its start is not measured."""
    for line in sys.stdin:
        print(json.dumps(run(Job(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()

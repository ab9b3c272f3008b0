"""A load generator for benchmarks.serve_load, in a process of its own so that it shares no interpreter with the server.

Reads a job from stdin (JSON: port, concurrency, seconds or count, and the bodies to send), keeps that many requests in
flight over raw sockets, and writes what it got to stdout. It parses as little as it can: what clients use of a small
machine is missing from the server.
"""

from __future__ import annotations

import asyncio
import json
import sys
from time import perf_counter
from typing import Any


async def ask(port: int, body: dict[str, Any]) -> tuple[bytes, float, float]:
    """The raw body of one answer, and when its first and last byte came."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    try:
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close"
        writer.write(f"{head}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        first = await reader.read(1 << 16)
        first_at = perf_counter()
        rest = bytearray(first)
        while part := await reader.read(1 << 16):
            rest += part
        return bytes(rest), first_at, perf_counter()
    finally:
        writer.close()


def text_of(raw: bytes) -> dict[str, Any]:
    """What an answer said, whichever way it was sent."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status = int(head.split(None, 2)[1])
    if b"chunked" in head.lower():
        body = b"".join(_chunks(body))
    if status != 200:
        return {"status": status, "text": None, "error": body.decode(errors="replace")[:300]}
    if b"text/event-stream" not in head.lower():
        reply = json.loads(body)
        return {"status": 200, "text": reply["choices"][0]["text"], "num_tokens": reply["usage"]["completion_tokens"]}
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    assert events and events[-1] == b"[DONE]", "a stream ended without [DONE]"
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


async def run(job: dict[str, Any]) -> dict[str, Any]:
    bodies, results = job["bodies"], []
    next_index = 0
    began = perf_counter()

    def more() -> bool:
        if job.get("count") is not None:
            return bool(next_index < job["count"])
        return bool(perf_counter() - began < job["seconds"])

    async def client() -> None:
        nonlocal next_index
        while more():
            index = next_index
            next_index += 1
            sent_at = perf_counter()
            raw, first_at, last_at = await ask(job["port"], bodies[index % len(bodies)])
            results.append((index % len(bodies), raw, first_at - sent_at, last_at - sent_at))

    await asyncio.gather(*(client() for _ in range(job["concurrency"])))
    seconds = perf_counter() - began
    answers = [{"body": i, "first": first, "total": total} | text_of(raw) for i, raw, first, total in results]
    return {"seconds": seconds, "answers": answers}


def main() -> None:
    """One job a line, until the input ends: a process that is already up measures no start of its own."""
    for line in sys.stdin:
        print(json.dumps(asyncio.run(run(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()

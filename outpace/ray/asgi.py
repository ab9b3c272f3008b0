"""One HTTP request to an ASGI app as a stream of its messages, so that the request can cross processes.

A message from process to process costs far more than a token's share of a step, so the pieces of a streamed answer
that are ready at about the same time travel together, joined into one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

_PIECE_SECONDS = 0.02  # at least between two parts of a body: fifty a second read as a steady stream
_SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")


def plain_scope(scope: dict[str, Any]) -> dict[str, Any]:
    """The parts of a scope that can be sent to another process."""
    found = {name: scope[name] for name in _SCOPE if name in scope}
    found["headers"] = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    found["client"] = tuple(scope["client"]) if scope.get("client") else None
    found["server"] = tuple(scope["server"]) if scope.get("server") else None
    return found


async def messages(app: Any, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[dict[str, Any]]]:
    """What the app sends for this request, some messages at a time; the first part of the body without delay.

    The app sees a disconnect if the reader ends early.
    """
    sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()  # None: the app is done
    has_left, has_ended = asyncio.Event(), asyncio.Event()
    is_read = False

    async def receive() -> dict[str, Any]:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.put_nowait(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            has_ended.set()

    def end(_: object) -> None:
        sent.put_nowait(None)
        has_ended.set()

    task = asyncio.create_task(app(scope, receive, send))
    task.add_done_callback(end)
    try:
        is_open = True
        while is_open:
            batch = [await sent.get(), *(sent.get_nowait() for _ in range(sent.qsize()))]
            is_open = batch[-1] is not None
            found = joined([message for message in batch if message is not None])
            if found:
                yield found
            if found and found[-1]["type"] == "http.response.body":
                with suppress(TimeoutError):
                    await asyncio.wait_for(has_ended.wait(), _PIECE_SECONDS)
        await task
    finally:
        has_left.set()
        if not task.done():
            await asyncio.wait([task], timeout=1.0)
            task.cancel()


def joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same answer with consecutive parts of its body as one."""
    found = list[dict[str, Any]]()
    for message in messages:
        if found and message["type"] == found[-1]["type"] == "http.response.body":
            body = found[-1].get("body", b"") + message.get("body", b"")
            found[-1] = {**message, "body": body}
        else:
            found.append(message)
    return found


async def read_body(receive: Any) -> bytes | None:
    """The whole body; None if the client left before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def send_text(send: Any, status: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
    content = text.encode()
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})

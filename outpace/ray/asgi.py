"""One HTTP request to an ASGI app as a stream of its messages, so that the request can cross processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

_SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")


def plain_scope(scope: dict[str, Any]) -> dict[str, Any]:
    """The parts of a scope that can be sent to another process."""
    found = {name: scope[name] for name in _SCOPE if name in scope}
    found["headers"] = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    found["client"] = tuple(scope["client"]) if scope.get("client") else None
    found["server"] = tuple(scope["server"]) if scope.get("server") else None
    return found


async def messages(app: Any, scope: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
    """What the app sends for this request. The app sees a disconnect if the reader ends early."""
    sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    has_left = asyncio.Event()
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

    async def run() -> None:
        try:
            await app(scope, receive, send)
        finally:
            sent.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while (message := await sent.get()) is not None:
            yield message
        await task
    finally:
        has_left.set()
        if not task.done():
            await asyncio.wait([task], timeout=1.0)
            task.cancel()


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

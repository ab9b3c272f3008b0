"""The front: takes HTTP requests from Ray's proxy, and has each answered by the replica that the router chooses.

It is used where Ray Serve runs without HAProxy. With HAProxy, requests reach the replicas directly: see ingress.py.

A replica may die. If nothing of its answer was sent yet, another replica answers; else the client gets an error event,
or a broken connection, and never two answers in one.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayError

from outpace.ray.asgi import plain_scope, read_body, send_text
from outpace.ray.board import METRICS_TYPE
from outpace.ray.ingress import ENGINE
from outpace.ray.prefixes import routed_text
from outpace.ray.priority import run_at_once

_TRIES = 3
_LOST = "the replica that answered this request was lost; send the request again"

log = logging.getLogger("outpace.ray")


class FrontApp:
    """The ASGI app of the front. It finds the engine's deployment in its own application."""

    def __init__(self) -> None:
        self._handle: Any = None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if self._handle is None:
            run_at_once()
            self._handle = _engine_handle()
        if scope["path"] == "/metrics":
            await send_text(send, 200, await _metrics(), METRICS_TYPE)
            return
        body = await read_body(receive)
        if body is None:
            return
        routed = routed_text(body, _tenant(scope)) if scope["method"] == "POST" else b""
        answering = asyncio.create_task(self._answer(plain_scope(scope), body, routed, send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            is_done = answering.done()
            answering.cancel()  # if the client has left, the replica sees a disconnect
            await asyncio.gather(answering, leaving, return_exceptions=True)
        if is_done:
            answering.result()  # raises what went wrong

    async def _answer(self, scope: dict[str, Any], body: bytes, routed: bytes, send: Any) -> None:
        has_begun = is_stream = False
        for left in range(_TRIES - 1, -1, -1):
            stream = self._handle.remote(scope, body, routed=routed)
            try:
                async for messages in stream:
                    has_begun = True
                    for message in messages:
                        is_stream = is_stream or _is_stream(message)
                        await send(message)
                return
            except RayActorError:
                if has_begun or not left:
                    break
                log.warning("a replica was lost before it answered; another one answers")
            except RayError as error:
                log.error("a replica failed: %s", error)
                break
            finally:
                stream.cancel()
        lost = {"message": _LOST, "type": "service_unavailable_error", "param": None, "code": "unavailable"}
        if not has_begun:
            await _send_json(send, 503, {"error": lost}, [(b"retry-after", b"1")])
        elif is_stream:
            await send({"type": "http.response.body", "body": f"data: {json.dumps({'error': lost})}\n\n".encode()})
        else:
            raise RuntimeError(_LOST)  # breaks the connection: the body is shorter than its stated length


def _engine_handle() -> Any:
    handle = serve.get_deployment_handle(ENGINE, serve.get_replica_context().app_name)
    return handle.options(method_name="answer", stream=True)


async def _metrics() -> str:
    import ray

    from outpace.ray.application import BOARD, NAMESPACE

    board = ray.get_actor(f"{BOARD}:{serve.get_replica_context().app_name}", NAMESPACE)
    text: str = await board.metrics.remote()
    return text


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _tenant(scope: dict[str, Any]) -> str:
    keys = [value for name, value in scope["headers"] if name in (b"authorization", b"x-api-key")]
    return b" ".join(keys).decode("latin-1")


def _is_stream(message: dict[str, Any]) -> bool:
    """Whether an ASGI message begins a stream of events."""
    headers = message.get("headers", ()) if message["type"] == "http.response.start" else ()
    return any(value.startswith(b"text/event-stream") for name, value in headers if name == b"content-type")


async def _send_json(send: Any, status: int, content: Any, headers: list[tuple[bytes, bytes]]) -> None:
    headers = [(b"content-type", b"application/json"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})

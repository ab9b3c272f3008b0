"""Middleware for every request: it sets the request id, checks the API key or the origin, limits the body and how many
requests are answered at once, and writes a log line.

It is plain ASGI, so that streams pass through unbuffered and see when the client disconnects.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
from contextlib import suppress
from ipaddress import ip_address
from time import perf_counter
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outpace.engine.generation import EngineStopped
from outpace.server.config import ServerConfig
from outpace.server.errors import CLIENT_LEFT, ApiError, as_api_error, reply
from outpace.server.messages.errors import is_messages_path
from outpace.server.page import STATIC
from outpace.server.replies import Answer
from outpace.server.state import HttpMetrics

log = logging.getLogger("outpace.server")

_PLAIN_ID = re.compile(r"[\w.-]{1,128}", re.ASCII)
_OPEN_PATHS = frozenset({"/", "/health", "/version", "/metrics", "/docs", "/openapi.json"})
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_CLOSE = {"Connection": "close"}
_BODY_SECONDS = 60.0
# Parsing a large body blocks the event loop, for up to 50 ms a megabyte. So such bodies take turns, at this rate.
_LARGE_BYTES, _PARSED_BYTES_PER_SECOND = 1 << 16, 10 << 20
_DISCARD_BYTES, _DISCARD_SECONDS = 64 << 20, 5.0
_QUIET_PATHS = frozenset({"/health", "/metrics"})  # monitoring polls these every few seconds


class Gate:
    def __init__(self, app: ASGIApp, *, config: ServerConfig, metrics: HttpMetrics) -> None:
        self._app = app
        self._keys = [_digest(key.encode()) for key in config.api_keys]
        self._origins = config.allowed_origins
        self._max_bytes = config.max_request_bytes
        self._max_requests = config.max_connections
        self._num_requests = 0  # that are complete and not yet answered
        self._turn, self._next_turn = asyncio.Lock(), 0.0  # of large bodies; the time is the event loop's
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = perf_counter()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = scope["outpace.request_id"] = given if _PLAIN_ID.fullmatch(given) else uuid4().hex
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answer_headers = MutableHeaders(scope=message)
                answer_headers["x-request-id"] = request_id
                if is_messages_path(scope["path"]):
                    answer_headers["request-id"] = request_id  # the name that Anthropic's clients read
            await send(message)

        try:
            self._check_key(scope, headers)
            self._check_origin(scope, headers)
            body = await self._body(headers, receive)
            if body is None or not await self._answer(body, scope, receive, send_with_id):
                status = CLIENT_LEFT
        except asyncio.CancelledError:
            # Only a shutdown cancels requests: it has waited for as long as it may.
            if not status:
                stopped = EngineStopped("the server is shutting down; send the request to another one, or later")
                await reply(stopped, scope)(scope, receive, send_with_id)
        except Exception as error:
            api_error = as_api_error(error)
            if api_error.status == 500:
                log.error("request %s failed", request_id, exc_info=error)
            if status:
                raise  # headers are already sent, so the connection is closed
            if api_error.status == 413:
                await _discard(receive)
            await reply(api_error, scope)(scope, receive, send_with_id)
        finally:
            self._log_request(scope, request_id, status, perf_counter() - began)

    async def _answer(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> bool:
        """Pass the request to the app, unless too many are being answered; monitoring always gets through.

        False if the client has left before that.
        """
        if self._num_requests >= self._max_requests and _path(scope) not in _QUIET_PATHS:
            message = f"{self._num_requests} requests are being answered, as many as allowed; try again later"
            raise ApiError(503, message, type="service_unavailable_error", code="too_many_connections",
                           headers=_CLOSE | {"Retry-After": "1"})  # fmt: skip
        self._num_requests += 1
        try:
            if len(body) > _LARGE_BYTES and not await self._wait_for_turn(len(body), receive):
                return False
            await self._app(scope, _with(body, receive), send)
            return True
        finally:
            self._num_requests -= 1

    async def _wait_for_turn(self, num_bytes: int, receive: Receive) -> bool:
        """Wait until a large body may be parsed. False if the client has left before that."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            await asyncio.sleep(self._next_turn - loop.time())
            if await _has_left(receive):
                return False
            self._next_turn = loop.time() + num_bytes / _PARSED_BYTES_PER_SECOND
            return True

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        path = _path(scope)
        is_open = path in _OPEN_PATHS or path.startswith(STATIC)  # the page asks for the key, so it must load without
        if not self._keys or is_open or scope["method"] == "OPTIONS":
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        bearer = _digest(key.strip().encode("latin-1") if scheme.lower() == "bearer" else b"")
        x_api_key = _digest(headers.get("x-api-key", "").strip().encode("latin-1"))  # as Anthropic's clients send it
        # Constant time: digests have equal length, and every key is compared.
        matches = [hmac.compare_digest(bearer, key) | hmac.compare_digest(x_api_key, key) for key in self._keys]
        if not any(matches):
            message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        scope["outpace.tenant"] = matches.index(True)

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """Refuse to act for web pages of other origins where no key protects the server from them.

        A browser sends a page's simple requests anywhere without asking first. That the origin is the host it connected
        to proves nothing if the host is a name, because a name's owner can make it point to this machine.
        """
        origin = headers.get("origin")
        if self._keys or origin is None or scope["method"] in _SAFE_METHODS:
            return
        if origin in self._origins or "*" in self._origins or _is_own(origin, headers.get("host", "")):
            return
        message = "pages of this origin may not use the server; allow it with --allowed-origins, or set --api-key"
        raise ApiError(403, message, code="origin_not_allowed")

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """The whole body, if it is not larger than allowed. None if the client disconnects before its end."""
        announced = headers.get("content-length", "")
        if announced.isdigit() and int(announced) > self._max_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    parts.append(message.get("body", b""))
                    num_bytes += len(parts[-1])
                    if num_bytes > self._max_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {_BODY_SECONDS:g} seconds; send it again", headers=_CLOSE
            ) from None

    def _too_large(self) -> ApiError:
        message = f"the body is larger than the {self._max_bytes} bytes allowed (--max-request-bytes)"
        return ApiError(413, message, code="request_too_large", headers=_CLOSE)

    def _log_request(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        path = _path(scope)
        route = getattr(scope.get("route"), "path", None) or "other"
        self._metrics.responses[route, status] += 1
        facts = {"request_id": request_id, "method": scope["method"], "path": path, "status": status}
        facts["seconds"] = round(seconds, 4)
        answer = scope.get("outpace.answer")
        if isinstance(answer, Answer):
            usage = answer.usage()
            facts |= {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
            facts |= {name: usage["speculation"][name] for name in ("drafted", "accepted", "lossy")}
            reasons = {request.finish_reason or "" for request in answer.finished.values()}
            facts["finish"] = "+".join(sorted(reasons)) if answer.is_complete else "incomplete"
        level = logging.DEBUG if path in _QUIET_PATHS and status == 200 else logging.INFO
        log.log(level, "request", extra={"facts": facts})


def _with(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body to the app in one message."""
    first: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def replay() -> Message:
        nonlocal first
        if first is None:
            return await receive()
        message, first = first, None
        return message

    return replay


async def _has_left(receive: Receive) -> bool:
    """Whether a client whose request is complete has disconnected: nothing else can be received now."""
    disconnect = asyncio.ensure_future(receive())
    await asyncio.sleep(0)
    has_left = disconnect.done()
    disconnect.cancel()
    return has_left


async def _discard(receive: Receive) -> None:
    """Read and drop the body for a while: a client still sending when the connection closes never sees the reply."""
    num_bytes = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            while num_bytes < _DISCARD_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _is_own(origin: str, host: str) -> bool:
    """Whether the origin is this server itself, reached by an address or as localhost."""
    try:
        parts = urlsplit(origin)
        if parts.netloc != host or not parts.hostname:
            return False
        return parts.hostname == "localhost" or bool(ip_address(parts.hostname))
    except ValueError:
        return False


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _path(scope: Scope) -> str:
    """The path of the route. A proxy may leave its own part (--root-path) at the front."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if root and path.startswith(f"{root}/") else path

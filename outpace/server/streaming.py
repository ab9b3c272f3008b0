"""The two kinds of answer: one JSON object or a stream of events. Both stop at a disconnect or at the timeout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from outpace.engine.generation import Generation, Piece
from outpace.errors import OutpaceError
from outpace.server.errors import CLIENT_LEFT, ApiError, as_api_error, reply
from outpace.server.replies import Answer

_LAST_EVENT_SECONDS = 1.0
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not buffer events
]


def out_of_time(seconds: float) -> ApiError:
    message = f"the answer took longer than the {seconds:g} seconds allowed; request fewer tokens, or try again later"
    return ApiError(504, message, type="timeout_error", code="request_timeout")


@asynccontextmanager
async def _abort_on_disconnect(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.abort()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        generation.abort()


class _AnswerResponse(Response):
    def __init__(self, generation: Generation, answer: Answer, timeout: float) -> None:
        super().__init__()
        self.generation, self.answer, self.timeout = generation, answer, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _abort_on_disconnect(self.generation, receive):
            try:
                async with asyncio.timeout(self.timeout):
                    await self.send_answer(scope, receive, send)
            except TimeoutError:
                await self.send_error(out_of_time(self.timeout), scope, receive, send)
            except OutpaceError as error:
                await self.send_error(as_api_error(error), scope, receive, send)

    async def send_answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def send_error(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        self.status_code = error.status
        await reply(error, scope)(scope, receive, send)


class WholeReply(_AnswerResponse):
    async def send_answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async for pieces in self.generation:
            for piece in pieces:
                _raise_error(piece)
                self.answer.fold(piece)
        if self.answer.is_complete:
            response = await asyncio.to_thread(_whole, self.answer) if self.answer.is_long else _whole(self.answer)
            await response(scope, receive, send)
        else:
            await Response(status_code=CLIENT_LEFT)(scope, receive, send)


class EventStream(_AnswerResponse):
    """Sends the headers with the first event, so that an earlier error still sets the HTTP status."""

    _began = False

    async def send_answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async for pieces in self.generation:
            events: list[bytes] = []
            for piece in pieces:
                _raise_error(piece)
                events.append(self.answer.events(piece))
            await self._write(send, b"".join(events))
        if self.answer.is_complete:
            await self._write(send, self.answer.closing())
            await send({"type": "http.response.body", "body": b""})
        elif not self._began:
            await Response(status_code=CLIENT_LEFT)(scope, receive, send)

    async def send_error(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._began:
            await super().send_error(error, scope, receive, send)
            return
        # The likely cause is a client that stopped reading, so do not wait long for it here.
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_EVENT_SECONDS):
                await send({"type": "http.response.body", "body": self.answer.failure(error)})

    async def _write(self, send: Send, data: bytes) -> None:
        if not self._began:
            self._began = True
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
        if data:
            await send({"type": "http.response.body", "body": data, "more_body": True})


def _whole(answer: Answer) -> Response:
    return JSONResponse(answer.reply())


def _raise_error(piece: Piece) -> None:
    if piece.error is not None:
        raise piece.error

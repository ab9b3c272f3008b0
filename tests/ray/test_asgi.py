"""A request that crosses processes: the pieces of its answer arrive together, in order and soon; no cluster needed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outpace.ray import asgi
from outpace.ray.asgi import joined, messages

START = {"type": "http.response.start", "status": 200, "headers": []}


def body(part: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": part, "more_body": more}


async def collected(app: Any) -> list[list[dict[str, Any]]]:
    return [some async for some in messages(app, {"type": "http"}, b"asked")]


def test_pieces_that_are_ready_together_travel_as_one(monkeypatch):
    monkeypatch.setattr(asgi, "_PIECE_SECONDS", 0.2)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"asked"
        await send(START)
        for number in range(10):
            await send(body(b"%d " % number))
            await asyncio.sleep(0.001)
        await send(body(b"end", more=False))

    found = asyncio.run(collected(app))
    assert found[0] == [START, body(b"0 ")], "the first piece waits for no other"
    assert b"".join(each["body"] for some in found for each in some if each is not START) == b"0 1 2 3 4 5 6 7 8 9 end"
    assert len(found) == 2 and found[1] == [body(b"1 2 3 4 5 6 7 8 9 end", more=False)], "the end waits for nothing"


def test_a_whole_answer_is_one_batch():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send(body(b"all", more=False))

    assert asyncio.run(collected(app)) == [[START, body(b"all", more=False)]]


def test_an_app_that_fails_fails_here_after_what_it_has_sent():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        raise RuntimeError("broken")

    async def run() -> list[Any]:
        found = []
        with pytest.raises(RuntimeError, match="broken"):
            async for some in messages(app, {"type": "http"}, b""):
                found.append(some)
        return found

    assert asyncio.run(run()) == [[START]]


def test_a_reader_that_leaves_is_a_client_that_leaves():
    seen = list[str]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(START)
        await send(body(b"first"))
        seen.append((await receive())["type"])

    async def run() -> None:
        stream = messages(app, {"type": "http"}, b"")
        assert await anext(stream) == [START, body(b"first")]
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())
    assert seen == ["http.disconnect"]


def test_only_neighbours_are_joined():
    assert joined([]) == []
    assert joined([START, body(b"a"), body(b"b"), body(b"", more=False)]) == [START, body(b"ab", more=False)]

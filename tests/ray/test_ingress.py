"""What HAProxy hears when it asks for a replica, from an engine's handle that is a fake; no cluster needed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed; pip install outpace[ray]")

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError

from outpace.ray import ingress
from outpace.ray.ingress import RouterApp


class Handle:
    """`failures` come before the first choice. Without a replica, a choice takes for ever."""

    def __init__(self, *failures: Exception, has_replica: bool = True) -> None:
        self._failures = list(failures)
        self._has_replica = has_replica
        self.routed: list[bytes] = []

    @asynccontextmanager
    async def choose_replica(self, routed: bytes, _reserve: bool) -> AsyncIterator[Any]:
        assert not _reserve, "HAProxy sends the request, so that nothing would end the reservation"
        self.routed.append(routed)
        if self._failures:
            raise self._failures.pop(0)
        if not self._has_replica:
            await asyncio.Event().wait()
        yield SimpleNamespace(_replica=SimpleNamespace(replica_id=SimpleNamespace(to_full_id_str=lambda: "one")))


def ask(handle: Handle) -> tuple[int, str]:
    """The status and the text of the router's answer to a prompt."""
    app, sent = RouterApp(), list[dict[str, Any]]()
    app._handle = handle

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps({"prompt": "a prompt"}).encode()}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app({"type": "http"}, receive, send))
    return sent[0]["status"], sent[1]["body"].decode()


def test_the_answer_names_the_replica_that_was_chosen_for_the_prompt():
    handle = Handle()
    status, text = ask(handle)
    assert status == 200 and json.loads(text) == {"replica_id": "one"}
    assert b"a prompt" in handle.routed[0]


def test_a_request_waits_while_new_settings_fail_and_the_old_are_restored(monkeypatch):
    monkeypatch.setattr(ingress, "_AGAIN_SECONDS", 0.001)
    unavailable: Any = DeploymentUnavailableError  # Ray declares its argument as a private class
    handle = Handle(*[unavailable("Engine")] * 3)
    status, text = ask(handle)
    assert status == 200 and json.loads(text) == {"replica_id": "one"} and len(handle.routed) == 4


def test_a_request_that_has_waited_for_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(ingress, "WAIT_SECONDS", 0.01)
    assert ask(Handle(has_replica=False)) == (503, "no replica can be chosen: TimeoutError()")


def test_what_goes_wrong_in_ray_is_said():
    status, text = ask(Handle(RayActorError()))
    assert status == 503 and "RayActorError" in text

"""The router of requests that HAProxy sends, over replicas that are fakes; no cluster needed."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed; pip install outpace[ray]")

from ray.exceptions import RayActorError
from ray.serve._private.request_router.common import ReplicaQueueLengthCache

from outpace.ray import routing
from outpace.ray.routing import DirectPrefixRouter

LONG = b"a long system prompt " * 40


@dataclass(eq=False)
class Replica:
    name: str
    num_open: int = 0
    num_asked: int = 0
    failure: Exception | None = None
    replica_id: Any = field(init=False)

    def __post_init__(self) -> None:
        self.replica_id = _Id(self.name)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.num_asked += 1
        await asyncio.sleep(0.001)
        if self.failure is not None:
            raise self.failure
        return self.num_open


@dataclass(frozen=True)
class _Id:
    unique_id: str


@pytest.fixture
def router() -> Any:
    """Without Serve's constructor, which needs a cluster."""
    made = DirectPrefixRouter.__new__(DirectPrefixRouter)
    made._replica_queue_len_cache = ReplicaQueueLengthCache()
    made.initialize_state(at_once=4)
    return made


async def choose(router: Any, replicas: list[Replica], routed: bytes = b"") -> str:
    order = await router.choose_replicas(replicas, SimpleNamespace(kwargs={"routed": routed}))
    return str(order[0][0].name)


def test_the_less_busy_of_two_is_chosen_and_a_burst_is_spread_by_one_question(router):
    busy, idle = Replica("busy", num_open=2), Replica("idle")

    async def burst() -> list[str]:
        return await asyncio.gather(*(choose(router, [busy, idle]) for _ in range(6)))

    assert Counter(asyncio.run(burst())) == {"busy": 2, "idle": 4}, "both have four then"
    assert busy.num_asked == idle.num_asked == 1


def test_a_replica_is_asked_again_when_its_number_is_old(router, monkeypatch):
    monkeypatch.setattr(routing, "_FRESH_SECONDS", 0.0)
    monkeypatch.setattr(routing, "_WAY_SECONDS", 0.0)
    first, second = Replica("first", num_open=1), Replica("second")

    async def twice() -> list[str]:
        found = [await choose(router, [first, second])]
        first.num_open, second.num_open = 0, 3  # those of first have ended
        return [*found, await choose(router, [first, second])]

    assert asyncio.run(twice()) == ["second", "first"]


def test_a_request_that_has_not_arrived_yet_is_counted(router, monkeypatch):
    monkeypatch.setattr(routing, "_FRESH_SECONDS", 0.0)
    monkeypatch.setattr(routing, "_WAY_SECONDS", 60.0)
    replicas = [Replica("first"), Replica("second")]

    async def four() -> list[str]:
        return [await choose(router, replicas) for _ in range(4)]

    assert Counter(asyncio.run(four())) == {"first": 2, "second": 2}


def test_a_prefix_is_found_among_many_replicas_that_are_not_all_asked(router, monkeypatch):
    monkeypatch.setattr(routing, "_FRESH_SECONDS", 0.0)
    monkeypatch.setattr(routing, "_WAY_SECONDS", 0.0)
    replicas = [Replica(f"{number}") for number in range(50)]

    async def ask(times: int) -> set[str]:
        return {await choose(router, replicas, LONG) for _ in range(times)}

    assert len(asyncio.run(ask(20))) == 1
    assert sum(each.num_asked for each in replicas) <= 3 * 20


def test_a_replica_that_does_not_reply_counts_as_full(router):
    silent, other = Replica("silent", failure=RayActorError()), Replica("other", num_open=3)
    assert asyncio.run(choose(router, [silent, other])) == "other"

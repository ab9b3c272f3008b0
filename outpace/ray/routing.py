"""Sends a request to the replica that has its prefix in the cache, unless it would wait there and not elsewhere.

A request router of Ray Serve's public, alpha interface. Ray's own PrefixCacheAffinityRouter cannot be imported without
vLLM or SGLang. Ray calls this in the process that holds the handle: the front, or HAProxy's router.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from time import monotonic
from typing import Any

from ray.exceptions import ActorDiedError, RayError
from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from outpace.ray.prefixes import PrefixIndex, chain, goes_to_cached

_NUM_ASKED = 2
_FRESH_SECONDS = 0.004  # how long a number counts; what was chosen since is added, what has ended since is not seen
_WAY_SECONDS = 0.01  # in which a request that was sent to a replica is counted there
_REPLY_SECONDS = 2.0


class PrefixRouter(FIFOMixin, RequestRouter):
    def initialize_state(self, at_once: int = 8, **_: Any) -> None:
        """`at_once`: requests that a replica runs at once."""
        self._at_once = at_once
        self._index = PrefixIndex()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica with the longest common beginning first, then the others by how busy they are."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        busy = {name: self._num_ongoing(replica.replica_id) for name, replica in by_name.items()}
        order = sorted(by_name, key=lambda name: (busy[name], random.random()))
        links = _links(pending_request)
        cached, _ = self._index.find(links, set(by_name))
        if cached is not None and goes_to_cached(busy[cached], busy[order[0]], self._at_once):
            order.remove(cached)
            order.insert(0, cached)
        return [[by_name[name]] for name in order]

    def _num_ongoing(self, replica: ReplicaID) -> int:
        return self.replica_queue_len_cache.get(replica) or 0

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._index.add(_links(pending_request), replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._index.forget(replica_id.unique_id)


class DirectPrefixRouter(PrefixRouter):
    """The same for requests that HAProxy sends: a few replicas are asked how many requests they have.

    Serve counts the requests of its handles. Those of HAProxy it does not see, so without this every replica would look
    idle. Asked are the replica with the prefix and two others; the better of two is nearly as good as the best of all.
    """

    def initialize_state(self, at_once: int = 8, **_: Any) -> None:
        super().initialize_state(at_once)
        self._asking: dict[ReplicaID, asyncio.Task[None]] = {}
        self._asked_at: dict[ReplicaID, float] = {}
        self._chosen_at: dict[ReplicaID, deque[float]] = {}  # the last times

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        links = _links(pending_request)
        cached, _ = self._index.find(links, {each.replica_id.unique_id for each in candidate_replicas})
        asked = random.sample(candidate_replicas, min(_NUM_ASKED, len(candidate_replicas)))
        asked += [each for each in candidate_replicas if each.replica_id.unique_id == cached and each not in asked]
        await asyncio.gather(*map(self._count, asked))
        order = await super().choose_replicas(asked, pending_request)
        if order:
            chosen = order[0][0].replica_id
            self.replica_queue_len_cache.update(chosen, self._num_ongoing(chosen) + 1)
            self._chosen_at.setdefault(chosen, deque(maxlen=self._at_once)).append(monotonic())
            self._index.add(links, chosen.unique_id)
        return order

    async def _count(self, replica: RunningReplica) -> None:
        """Know how many requests the replica has; requests that come together wait for one answer."""
        name = replica.replica_id
        if monotonic() - self._asked_at.get(name, -_FRESH_SECONDS) < _FRESH_SECONDS:
            return
        if name not in self._asking:
            self._asking[name] = asyncio.create_task(self._ask(replica))
        await asyncio.shield(self._asking[name])

    async def _ask(self, replica: RunningReplica) -> None:
        name, began = replica.replica_id, monotonic()
        try:
            number = await asyncio.wait_for(replica.get_queue_len(deadline_s=_REPLY_SECONDS), _REPLY_SECONDS)
            on_the_way = sum(began - at < _WAY_SECONDS for at in self._chosen_at.get(name, ()))
            self.replica_queue_len_cache.update(name, number + on_the_way)
        except ActorDiedError:
            self.on_replica_actor_died(name)
        except (RayError, TimeoutError):
            self.replica_queue_len_cache.update(name, self._at_once)  # as if it were full
        finally:
            self._asked_at[name] = monotonic()
            del self._asking[name]

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._asked_at.pop(replica_id, None)
        self._chosen_at.pop(replica_id, None)


def _links(request: PendingRequest | None) -> list[bytes]:
    text = request.kwargs.get("routed", b"") if request is not None else b""
    return chain(text)

"""Sends a request to the replica that has its prefix in the cache, unless it would wait there and not elsewhere.

A request router of Ray Serve's public, alpha interface. Ray's own PrefixCacheAffinityRouter cannot be imported without
vLLM or SGLang. Ray calls this in the process that holds the handle: the front, or HAProxy's router.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from ray.exceptions import ActorDiedError, RayError
from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from outpace.ray.prefixes import PrefixIndex, chain, goes_to_cached

_ASK_SECONDS = 0.1  # between two questions to a replica how many requests it has
_ASKED_PER_SECOND = 500  # replicas, of a large number
_REPLY_SECONDS = 5.0


class PrefixRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
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
    """The same for requests that HAProxy sends: a choice counts as a request, and replicas are asked when it has ended.

    Serve sees requests of its handles begin and end. Those of HAProxy it does not see, so without this every replica
    would look idle.
    """

    def initialize_state(self, at_once: int = 8, **_: Any) -> None:
        super().initialize_state(at_once)
        self._asking: asyncio.Task[None] | None = None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        order = await super().choose_replicas(candidate_replicas, pending_request)
        if order:
            chosen = order[0][0].replica_id
            self.replica_queue_len_cache.update(chosen, self._num_ongoing(chosen) + 1)
            self._index.add(_links(pending_request), chosen.unique_id)
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask_busy_replicas())
        return order

    async def _ask_busy_replicas(self) -> None:
        """Until none has requests."""
        while True:
            busy = [each for each in self.curr_replicas.values() if self._num_ongoing(each.replica_id)]
            if not busy:
                return
            await asyncio.sleep(max(_ASK_SECONDS, len(busy) / _ASKED_PER_SECOND))
            await asyncio.gather(*map(self._ask, busy))

    async def _ask(self, replica: RunningReplica) -> None:
        try:
            number = await asyncio.wait_for(replica.get_queue_len(deadline_s=_REPLY_SECONDS), _REPLY_SECONDS)
        except ActorDiedError:
            self.on_replica_actor_died(replica.replica_id)
        except (RayError, TimeoutError):
            pass  # it is asked again
        else:
            self.replica_queue_len_cache.update(replica.replica_id, number)


def _links(request: PendingRequest | None) -> list[bytes]:
    text = request.kwargs.get("routed", b"") if request is not None else b""
    return chain(text)

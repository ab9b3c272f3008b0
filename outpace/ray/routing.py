"""Sends a request to the replica that has its prefix in the cache, unless it would wait there and not elsewhere.

A request router of Ray Serve's public, alpha interface. Ray's own PrefixCacheAffinityRouter cannot be imported without
vLLM or SGLang. Ray calls this in the process that holds the handle: the front.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from outpace.ray.prefixes import PrefixIndex, chain, goes_to_cached


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


def _links(request: PendingRequest | None) -> list[bytes]:
    text = request.kwargs.get("routed", b"") if request is not None else b""
    return chain(text)

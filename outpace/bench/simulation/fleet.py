"""A queue in front of many replicas: how long requests wait, and how often their prefix is cached, by routing rule.

Requests come at random times. Each belongs to one of many conversations or applications, whose prompts begin alike. A
replica answers several requests at once, each at its own pace, and holds some prefixes in its cache; one that it lacks
is computed first. The rules are Ray Serve's default (the better of two random replicas), the least busy replica, and
our own (`outpace/ray/routing.py`).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from outpace.ray.prefixes import goes_to_cached

Rule = Literal["random", "better of two", "least busy", "prefix"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    num_replicas: int
    at_once: int = 8  # requests that a replica runs
    num_cached: int = 20  # prefixes that a replica's cache holds
    num_prefixes: int = 5000
    load: float = 0.8  # of what the replicas could answer if every prefix were cached
    answer_seconds: float = 4.0  # mean
    prefill_seconds: float = 0.6  # of a prefix that is not cached
    num_requests: int = 40_000


@dataclass(slots=True)
class _Replica:
    num_running: int = 0
    waiting: deque[tuple[float, int, float]] = field(default_factory=deque)  # arrival, prefix, seconds of the answer
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def num_open(self) -> int:
        return self.num_running + len(self.waiting)


@dataclass(frozen=True, slots=True)
class FleetResult:
    hit_share: float
    mean_wait: float  # to the first token: queue and prefill
    p99_wait: float


def simulate(fleet: Fleet, rule: Rule, seed: int = 0) -> FleetResult:
    rng = np.random.default_rng(seed)
    f, count = fleet, fleet.num_requests
    gap = f.answer_seconds / (f.num_replicas * f.at_once * f.load)
    arrivals = np.cumsum(rng.exponential(gap, count))
    weights = 1.0 / np.arange(1, f.num_prefixes + 1)  # Zipf: a few prefixes are very common
    prefixes = rng.choice(f.num_prefixes, count, p=weights / weights.sum())
    answers = rng.exponential(f.answer_seconds, count)
    replicas = [_Replica() for _ in range(f.num_replicas)]
    last_seen: dict[int, int] = {}  # by prefix: the replica that got it last
    ends: list[tuple[float, int]] = []  # when a request of a replica ends
    waits, num_hits = list[float](), 0
    # Least busy first, updated when looked at.
    order = [(0, i) for i in range(f.num_replicas)]

    def begin(now: float, number: int) -> None:
        nonlocal num_hits
        replica = replicas[number]
        while replica.waiting and replica.num_running < f.at_once:
            arrival, prefix, seconds = replica.waiting.popleft()
            is_hit = prefix in replica.cached
            num_hits += is_hit
            replica.cached[prefix] = None
            replica.cached.move_to_end(prefix)
            if len(replica.cached) > f.num_cached:
                replica.cached.popitem(last=False)
            prefill = 0.0 if is_hit else f.prefill_seconds
            waits.append(now - arrival + prefill)
            replica.num_running += 1
            heapq.heappush(ends, (now + prefill + seconds, number))

    def least_busy() -> int:
        while True:
            num_open, number = order[0]
            if replicas[number].num_open == num_open:
                return number
            heapq.heapreplace(order, (replicas[number].num_open, number))

    def choose(prefix: int) -> int:
        if rule == "random":
            return int(rng.integers(f.num_replicas))
        if rule == "better of two":
            one, other = rng.integers(f.num_replicas, size=2)
            return int(one if replicas[one].num_open <= replicas[other].num_open else other)
        best = least_busy()
        cached = last_seen.get(prefix) if rule == "prefix" else None
        if cached is None or not goes_to_cached(replicas[cached].num_open, replicas[best].num_open, f.at_once):
            return best
        return cached

    for arrival, prefix, seconds in zip(arrivals.tolist(), prefixes.tolist(), answers.tolist(), strict=True):
        while ends and ends[0][0] <= arrival:
            now, number = heapq.heappop(ends)
            replicas[number].num_running -= 1
            begin(now, number)
            heapq.heappush(order, (replicas[number].num_open, number))
        number = choose(prefix)
        last_seen[prefix] = number
        replicas[number].waiting.append((arrival, prefix, seconds))
        begin(arrival, number)
        if len(order) > 50 * f.num_replicas:  # drop outdated entries
            order = [(each.num_open, i) for i, each in enumerate(replicas)]
            heapq.heapify(order)
    settled = np.array(waits[len(waits) // 4 :])
    return FleetResult(num_hits / max(len(waits), 1), float(settled.mean()), float(np.percentile(settled, 99)))

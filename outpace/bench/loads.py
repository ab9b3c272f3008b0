"""How requests arrive: a fixed number at once (closed loop), or at given times (open loop).

A closed loop waits for an answer before it sends the next request. A slow system then gets fewer requests, and few of
them meet its worst moments. An open loop does not wait. It counts latency from the time a request was due, even if it
was sent later: that is what a user would notice.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from outpace.errors import UsageError

Arrivals = Literal["poisson", "bursty"]
_BURSTY_SHAPE = 0.2  # shape of the gamma-distributed gaps: their standard deviation is 2.2 times their mean


@dataclass(frozen=True, slots=True)
class Closed:
    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise UsageError(f"concurrency must be at least 1; got {self.concurrency}")

    @property
    def name(self) -> str:
        return f"{self.concurrency} at once"

    @property
    def block_size(self) -> int:
        """At concurrency 1 each prompt is a block; else twice the concurrency, so the load is full for half a block."""
        return 1 if self.concurrency == 1 else 2 * self.concurrency

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "closed", "concurrency": self.concurrency}


@dataclass(frozen=True, slots=True)
class Open:
    rate: float  # requests per second
    arrivals: Arrivals = "poisson"

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise UsageError(f"the arrival rate must be above 0 requests per second; got {self.rate:g}")

    @property
    def name(self) -> str:
        return f"{self.rate:g}/s {self.arrivals}"

    @property
    def block_size(self) -> int:
        """About eight seconds of traffic, because queues take time to form."""
        return max(8, round(8 * self.rate))

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "open", "rate": self.rate, "arrivals": self.arrivals}


Load = Closed | Open


def arrival_times(load: Open, count: int, seed: int) -> list[float]:
    """Seconds from the start; the same for every setting that is compared."""
    rng = random.Random(seed)
    shape = 1.0 if load.arrivals == "poisson" else _BURSTY_SHAPE
    times, now = [], 0.0
    for _ in range(count):
        now += rng.gammavariate(shape, 1.0 / (shape * load.rate))
        times.append(now)
    return times

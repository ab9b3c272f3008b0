"""How requests arrive: so many at once (closed loop), or at given moments whatever the system does (open loop).

A closed loop waits for an answer before it asks again, so a slow system is asked less and its worst moments are met
by few requests. An open loop does not wait, and counts a request's latency from the moment it was to arrive, sent or
not: that is what a user would have felt.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from outpace.errors import UsageError

Arrivals = Literal["poisson", "bursty"]
_BURSTY_SHAPE = 0.2  # of the gamma-distributed gaps: their standard deviation is 2.2 times their mean


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
        """Alone, each prompt is a block. Together, twice as many as run at once: the load holds for half the block."""
        return 1 if self.concurrency == 1 else 2 * self.concurrency

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "closed", "concurrency": self.concurrency}


@dataclass(frozen=True, slots=True)
class Open:
    rate: float  # requests a second
    arrivals: Arrivals = "poisson"

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise UsageError(f"a rate of arrivals must be above 0 requests a second; got {self.rate:g}")

    @property
    def name(self) -> str:
        return f"{self.rate:g}/s {self.arrivals}"

    @property
    def block_size(self) -> int:
        """About eight seconds of traffic, for queues take time to form."""
        return max(8, round(8 * self.rate))

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "open", "rate": self.rate, "arrivals": self.arrivals}


Load = Closed | Open


def arrival_times(load: Open, count: int, seed: int) -> list[float]:
    """Seconds after the beginning; the same for every setting that is compared."""
    rng = random.Random(seed)
    shape = 1.0 if load.arrivals == "poisson" else _BURSTY_SHAPE
    times, now = [], 0.0
    for _ in range(count):
        now += rng.gammavariate(shape, 1.0 / (shape * load.rate))
        times.append(now)
    return times

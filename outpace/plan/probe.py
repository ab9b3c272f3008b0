"""Measures this machine: memory bandwidth, arithmetic, and whether other programs used it meanwhile.

It takes a fraction of a second where the machine is idle; where it is not, three times that, and the fastest counts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time, sleep

import numpy as np

from outpace.plan.machines import BUSY

_BYTES = 128 << 20
_ROUNDS = 5
_SIZE = 384  # of a product that takes about a millisecond, so that some end before another program interrupts them
_PRODUCTS, _PRODUCTS_SECONDS = 64, 0.3  # at most, whichever is reached first
_MORE_TRIES, _PAUSE = 2, 0.3  # where the machine was busy; seconds before each


@dataclass(frozen=True, slots=True)
class Probed:
    bandwidth: float  # bytes a second
    operations: float  # a second
    others: float  # share of the processor time that went to others


def probe(threads: int) -> Probed:
    """The fastest of a few tries, which end with the first that had the machine to itself."""
    best = _tried(threads)
    for _ in range(_MORE_TRIES):
        if best.others <= BUSY:
            break
        sleep(_PAUSE)
        found = _tried(threads)
        best = Probed(
            max(best.bandwidth, found.bandwidth), max(best.operations, found.operations), min(best.others, found.others)
        )
    return best


def _tried(threads: int) -> Probed:
    others = Others()
    bandwidth, operations = read_bandwidth(threads), float_operations()
    return Probed(bandwidth, operations, others.share())


class Others:
    """What other programs, and other virtual machines, take of the processor time from now on."""

    def __init__(self) -> None:
        self._before, self._own = _busy_and_all(), process_time()

    def share(self) -> float:
        """0 if the system does not tell."""
        own = process_time() - self._own
        busy, every = ((b - a) / os.sysconf("SC_CLK_TCK") for a, b in zip(self._before, _busy_and_all(), strict=True))
        return min(1.0, max(0.0, busy - own) / every) if every > 0 else 0.0


def _busy_and_all() -> tuple[int, int]:
    """Ticks of all processors so far; zeros where the system does not tell."""
    try:
        times = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
    except (OSError, ValueError, IndexError):
        return 0, 0
    idle = sum(times[3:5])
    return sum(times) - idle, sum(times)


def read_bandwidth(threads: int) -> float:
    """Bytes a second: by the native library where it was built, as `outpace doctor` measures it, else by numpy."""
    from outpace.backends.native.library import load_library
    from outpace.errors import BackendError

    try:
        measured = float(load_library().read_bandwidth(threads, _BYTES))
    except BackendError:
        measured = 0.0
    return measured or _numpy_bandwidth()


def _numpy_bandwidth() -> float:
    data = np.ones(_BYTES // 8)
    return max(data.nbytes / _timed(data.sum) for _ in range(_ROUNDS))


def float_operations() -> float:
    """Operations a second of a float32 product. Products of 8-bit weights reach 1 to 3 times that."""
    left = np.ones((_SIZE, _SIZE), np.float32)
    seconds, begin = list[float](), perf_counter()
    while not seconds or (len(seconds) < _PRODUCTS and perf_counter() - begin < _PRODUCTS_SECONDS):
        seconds.append(_timed(lambda: left @ left))
    return 2 * _SIZE**3 / min(seconds)


def _timed(work: object) -> float:
    begin = perf_counter()
    work()  # type: ignore[operator]
    return perf_counter() - begin

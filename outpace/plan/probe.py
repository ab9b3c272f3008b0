"""Measures this machine in a fraction of a second: memory bandwidth and arithmetic."""

from __future__ import annotations

from time import perf_counter

import numpy as np

_BYTES = 128 << 20
_ROUNDS = 5
_SIZE = 384  # of a product that takes about a millisecond, so that some end before another program interrupts them
_PRODUCTS, _PRODUCTS_SECONDS = 64, 0.3  # at most, whichever is reached first


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

"""Counter-based noise: a pure function of the request and the position.

Every random number in the engine is addressed by (request seed, purpose, place). There is no generator state, so no
number depends on the batch, the step or earlier draws, and a request replays on any machine. The generator is
SplitMix64: a 64-bit counter through a finaliser that passes BigCrush (Steele, Lea, Flood 2014). It takes a few integer
operations in any language, so other backends can compute the same noise on the device.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from outpace.decoding.numerics import minus_log

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_U64 = np.uint64


class Purpose(IntEnum):
    """Streams that must be independent of each other at the same place."""

    TOKEN = 1  # picks a token; draft and target share it, so that they agree as often as possible
    TAIL = 2  # the same, among the unlikely tokens (see HEAD_RATIO in sampling.py)
    ACCEPT = 3
    RECOVER = 4
    DRAFT = 5  # draft of an unseeded request; must be independent of its verification
    CHILD = 6  # the seeds of the n completions of one request


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def key(seed: int, purpose: Purpose, *place: int) -> int:
    """A 64-bit stream key; different addresses give unrelated streams."""
    k = 0
    for word in (seed, int(purpose), *place):
        k = _mix((k ^ _mix((word + _GOLDEN) & _MASK)) + _GOLDEN & _MASK)
    return k


def uniform(k: int, index: int = 0) -> float:
    """The index-th number of a stream, strictly between 0 and 1."""
    return ((_mix((k + (index + 1) * _GOLDEN) & _MASK) >> 12) + 0.5) * 2.0**-52


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def uniforms_at(seeds: NDArray[np.uint64], purpose: Purpose, *places: NDArray[np.integer]) -> NDArray[np.float64]:
    """`uniform(key(seed, purpose, *place))` for many addresses, which broadcast together; the same bits."""
    golden = _U64(_GOLDEN)
    with np.errstate(over="ignore"):
        k = np.zeros(1, _U64)
        for word in (seeds, np.array(purpose), *places):
            k = _mixed((k ^ _mixed(np.asarray(word).astype(_U64) + golden)) + golden)
        return np.asarray(((_mixed(k + golden) >> _U64(12)).astype(np.float64) + 0.5) * 2.0**-52)


def uniforms(k: int, indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """`uniform` for many indices; the same bits."""
    with np.errstate(over="ignore"):
        x = _mixed(_U64(k) + (indices.astype(_U64) + _U64(1)) * _U64(_GOLDEN))
    return np.asarray(((x >> _U64(12)).astype(np.float64) + 0.5) * 2.0**-52)


def exponentials(k: int, indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard exponential noise: argmax(p / exponential) is a draw with probability proportional to p."""
    return minus_log(uniforms(k, indices))


def gumbels(k: int, indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """The same noise on the scale of logits: argmax(log p + gumbel) is the same draw."""
    return np.asarray(-np.log(exponentials(k, indices)))


def child_seed(seed: int, index: int) -> int:
    """The seed of the index-th of n completions; the first uses the request's seed."""
    return seed if index == 0 else key(seed, Purpose.CHILD, index)

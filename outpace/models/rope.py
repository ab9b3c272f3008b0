"""Rotary position embedding: the rotation frequency of each pair, with the scalings of long-context models."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Rope:
    frequencies: NDArray[np.float64]  # radians per position of each pair, [num_rotated / 2]
    scale: float = 1.0  # factor on cosine and sine
    long_frequencies: NDArray[np.float64] | None = None  # instead, of tables with more positions than `short_context`
    short_context: int = 0

    def table(self, num_positions: int, num_pairs: int | None = None) -> NDArray[np.float32]:
        """Cosines, then sines, for every position: [num_positions, head_dim]. `num_pairs`: of a head, if RoPE leaves
        the last ones as they are."""
        frequencies = self.frequencies
        if self.long_frequencies is not None and num_positions > self.short_context:
            frequencies = self.long_frequencies
        angles = np.outer(np.arange(num_positions, dtype=np.float64), frequencies)
        num_idle = 0 if num_pairs is None else num_pairs - len(frequencies)
        idle = np.ones((num_positions, num_idle))
        cosines, sines = np.cos(angles) * self.scale, np.sin(angles) * self.scale
        return np.concatenate([cosines, idle, sines, 0 * idle], axis=1, dtype=np.float32)


def unscaled(base: float, num_rotated: int) -> NDArray[np.float64]:
    pairs = np.arange(num_rotated // 2, dtype=np.float64)
    frequencies: NDArray[np.float64] = base ** (-2.0 * pairs / num_rotated)
    return frequencies


def longrope(
    base: float, short: NDArray[np.float64], long: NDArray[np.float64], original: int, factor: float,
    scale: float | None = None,
) -> Rope:  # fmt: skip
    """Every pair has a divisor of its own, and another one for contexts longer than the original."""
    frequencies = unscaled(base, 2 * len(short))
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return Rope(frequencies / short, scale, frequencies / long, original)


def yarn(
    frequencies: NDArray[np.float64],
    factor: float,
    base: float,
    original: float,
    fast: float,
    slow: float,
    *,
    scale: float | None = None,
    truncate: bool = True,
) -> Rope:
    """Fast pairs keep their frequency, slow pairs are divided by `factor`, pairs in between are interpolated."""
    num_rotated = 2 * len(frequencies)

    def pair_turning(turns: float) -> float:
        """The pair that makes this many turns over the original training context."""
        return num_rotated * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_turning(fast), pair_turning(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, num_rotated - 1.0)
    kept = 1.0 - np.clip((np.arange(len(frequencies)) - low) / max(high - low, 0.001), 0.0, 1.0)
    if scale is None:
        scale = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return Rope(frequencies / factor * (1 - kept) + frequencies * kept, scale)

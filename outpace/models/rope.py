"""Rotary position embedding: the rotation frequency of each pair, with the scalings of long-context models."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Rope:
    frequencies: NDArray[np.float64]  # radians per position of each pair, [head_dim / 2]
    scale: float = 1.0  # factor on cosine and sine

    def table(self, num_positions: int) -> NDArray[np.float32]:
        """Cosines, then sines, for every position: [num_positions, head_dim]."""
        angles = np.outer(np.arange(num_positions, dtype=np.float64), self.frequencies)
        turned = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * self.scale
        return np.asarray(turned, np.float32)


def unscaled(base: float, num_rotated: int) -> NDArray[np.float64]:
    pairs = np.arange(num_rotated // 2, dtype=np.float64)
    frequencies: NDArray[np.float64] = base ** (-2.0 * pairs / num_rotated)
    return frequencies


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

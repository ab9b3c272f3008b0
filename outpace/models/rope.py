"""Rotary position embedding: the rotation frequency of each pair, with the scalings of long-context models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outpace.errors import ModelError

KNOWN = ("default", "linear", "llama3", "yarn")


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


def rope_from_config(config: Mapping[str, Any], head_dim: int, context: int) -> Rope:
    """From a config.json: `rope_parameters` in newer ones, `rope_theta` and `rope_scaling` in older ones."""
    scaling = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    base = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    frequencies = unscaled(base, head_dim)
    if kind == "default":
        return Rope(frequencies)
    if kind not in KNOWN:
        raise ModelError(
            f"the model's RoPE scaling is {kind!r}, but the torch backend supports only {', '.join(KNOWN)}"
        )
    factor = _number(scaling, "factor")
    if kind == "linear":
        return Rope(frequencies / factor)
    original = float(
        scaling.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or context
    )
    if kind == "llama3":
        low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
        turns = original * frequencies / (2 * math.pi)  # over the original training context
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return Rope(frequencies / factor * (1 - kept) + frequencies * kept)
    fast, slow = float(scaling.get("beta_fast") or 32), float(scaling.get("beta_slow") or 1)
    attention, truncate = scaling.get("attention_factor"), bool(scaling.get("truncate", True))
    scale = float(attention) if attention is not None else None
    return yarn(frequencies, factor, base, original, fast, slow, scale=scale, truncate=truncate)


def _number(scaling: Mapping[str, Any], key: str) -> float:
    value = scaling.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"the model's RoPE scaling has no usable {key} ({value!r}); its config.json is damaged")
    return float(value)

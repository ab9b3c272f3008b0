"""Reads the rotary position embedding from a Hugging Face config.json."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outpace.errors import ModelError
from outpace.models.hf_schema import Config, RopeSettings
from outpace.models.rope import Rope, unscaled, yarn

KNOWN = ("default", "linear", "llama3", "yarn")


def rope_from_config(config: Config, head_dim: int, context: int) -> Rope:
    """From a config.json: `rope_parameters` in newer ones, `rope_theta` and `rope_scaling` in older ones."""
    settings = RopeSettings(**_stated(config.rope_scaling) | _stated(config.rope_parameters))
    base = settings.rope_theta or config.rope_theta or 10000.0
    kind = settings.rope_type or settings.type or "default"
    frequencies = unscaled(base, head_dim)
    if kind == "default":
        return Rope(frequencies)
    if kind not in KNOWN:
        raise ModelError(
            f"the model's RoPE scaling is {kind!r:.80}, but the torch backend supports only {', '.join(KNOWN)}"
        )
    factor = _required(settings.factor, "factor")
    if kind == "linear":
        return Rope(frequencies / factor)
    original = settings.original_max_position_embeddings or config.original_max_position_embeddings or context
    if kind == "llama3":
        low = _required(settings.low_freq_factor, "low_freq_factor")
        high = _required(settings.high_freq_factor, "high_freq_factor")
        if low >= high:
            raise ModelError(f"the model's RoPE scaling has a low_freq_factor of {low} over {high}; it is damaged")
        turns = original * frequencies / (2 * math.pi)  # over the original training context
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return Rope(frequencies / factor * (1 - kept) + frequencies * kept)
    fast, slow = settings.beta_fast or 32.0, settings.beta_slow or 1.0
    scale, truncate = settings.attention_factor, settings.truncate
    return yarn(frequencies, factor, base, original, fast, slow, scale=scale, truncate=truncate)


def _stated(settings: RopeSettings | None) -> dict[str, Any]:
    return settings.model_dump(exclude_none=True, exclude_unset=True) if settings else {}


def _required(value: float | None, key: str) -> float:
    if value is None:
        raise ModelError(f"the model's RoPE scaling has no {key}; its config.json is damaged")
    return value

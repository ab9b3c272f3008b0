"""Reads the rotary position embedding from a Hugging Face config.json."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outpace.errors import ModelError
from outpace.models.hf_schema import Config, RopeSettings
from outpace.models.rope import Rope, longrope, unscaled, yarn

KNOWN = ("default", "linear", "llama3", "longrope", "yarn")
_LOCAL_BASE = 10000.0


def rope_from_config(config: Config, num_rotated: int, context: int) -> Rope:
    """From a config.json: `rope_parameters` in newer ones, `rope_theta` and `rope_scaling` in older ones."""
    newer = config.rope_parameters
    newer = newer.full_attention or newer if newer else None
    settings = RopeSettings(**_stated(config.rope_scaling) | _stated(newer))
    return _rope(settings, config, num_rotated, context)


def local_rope_from_config(config: Config, num_rotated: int, context: int) -> Rope:
    """The same for the layers with a sliding window, in a family where they have a RoPE of their own."""
    newer = config.rope_parameters.sliding_attention if config.rope_parameters else None
    base = config.rope_local_base_freq or _LOCAL_BASE
    return _rope(RopeSettings(**{"rope_theta": base} | _stated(newer)), config, num_rotated, context)


def num_rotated_elements(config: Config, head_dim: int) -> int:
    """Of a head; the others keep their values."""
    newer = config.rope_parameters.partial_rotary_factor if config.rope_parameters else None
    found = int(head_dim * (newer or config.partial_rotary_factor or 1.0))
    if found % 2 or not found:
        raise ModelError(f"the model's RoPE rotates {found} of the {head_dim} elements of a head; it is damaged")
    return found


def _rope(settings: RopeSettings, config: Config, num_rotated: int, context: int) -> Rope:
    base = settings.rope_theta or config.rope_theta or 10000.0
    kind = settings.rope_type or settings.type or "default"
    frequencies = unscaled(base, num_rotated)
    if kind == "default":
        return Rope(frequencies)
    original = settings.original_max_position_embeddings or config.original_max_position_embeddings or context
    if kind == "longrope" or settings.short_factor is not None:  # early files of Phi-3 call it "su" or "yarn"
        parts = [np.array(part or [], np.float64) for part in (settings.short_factor, settings.long_factor)]
        if any(len(part) != num_rotated // 2 for part in parts) or original < 2:
            raise ModelError(
                f"the model's RoPE scaling has {len(parts[0])} short and {len(parts[1])} long factors for "
                f"{num_rotated // 2} pairs; its config.json is damaged"
            )
        factor = settings.factor or context / original
        return longrope(base, parts[0], parts[1], original, factor, settings.attention_factor)
    if kind not in KNOWN:
        raise ModelError(
            f"the model's RoPE scaling is {kind!r:.80}, but the torch backend supports only {', '.join(KNOWN)}"
        )
    factor = _required(settings.factor, "factor")
    if kind == "linear":
        return Rope(frequencies / factor)
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

"""Reads a model's architecture from a Hugging Face config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.errors import ModelError
from outpace.models.architecture import BY_CLASS_NAME, Architecture
from outpace.models.rope import rope_from_config

# Keys that change the arithmetic, with the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}


def read_config(folder: Path) -> Architecture:
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(
            f"{folder} has no readable config.json ({error.strerror}); name the folder of a Hugging Face model"
        ) from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} is not a JSON object; download it again")
    return parse_config(values)


def parse_config(values: Mapping[str, Any]) -> Architecture:
    class_name = str((values.get("architectures") or ["unknown"])[0])
    family = BY_CLASS_NAME.get(class_name)
    if family is None:
        raise ModelError(
            f"the model is a {class_name}, which the torch backend does not run; it runs {', '.join(BY_CLASS_NAME)}"
        )
    for key, neutral in _NEUTRAL.items():
        if values.get(key, neutral[0]) not in neutral:
            raise ModelError(
                f"the model's config.json sets {key} to {values[key]!r}, which the torch backend does not support"
            )
    width, num_heads = _whole(values, "hidden_size"), _whole(values, "num_attention_heads")
    num_kv_heads = _whole(values, "num_key_value_heads", num_heads)
    head_dim = _whole(values, "head_dim", max(width // num_heads, 1))
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelError(
            f"the model's config.json has {num_heads} heads of {head_dim} over {num_kv_heads}, "
            "which do not divide evenly; it is damaged"
        )
    context = _whole(values, "max_position_embeddings", 2048)
    attention_bias = bool(values.get("attention_bias", False))
    return Architecture(
        family=family.name,
        num_layers=_whole(values, "num_hidden_layers"),
        width=width,
        hidden=_whole(values, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_rotated=head_dim,
        vocab_size=_whole(values, "vocab_size"),
        context=int(min(context, _window(values))),
        epsilon=_epsilon(values),
        rope=rope_from_config(values, head_dim, context),
        tied=values.get("tie_word_embeddings"),
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias and not family.qkv_bias,
        mlp_bias=bool(values.get("mlp_bias", False)),
        has_qk_norm=family.has_qk_norm,
    )


def _window(values: Mapping[str, Any]) -> float:
    """The sliding window limits the context: within it, sliding-window attention equals full attention."""
    if values.get("use_sliding_window", True) and values.get("sliding_window"):
        return _whole(values, "sliding_window")
    return math.inf


def _whole(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key)
    value = default if value is None else value
    if type(value) is not int or not 0 < value < 1 << 24:
        raise ModelError(f"the model's config.json has no usable {key} ({value!r}); it is damaged")
    return value


def _epsilon(values: Mapping[str, Any]) -> float:
    value = values.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ModelError(f"the model's config.json has no usable rms_norm_eps ({value!r}); it is damaged")
    return float(value)

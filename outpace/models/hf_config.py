"""Reads a model's architecture from a Hugging Face config.json."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.errors import ModelError
from outpace.models.architecture import BY_CLASS_NAME, Architecture
from outpace.models.hf_quantization import KEYS, StoredQuantization, read_quantization
from outpace.models.hf_rope import rope_from_config
from outpace.models.hf_schema import Config, Kind, read_json, validate

_NAME = "the model's config.json"

# Keys that change the arithmetic, with the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}


def read_config(folder: Path) -> Architecture:
    return parse_config(_values(folder))


def read_stored_quantization(folder: Path) -> StoredQuantization | None:
    """How the weights are quantised; None if they are not."""
    return read_quantization(_values(folder), _NAME)


def _values(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / "config.json")
    except FileNotFoundError as error:
        raise ModelError(f"{folder} has no readable config.json; name the folder of a Hugging Face model") from error


def parse_config(values: Mapping[str, Any]) -> Architecture:
    class_name = (validate(Kind, values, _NAME).architectures or ["unknown"])[0]
    family = BY_CLASS_NAME.get(class_name)
    if family is None:
        raise ModelError(
            f"the model is a {class_name:.80}, which the torch backend does not run; it runs {', '.join(BY_CLASS_NAME)}"
        )
    check_arithmetic({key: value for key, value in values.items() if key not in KEYS}, _NAME)
    read_quantization(values, _NAME)
    config = validate(Config, values, _NAME)
    width, num_heads = config.hidden_size, config.num_attention_heads
    num_kv_heads = config.num_key_value_heads or num_heads
    head_dim = config.head_dim or max(width // num_heads, 1)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelError(
            f"{_NAME} has {num_heads} heads of {head_dim} over {num_kv_heads}, which do not divide evenly; "
            "it is damaged"
        )
    context = config.max_position_embeddings or 2048
    attention_bias = bool(config.attention_bias)
    return Architecture(
        family=family.name,
        num_layers=config.num_hidden_layers,
        width=width,
        hidden=config.intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_rotated=head_dim,
        vocab_size=config.vocab_size,
        context=min(context, _window(config) or context),
        epsilon=config.rms_norm_eps,
        rope=rope_from_config(config, head_dim, context),
        tied=config.tie_word_embeddings,
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias and not family.qkv_bias,
        mlp_bias=bool(config.mlp_bias),
        has_qk_norm=family.has_qk_norm,
    )


def check_arithmetic(values: Mapping[str, Any], name: str) -> None:
    """Raise ModelError for a key that changes the arithmetic. `name` says which file this is."""
    for key, neutral in _NEUTRAL.items():
        if values.get(key, neutral[0]) not in neutral:
            raise ModelError(
                f"{name} sets {key} to {reprlib.repr(values[key])}, which the torch backend does not support"
            )


def _window(config: Config) -> int | None:
    """The sliding window limits the context: within it, sliding-window attention equals full attention."""
    return None if config.use_sliding_window is False else config.sliding_window

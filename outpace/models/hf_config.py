"""Reads a model's architecture from a Hugging Face config.json."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.errors import ModelError
from outpace.models.architecture import Activation, Architecture, Experts
from outpace.models.families import BY_CLASS_NAME, Family
from outpace.models.hf_quantization import StoredQuantization, read_quantization
from outpace.models.hf_rope import local_rope_from_config, num_rotated_elements, rope_from_config
from outpace.models.hf_schema import Config, JsonFile, Kind, read_json, validate

_NAME = "the model's config.json"
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_FULL, _SLIDING = "full_attention", "sliding_attention"

# Keys that change the arithmetic, with the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (None, False),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": (None, []),
}
_NEUTRAL_IN_HEADS = _NEUTRAL | {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}


def read_config(folder: Path) -> Architecture:
    return parse_config(_values(folder))


def read_family(folder: Path) -> Family:
    return _family(_values(folder))


def read_stored_quantization(folder: Path) -> StoredQuantization | None:
    """How the weights are quantised; None if they are not."""
    return read_quantization(_values(folder), _NAME)


def _values(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / "config.json")
    except FileNotFoundError as error:
        raise ModelError(f"{folder} has no readable config.json; name the folder of a Hugging Face model") from error


def _family(values: Mapping[str, Any]) -> Family:
    class_name = (validate(Kind, values, _NAME).architectures or ["unknown"])[0]
    family = BY_CLASS_NAME.get(class_name)
    if family is None:
        raise ModelError(
            f"the model is a {class_name:.80}, which the torch backend does not run; it runs {', '.join(BY_CLASS_NAME)}"
        )
    return family


def parse_config(values: Mapping[str, Any]) -> Architecture:
    family = _family(values)
    read_quantization(values, _NAME)
    values = {**family.defaults, **_text_values(values, family)}
    _check(_NEUTRAL, values, _NAME)
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
    windows = _windows(config, context)
    num_rotated = num_rotated_elements(config, head_dim)
    has_local_rope = family.has_local_rope and any(windows)
    return Architecture(
        family=family.name,
        num_layers=config.num_hidden_layers,
        width=width,
        hidden=(config.moe_intermediate_size if family.has_experts else None) or config.intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_rotated=num_rotated,
        vocab_size=config.vocab_size,
        context=context,
        epsilon=config.rms_norm_eps,
        rope=rope_from_config(config, num_rotated, context),
        local_rope=local_rope_from_config(config, num_rotated, context) if has_local_rope else None,
        tied=config.tie_word_embeddings,
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias and not family.qkv_bias,
        mlp_bias=bool(config.mlp_bias),
        has_qk_norm=family.has_qk_norm,
        activation=_activation(config),
        experts=_experts(config) if family.has_experts else None,
        has_offset_norms=family.has_offset_norms,
        has_output_norms=family.has_output_norms,
        embedding_scale=math.sqrt(width) if family.has_scaled_embedding else 1.0,
        attention_scale=config.query_pre_attn_scalar**-0.5 if config.query_pre_attn_scalar else None,
        attention_softcap=config.attn_logit_softcapping,
        logit_softcap=config.final_logit_softcapping,
        windows=windows,
    )


def _text_values(values: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    if not family.text_key:
        return values
    found = values.get(family.text_key)
    if not isinstance(found, dict):
        raise ModelError(f"{_NAME} has no usable {family.text_key} ({reprlib.repr(found)}); it is damaged")
    return found


def _windows(config: Config, context: int) -> tuple[int | None, ...]:
    """By layer, from its kind if the kinds are stated; empty if no layer has a window that matters."""
    window = None if config.use_sliding_window is False else config.sliding_window
    if not window or window >= context:
        return ()
    num_layers, pattern = config.num_hidden_layers, config.sliding_window_pattern
    kinds = config.layer_types
    if kinds is None:
        first = (config.max_window_layers or 0) if config.use_sliding_window else 0
        is_full = [i < first or (pattern is not None and (i + 1) % pattern == 0) for i in range(num_layers)]
        kinds = [_FULL if full else _SLIDING for full in is_full]
    if len(kinds) != num_layers or not set(kinds) <= {_FULL, _SLIDING}:
        raise ModelError(
            f"{_NAME} sets layer_types to {reprlib.repr(kinds)}; the torch backend needs {_FULL!r} or {_SLIDING!r} for "
            f"each of its {num_layers} layers"
        )
    found = tuple(window if kind == _SLIDING else None for kind in kinds)
    return found if any(found) else ()


def _activation(config: Config) -> Activation:
    key = "hidden_activation" if config.hidden_activation is not None else "hidden_act"
    name = getattr(config, key) or "silu"
    if name not in _ACTIVATIONS:
        raise _unsupported(_NAME, key, name)
    return _ACTIVATIONS[name]


class _ExpertKeys(JsonFile):
    num_experts: int
    num_experts_per_tok: int


def _experts(config: Config) -> Experts:
    stated = {
        "num_experts": config.num_experts or config.num_local_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
    }
    keys = validate(_ExpertKeys, stated, _NAME)
    if keys.num_experts_per_tok > keys.num_experts:
        raise ModelError(
            f"{_NAME} chooses {keys.num_experts_per_tok} of {keys.num_experts} experts for a token; it is damaged"
        )
    return Experts(keys.num_experts, keys.num_experts_per_tok, bool(config.norm_topk_prob))


def check_head_arithmetic(values: Mapping[str, Any], name: str) -> None:
    """Raise ModelError for a key that changes the arithmetic of a draft head. `name` says which file this is."""
    _check(_NEUTRAL_IN_HEADS, values, name)


def _check(neutral: Mapping[str, tuple[Any, ...]], values: Mapping[str, Any], name: str) -> None:
    for key, allowed in neutral.items():
        if values.get(key, allowed[0]) not in allowed:
            raise _unsupported(name, key, values[key])


def _unsupported(name: str, key: str, value: object) -> ModelError:
    return ModelError(f"{name} sets {key} to {reprlib.repr(value)}, which the torch backend does not support")

"""The keys of a draft head's config.json that Outpace reads, and the part of its description that all formats share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from outpace.errors import ModelError
from outpace.models.head_file import HeadConfig, TapNorm
from outpace.models.hf_config import check_head_arithmetic
from outpace.models.hf_rope import rope_from_config
from outpace.models.hf_schema import MAX_LAYERS, Config, JsonFile, Size, validate

Tap = Annotated[int, Field(strict=True, ge=0, le=MAX_LAYERS)]
Taps = Annotated[list[Tap], Field(min_length=1, max_length=64)]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a description needs besides the config."""

    source: str  # the file's name in messages
    tensors: Collection[str]  # names, as `speculators` spells them
    num_target_layers: int


class HeadKeys(JsonFile):
    """Keys that heads have besides those of a model."""

    draft_vocab_size: Size | None = None
    target_hidden_size: Size | None = None
    eagle_aux_hidden_state_layer_ids: Taps | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None


def describe(
    layer_values: Mapping[str, Any], keys: HeadKeys, around: Surroundings, *, taps: tuple[int, ...], **more: Any
) -> HeadConfig:
    """`layer_values`: sizes and options of the head's layer, under the keys of a Llama; `more`: what a format decides.

    RoPE, head counts, epsilon and biases are the head's own, which may differ from the target's.
    """
    source = around.source
    check_head_arithmetic(layer_values, source)
    layer = validate(Config, layer_values, source)
    if layer.num_hidden_layers != 1:
        raise ModelError(f"{source} has {layer.num_hidden_layers} layers, but draft heads are read with one layer")
    if "sliding_attention" in (layer.layer_types or ()):
        raise ModelError(f"{source} asks for sliding-window attention, which draft heads do not support here")
    head_dim = layer.head_dim or max(layer.hidden_size // layer.num_attention_heads, 1)
    if head_dim % 2:
        raise ModelError(f"{source} has heads of {head_dim} elements, an odd number; it is damaged")
    try:
        rope = rope_from_config(layer, head_dim, layer.max_position_embeddings or 2048)
        values: dict[str, Any] = {
            "width": layer.hidden_size,
            "hidden": layer.intermediate_size,
            "num_heads": layer.num_attention_heads,
            "num_kv_heads": layer.num_key_value_heads or layer.num_attention_heads,
            "head_dim": head_dim,
            "vocab_size": layer.vocab_size,
            "draft_vocab_size": keys.draft_vocab_size or layer.vocab_size,
            "taps": taps,
            "epsilon": layer.rms_norm_eps,
            "rope": rope,
            "target_width": keys.target_hidden_size,
            "tap_norm": _tap_norm(keys),
            "norm_output": bool(keys.norm_output),
            "has_embedding": "embed_tokens.weight" in around.tensors,
            "qkv_bias": bool(layer.attention_bias),
            "out_bias": bool(layer.attention_bias),
            "mlp_bias": bool(layer.mlp_bias),
        }
        return HeadConfig(**(values | more))
    except ModelError as error:
        raise ModelError(f"{source} cannot be used: {error}") from error


def default_taps(num_target_layers: int) -> tuple[int, ...]:
    """Where a head reads the target if its file does not say: EAGLE-3's own choice."""
    return 2, num_target_layers // 2, num_target_layers - 3


def _tap_norm(keys: HeadKeys) -> TapNorm:
    if keys.norm_before_fc and keys.fc_norm:
        raise ModelError("it sets norm_before_fc and fc_norm, which exclude each other")
    return "joint" if keys.norm_before_fc else "each" if keys.fc_norm else "none"

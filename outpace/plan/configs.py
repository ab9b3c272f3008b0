"""Reads a model's shape from the config.json of a Hugging Face folder.

`models/hf_config.py` refuses what no backend here runs. A plan is arithmetic, so this reader also takes mixtures of
experts, latent attention and windows. Files are checked in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, Field

from outpace.errors import ModelError
from outpace.models.hf_schema import MAX_LAYERS, JsonFile, Size, read_json, validate
from outpace.plan.shapes import Experts, Latent, Shape

Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 24)]
_QK_NORM_TYPES = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text")
_QKV_BIAS_TYPES = ("qwen2", "qwen2_moe")
_FOUR_NORM_TYPES = ("gemma2", "gemma3", "gemma3_text")
_TIED_TYPES = ("gemma", *_FOUR_NORM_TYPES)
_DEFAULT_CONTEXT = 2048
_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


def _named(*names: str) -> Any:
    return Field(default=None, validation_alias=AliasChoices(*names))


class _Quantised(JsonFile):
    quant_method: str | None = None
    bits: int | None = None
    load_in_4bit: bool | None = None


class _Config(JsonFile):
    model_type: str | None = None
    hidden_size: Size
    intermediate_size: Size | None = None
    num_hidden_layers: Annotated[Size, Field(le=MAX_LAYERS)]
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    vocab_size: Size
    max_position_embeddings: Size | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    sliding_window: Count | None = None
    use_sliding_window: bool | None = None
    layer_types: list[str] | None = None
    experts: Size | None = _named("num_local_experts", "num_experts", "n_routed_experts")
    active: Size | None = _named("num_experts_per_tok", "experts_per_token")
    expert_hidden: Size | None = _named("moe_intermediate_size")
    shared: Count | None = _named("n_shared_experts")
    dense_layers: Count | None = _named("first_k_dense_replace")
    kv_lora_rank: Size | None = None
    q_lora_rank: Size | None = None
    qk_rope_head_dim: Size | None = None
    qk_nope_head_dim: Size | None = None
    v_head_dim: Size | None = None
    quantization_config: _Quantised | None = None


def read_folder(folder: Path) -> tuple[Shape, str, str]:
    """The shape, the family and the precision of the model in a folder."""
    try:
        values = read_json(folder / "config.json")
    except FileNotFoundError as error:
        raise ModelError(f"{folder} has no readable config.json; name the folder of a Hugging Face model") from error
    return parse_config(values, str(folder / "config.json"))


def parse_config(values: Mapping[str, Any], source: str) -> tuple[Shape, str, str]:
    inner = values.get("text_config")
    if isinstance(inner, Mapping) and "num_hidden_layers" in inner:  # a model of texts and images
        values = {**values, **inner}
    for key in _NEEDED:
        if values.get(key) is None:
            raise ModelError(
                f"{source} has no usable {key} (None); name a language model whose config.json has the keys of "
                "Llama's, or its GGUF file"
            )
    config = validate(_Config, values, source)
    kind = config.model_type or "unknown"
    hidden = config.intermediate_size or config.expert_hidden
    if hidden is None:
        raise ModelError(f"{source} has no usable intermediate_size (None); it is damaged, so download it again")
    latent = _latent(config, source)
    try:
        shape = _shape(config, kind, hidden, latent)
    except ModelError as error:
        raise ModelError(f"{source} does not describe a model: {error}; download it again") from error
    return shape, kind, _precision(config.quantization_config)


def _shape(config: _Config, kind: str, hidden: int, latent: Latent | None) -> Shape:
    heads, tied, has_own_bias = config.num_attention_heads, config.tie_word_embeddings, kind == "gpt_oss"
    window = 0 if config.use_sliding_window is False else config.sliding_window or 0
    return Shape(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        hidden=hidden,
        heads=heads,
        kv_heads=config.num_key_value_heads or heads,
        head_dim=config.head_dim or max(config.hidden_size // heads, 1),
        vocab_size=config.vocab_size,
        context=config.max_position_embeddings or _DEFAULT_CONTEXT,
        tied=kind in _TIED_TYPES if tied is None else tied,
        qkv_bias=kind in _QKV_BIAS_TYPES or bool(config.attention_bias),
        out_bias=bool(config.attention_bias) and kind not in _QKV_BIAS_TYPES,
        mlp_bias=bool(config.mlp_bias),
        qk_norm=kind in _QK_NORM_TYPES,
        norms_per_layer=4 if kind in _FOUR_NORM_TYPES else 2,
        window=window,
        windowed_layers=_windowed(config, kind) if window else 0,
        has_sinks=has_own_bias,
        experts=_experts(config, hidden, has_own_bias),
        latent=latent,
    )


def _experts(config: _Config, hidden: int, has_bias: bool) -> Experts | None:
    if config.experts is None or config.experts == 1:
        return None
    active = min(config.active or 2, config.experts)
    return Experts(
        config.experts, active, config.expert_hidden or hidden, config.shared or 0, config.dense_layers or 0, has_bias
    )


def _latent(config: _Config, source: str) -> Latent | None:
    if config.kv_lora_rank is None:
        return None
    rope, nope, value = config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim
    if rope is None or nope is None or value is None:
        raise ModelError(
            f"{source} has kv_lora_rank but not all of qk_rope_head_dim, qk_nope_head_dim and v_head_dim; "
            "it is damaged, so download it again"
        )
    return Latent(config.kv_lora_rank, rope, nope, value, config.q_lora_rank or 0)


def _windowed(config: _Config, kind: str) -> int:
    """Layers that attend to a window: as listed, else as the family is known to alternate, else all."""
    layers = config.num_hidden_layers
    if config.layer_types is not None:
        return sum(each == "sliding_attention" for each in config.layer_types)
    if kind in ("gemma3", "gemma3_text"):
        return layers - layers // 6
    return layers // 2 if kind in ("gemma2", "gpt_oss") else layers


def _precision(quantised: _Quantised | None) -> str:
    method = (quantised.quant_method or "").lower() if quantised is not None else ""
    if quantised is None or not method:
        return "bf16"
    if method in ("fp8", "mxfp4"):
        return method
    if quantised.bits == 8 or (method == "bitsandbytes" and not quantised.load_in_4bit):
        return "int8"
    return "fp8" if method in ("compressed-tensors", "fbgemm_fp8") and quantised.bits is None else "int4"

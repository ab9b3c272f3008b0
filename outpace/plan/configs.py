"""Reads a model's shape from the config.json of a Hugging Face folder, or from the header of a GGUF file.

`models/hf_config.py` and `models/gguf_model.py` refuse what no backend here runs. A plan is arithmetic, so these
readers also take mixtures of experts, latent attention and windows. Files are checked by the same schemas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, Field

from outpace.errors import ModelError
from outpace.models.gguf_header import GGUFHeader, Scalar
from outpace.models.hf_schema import MAX_LAYERS, JsonFile, Size, read_json, validate
from outpace.plan.shapes import Experts, Latent, Shape

Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 24)]
_QK_NORM_TYPES = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text")
_QKV_BIAS_TYPES = ("qwen2", "qwen2_moe")
_FOUR_NORM_TYPES = ("gemma2", "gemma3", "gemma3_text")
_TIED_TYPES = ("gemma", *_FOUR_NORM_TYPES)
_DEFAULT_CONTEXT = 2048


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
    config = validate(_Config, values, source)
    kind = config.model_type or "unknown"
    heads = config.num_attention_heads
    hidden = config.intermediate_size or config.expert_hidden
    if hidden is None:
        raise ModelError(f"{source} has no usable intermediate_size (None); it is damaged, so download it again")
    latent = _latent(config, source)
    tied = config.tie_word_embeddings
    has_own_bias = kind == "gpt_oss"
    window = 0 if config.use_sliding_window is False else config.sliding_window or 0
    shape = Shape(
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
    return shape, kind, _precision(config.quantization_config)


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


def shape_of_gguf(header: GGUFHeader, path: Path) -> Shape:
    """From the metadata, and from the shapes of tensors where the metadata holds lists."""
    metadata = _Metadata(header, path)
    tensors = {info.name: info.shape for info in header.tensors}
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise ModelError(f"{path} has no token_embd.weight, so it is not a language model; name the model's GGUF file")
    width, heads = metadata.whole("embedding_length"), metadata.whole("attention.head_count")
    head_dim = metadata.whole("attention.key_length", max(width // heads, 1))
    keys = tensors.get("blk.0.attn_k.weight")
    kv_heads = metadata.whole("attention.head_count_kv", keys[1] // head_dim if keys else heads)
    hidden = metadata.whole("feed_forward_length", metadata.whole("expert_feed_forward_length", 4 * width))
    experts = metadata.whole("expert_count", 0, least=0)
    window = metadata.whole("attention.sliding_window", 0, least=0)
    layers = metadata.whole("block_count")
    return Shape(
        layers=layers,
        width=width,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=embedding[1],
        context=metadata.whole("context_length", _DEFAULT_CONTEXT),
        tied="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        norms_per_layer=4 if "blk.0.post_ffw_norm.weight" in tensors else 2,
        window=window,
        windowed_layers=layers // 2 if window else 0,
        experts=Experts(
            experts,
            min(metadata.whole("expert_used_count", 2), experts),
            metadata.whole("expert_feed_forward_length", hidden),
            metadata.whole("expert_shared_count", 0, least=0),
            metadata.whole("leading_dense_block_count", 0, least=0),
        )
        if experts > 1
        else None,
        latent=metadata.latent(),
    )


def gguf_bytes(header: GGUFHeader, path: Path) -> tuple[float, float, float]:
    """Bytes of the layers, of the embeddings, and of the output head (0: the embeddings serve as it)."""
    layers = embedding = output = 0.0
    for info in header.tensors:
        if info.num_bytes is None:
            raise ModelError(f"{path} holds {info.name} in a type that is not known; update Outpace")
        if info.name == "token_embd.weight":
            embedding += info.num_bytes
        elif info.name == "output.weight":
            output += info.num_bytes
        else:
            layers += info.num_bytes
    return layers, embedding, output


def num_gguf_parameters(header: GGUFHeader) -> int:
    return sum(math.prod(info.shape) for info in header.tensors)


class _Metadata:
    def __init__(self, header: GGUFHeader, path: Path) -> None:
        self._values, self._prefix, self._path = header.metadata, header.architecture, path

    def get(self, key: str) -> Scalar | None:
        return self._values.get(f"{self._prefix}.{key}")

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not int or not least <= value < 1 << 24:
            raise ModelError(f"{self._path} has no usable {self._prefix}.{key} ({value!r}); convert the model again")
        return value

    def latent(self) -> Latent | None:
        rank = self.whole("attention.kv_lora_rank", 0, least=0)
        if not rank:
            return None
        rope = self.whole("rope.dimension_count", 64)
        whole = self.whole("attention.key_length_mla", self.whole("attention.key_length"))
        value = self.whole("attention.value_length_mla", self.whole("attention.value_length"))
        return Latent(rank, rope, max(whole - rope, 1), value, self.whole("attention.q_lora_rank", 0, least=0))

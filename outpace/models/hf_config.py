"""What a model is, from a Hugging Face config.json or a GGUF header: sizes, options, RoPE. No weights, no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.errors import ModelError
from outpace.models.gguf_model import FAMILIES as GGUF_FAMILIES
from outpace.models.gguf_model import Architecture
from outpace.models.rope import Rope, rope_from_config


@dataclass(frozen=True, slots=True)
class Family:
    """What the config.json of a family leaves unsaid."""

    name: str
    qkv_bias: bool = False  # always; elsewhere `attention_bias` decides
    has_qk_norm: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family("llama"),  # SmolLM2 too
    "MistralForCausalLM": Family("mistral"),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True),
    "Qwen3ForCausalLM": Family("qwen3", has_qk_norm=True),
}

# Keys that change the arithmetic, with the values that leave it alone.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    family: str
    num_layers: int
    width: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context: int
    epsilon: float
    rope: Rope
    tied: bool | None  # None: tied where the weights have no head of their own
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    has_qk_norm: bool = False

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_layer_parameters(self) -> int:
        """Of all layers' matrices, which every step reads."""
        attention = (2 * self.q_size + 2 * self.kv_size) * self.width
        return self.num_layers * (attention + 3 * self.hidden * self.width)

    @property
    def cache_elements_per_token(self) -> int:
        """Keys and values of one token, in all layers."""
        return 2 * self.num_layers * self.kv_size


def read_config(folder: Path) -> ModelConfig:
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
        raise ModelError(f"{path} holds no settings; download it again")
    return parse_config(values)


def parse_config(values: Mapping[str, Any]) -> ModelConfig:
    architecture = str((values.get("architectures") or ["unknown"])[0])
    family = FAMILIES.get(architecture)
    if family is None:
        raise ModelError(
            f"the model is a {architecture}, which the torch backend does not run; it runs {', '.join(FAMILIES)}"
        )
    for key, neutral in _NEUTRAL.items():
        if values.get(key, neutral[0]) not in neutral:
            raise ModelError(f"the model's config.json sets {key} to {values[key]!r}, which the torch backend lacks")
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
    return ModelConfig(
        family=family.name,
        num_layers=_whole(values, "num_hidden_layers"),
        width=width,
        hidden=_whole(values, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
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


def config_from_gguf(architecture: Architecture, family: str, biases: frozenset[str], *, tied: bool) -> ModelConfig:
    """From what the native backend's reader understood of a GGUF file; `biases` are those its layers have."""
    if architecture.num_rotated != architecture.head_dim:
        raise ModelError(
            f"the model rotates {architecture.num_rotated} of {architecture.head_dim} elements of a head, "
            "which the torch backend lacks"
        )
    return ModelConfig(
        family=family,
        num_layers=architecture.num_layers,
        width=architecture.width,
        hidden=architecture.hidden,
        num_heads=architecture.num_heads,
        num_kv_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        vocab_size=architecture.vocab_size,
        context=architecture.context,
        epsilon=architecture.epsilon,
        rope=Rope(architecture.rope_frequencies, architecture.rope_scale),
        tied=tied,
        qkv_bias="attn_q.bias" in biases,
        out_bias="attn_output.bias" in biases,
        has_qk_norm=GGUF_FAMILIES[family].has_qk_norm,
    )


def _window(values: Mapping[str, Any]) -> float:
    """Within its window, attention over a sliding window is ordinary attention; so that is the longest context."""
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

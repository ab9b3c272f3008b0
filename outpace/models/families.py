"""The model families: what sets each apart from Llama. A new Llama-like family is one entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of a model family that its files do not contain."""

    name: str
    class_name: str  # in a config.json
    gguf_name: str = ""  # in GGUF files; Mistral's say "llama"
    is_permuted: bool = False  # in GGUF files, RoPE pairs neighbours in a head, not its two halves
    qkv_bias: bool = False  # always; otherwise `attention_bias` decides
    has_qk_norm: bool = False
    has_offset_norms: bool = False  # a norm's factor is 1 + its weight
    has_output_norms: bool = False  # the outputs of attention and MLP are normed before they are added
    has_scaled_embedding: bool = False  # times the square root of the width
    has_local_rope: bool = False  # layers with a sliding window have a RoPE of their own
    has_experts: bool = False
    text_key: str = ""  # the key of config.json that holds the language model's keys
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of config.json, for keys that its files leave out
    # Tensors. Names are changed to those of Llama, Qwen3 and Qwen3-MoE.
    names: Mapping[str, str] = field(default_factory=dict)  # parts of names: as stored, and as read
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # matrices that are stored above each other
    ignored: tuple[str, ...] = ()  # beginnings of names that text does not need


_GEMMA: dict[str, Any] = {"has_offset_norms": True, "has_scaled_embedding": True}
_GEMMA_NORMS = {
    "post_attention_layernorm": "attention_output_norm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp_output_norm",
}
_GEMMA3: dict[str, Any] = {
    **_GEMMA, "has_qk_norm": True, "has_output_norms": True, "has_local_rope": True,
    # The published files of the larger models leave most of these out.
    "defaults": {
        "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 131072, "query_pre_attn_scalar": 256, "rope_theta": 1e6, "sliding_window": 4096,
        "sliding_window_pattern": 6, "hidden_activation": "gelu_pytorch_tanh",
    },
}  # fmt: skip
_QWEN: dict[str, Any] = {"max_window_layers": 28}

_FAMILIES = (
    Family("llama", "LlamaForCausalLM", gguf_name="llama", is_permuted=True),  # SmolLM2 too
    Family("mistral", "MistralForCausalLM", gguf_name="llama"),
    Family("qwen2", "Qwen2ForCausalLM", gguf_name="qwen2", qkv_bias=True, defaults=_QWEN),
    Family("qwen3", "Qwen3ForCausalLM", gguf_name="qwen3", has_qk_norm=True, defaults=_QWEN),
    Family("gemma", "GemmaForCausalLM", **_GEMMA),
    Family(
        "gemma2", "Gemma2ForCausalLM", **_GEMMA, has_output_norms=True, names=_GEMMA_NORMS,
        defaults={"sliding_window_pattern": 2, "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh"},
    ),
    Family("gemma3", "Gemma3ForCausalLM", **_GEMMA3, names=_GEMMA_NORMS),
    Family(
        "gemma3", "Gemma3ForConditionalGeneration", **_GEMMA3, text_key="text_config",
        names=_GEMMA_NORMS | {
            "language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model.",
        },
        ignored=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    ),
    Family(  # Phi-4 too
        "phi3", "Phi3ForCausalLM",
        fused={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
    ),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", has_qk_norm=True, has_experts=True),
    Family(
        "mixtral", "MixtralForCausalLM", has_experts=True, defaults={"norm_topk_prob": True, "rope_theta": 1e6},
        names={"block_sparse_moe.": "mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."},
    ),
)  # fmt: skip
FAMILY_NAMES = frozenset(family.name for family in _FAMILIES)
BY_CLASS_NAME = {family.class_name: family for family in _FAMILIES}
BY_GGUF_NAME = {family.name: family for family in _FAMILIES if family.gguf_name == family.name}

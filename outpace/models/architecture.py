"""A model's family, sizes and options, independent of file format and backend."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.models.rope import Rope


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of a model family that its files do not contain."""

    name: str
    class_name: str  # in a config.json
    has_gguf: bool = True  # GGUF files use this name too; Mistral's use "llama"
    is_permuted: bool = False  # in GGUF files, RoPE pairs neighbours in a head, not its two halves
    qkv_bias: bool = False  # always; otherwise `attention_bias` decides
    has_qk_norm: bool = False


_FAMILIES = (
    Family("llama", "LlamaForCausalLM", is_permuted=True),  # SmolLM2 too
    Family("mistral", "MistralForCausalLM", has_gguf=False),
    Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True),
    Family("qwen3", "Qwen3ForCausalLM", has_qk_norm=True),
)
BY_CLASS_NAME = {family.class_name: family for family in _FAMILIES}
BY_GGUF_NAME = {family.name: family for family in _FAMILIES if family.has_gguf}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    family: str
    num_layers: int
    width: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_rotated: int  # elements of a head that RoPE rotates
    halves_rotated: bool = True  # RoPE pairs the two halves of a head; else neighbours
    vocab_size: int
    context: int
    epsilon: float
    rope: Rope
    tied: bool | None  # None: tied if the weights have no output head
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
        """Parameters in the matrices of all layers, which every step reads."""
        attention = (2 * self.q_size + 2 * self.kv_size) * self.width
        return self.num_layers * (attention + 3 * self.hidden * self.width)

    @property
    def cache_elements_per_token(self) -> int:
        """Keys and values of one token, in all layers."""
        return 2 * self.num_layers * self.kv_size

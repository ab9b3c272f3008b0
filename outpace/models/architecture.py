"""A model's sizes and options, independent of file format and backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outpace.models.rope import Rope

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Experts:
    """Several MLPs per layer, of which a router chooses some for each token."""

    count: int
    per_token: int
    is_normalised: bool  # the weights of the chosen ones sum to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    family: str
    num_layers: int
    width: int
    hidden: int  # of one expert, if there are several
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_rotated: int  # elements of a head that RoPE rotates: the first ones
    halves_rotated: bool = True  # RoPE pairs the two halves of these; else neighbours
    vocab_size: int
    context: int
    epsilon: float
    rope: Rope
    tied: bool | None  # None: tied if the weights have no output head
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    has_qk_norm: bool = False
    # Options that only the torch backend runs.
    activation: Activation = "silu"
    experts: Experts | None = None
    has_offset_norms: bool = False  # a norm's factor is 1 + its weight
    has_output_norms: bool = False  # the outputs of attention and MLP are normed before they are added
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # of the products of queries and keys; None: head_dim ** -0.5
    attention_softcap: float | None = None  # c * tanh(x / c) of these
    logit_softcap: float | None = None
    windows: tuple[int | None, ...] = ()  # of each layer: latest tokens it attends to; empty: all tokens, in all layers
    local_rope: Rope | None = None  # of layers with a window, if they have their own

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def mlp_elements_per_token(self) -> int:
        """Hidden elements of the MLPs that a token passes through in a layer."""
        return self.hidden * (self.experts.per_token if self.experts else 1)

    @property
    def num_layer_parameters(self) -> int:
        """Parameters in the matrices of all layers, which every step reads; of experts, those of one token."""
        attention = (2 * self.q_size + 2 * self.kv_size) * self.width
        router = self.experts.count * self.width if self.experts else 0
        return self.num_layers * (attention + router + 3 * self.mlp_elements_per_token * self.width)

    @property
    def cache_elements_per_token(self) -> int:
        """Keys and values of one token, in all layers."""
        return 2 * self.num_layers * self.kv_size

    @property
    def unwindowed_context(self) -> int:
        """Within it, sliding windows change nothing."""
        return min([self.context, *(window for window in self.windows if window is not None)])

    @property
    def is_llama_like(self) -> bool:
        """Whether a layer has no other options than those of Llama, Qwen2 and Qwen3, and perhaps a window."""
        return (
            self.activation == "silu" and self.experts is None and not self.has_output_norms
            and not self.has_offset_norms and self.embedding_scale == 1.0 and self.attention_scale is None
            and self.attention_softcap is None and self.logit_softcap is None and self.num_rotated == self.head_dim
        )  # fmt: skip

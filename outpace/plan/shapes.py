"""A model's shape, and what follows from it: parameters, bytes that a step reads, cache per token.

A shape covers what `models/architecture.py` describes for the backends, and what only other engines run: experts,
latent attention (DeepSeek's MLA), layers that attend to a window. Nothing here is looked up: parameters are computed
from the shape, and tests compare them with the published counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from outpace.errors import ModelError

_MAX_SIZE = 1 << 24


@dataclass(frozen=True, slots=True)
class Experts:
    """Layers whose MLP is a mixture of experts."""

    count: int
    active: int  # per token
    hidden: int  # of one expert
    shared: int = 0  # more experts of this size that every token uses
    dense_layers: int = 0  # leading layers with an ordinary MLP
    has_bias: bool = False  # gpt-oss: on the router and on every matrix


@dataclass(frozen=True, slots=True)
class Latent:
    """Attention whose cache is one compressed vector per token."""

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_rank: int = 0  # 0: queries are not compressed


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context: int
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms_per_layer: int = 2
    window: int = 0  # tokens that windowed layers attend to; 0: all layers attend to everything
    windowed_layers: int = 0
    has_sinks: bool = False  # a learned value per head that takes part in attention's softmax
    experts: Experts | None = None
    latent: Latent | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "width", "hidden", "heads", "kv_heads", "head_dim", "vocab_size", "context"):
            value = getattr(self, name)
            if type(value) is not int or not 0 < value < _MAX_SIZE:
                raise ModelError(f"a model's {name} must be a whole number above 0; got {value!r}")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"a model's {self.heads} heads do not divide evenly over {self.kv_heads} heads of the cache"
            )
        dense = self.experts.dense_layers if self.experts is not None else 0
        if max(dense, self.windowed_layers) > self.layers:
            raise ModelError(
                f"a model of {self.layers} layers cannot have {max(dense, self.windowed_layers)} of one kind"
            )

    # ---- parameters

    @property
    def attention_parameters(self) -> int:
        """Of one layer, without biases and norms."""
        mla = self.latent
        if mla is None:
            return self.width * self.head_dim * 2 * (self.heads + self.kv_heads)
        query_dim = self.heads * (mla.nope_dim + mla.rope_dim)
        query = self.width * mla.q_rank + mla.q_rank * query_dim if mla.q_rank else self.width * query_dim
        down = self.width * (mla.kv_rank + mla.rope_dim)
        up = mla.kv_rank * self.heads * (mla.nope_dim + mla.value_dim)
        return query + down + up + self.heads * mla.value_dim * self.width

    @property
    def _small_parameters(self) -> int:
        """Biases and norms of all layers, and the final norm."""
        q, kv, mla = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.latent
        each = self.norms_per_layer * self.width
        each += (
            (q + 2 * kv) * self.qkv_bias + self.width * self.out_bias + (2 * self.hidden + self.width) * self.mlp_bias
        )
        each += 2 * self.head_dim * self.qk_norm + self.heads * self.has_sinks
        if mla is not None:
            each += mla.kv_rank + mla.q_rank
        return self.layers * each + self.width

    @property
    def dense_mlp_parameters(self) -> int:
        return 3 * self.width * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Of one expert, biases included."""
        experts = self.experts
        if experts is None:
            return 0
        return 3 * self.width * experts.hidden + experts.has_bias * (2 * experts.hidden + self.width)

    @property
    def expert_layers(self) -> int:
        return 0 if self.experts is None else self.layers - self.experts.dense_layers

    @property
    def router_parameters(self) -> int:
        experts = self.experts
        return 0 if experts is None else self.expert_layers * experts.count * (self.width + experts.has_bias)

    @property
    def layer_parameters(self) -> int:
        """Matrices, experts and routers of all layers."""
        dense_layers = self.layers - self.expert_layers
        total = self.layers * self.attention_parameters + dense_layers * self.dense_mlp_parameters
        if self.experts is not None:
            num_experts = self.experts.count + self.experts.shared
            total += self.expert_layers * num_experts * self.expert_parameters + self.router_parameters
        return total

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.width

    @property
    def outer_parameters(self) -> int:
        """Embeddings, and the output head where it has its own."""
        return self.embedding_parameters * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layer_parameters + self._small_parameters + self.outer_parameters

    @property
    def active_parameters(self) -> int:
        """Used for one token: all but the experts that are not chosen, and the embeddings of other tokens."""
        return round(self.layer_parameters_read(1)) + self._small_parameters + self.embedding_parameters

    def layer_parameters_read(self, tokens: int) -> float:
        """Layer parameters that a step of this many tokens reads. Tokens choose their experts independently here, so
        several tokens read more experts than one, which is what makes drafts dearer for such models."""
        experts = self.experts
        if experts is None:
            return float(self.layer_parameters)
        dense = self.layer_parameters - self.expert_layers * experts.count * self.expert_parameters
        used = experts.count * (1.0 - (1.0 - experts.active / experts.count) ** tokens)
        return dense + self.expert_layers * used * self.expert_parameters

    # ---- cache

    @property
    def cache_elements(self) -> int:
        """Of one token in one layer."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope_dim
        return 2 * self.kv_heads * self.head_dim

    def cached_elements(self, context: int) -> int:
        """Of one sequence of this length; windowed layers keep their window only."""
        whole = (self.layers - self.windowed_layers) * context
        return (whole + self.windowed_layers * min(context, self.window or context)) * self.cache_elements

    @property
    def cache_elements_per_token(self) -> int:
        """In all layers, as for an engine that gives every layer the whole context."""
        return self.layers * self.cache_elements

    @property
    def widest(self) -> int:
        """Elements of the activations that a token needs at the widest place of a layer."""
        hidden = self.hidden if self.experts is None else max(self.hidden, self.experts.active * self.experts.hidden)
        return 2 * hidden + (self.heads + 2 * self.kv_heads) * self.head_dim + 4 * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """A draft head: one layer over the target's hidden states (EAGLE-3's form, as `outpace distill` trains)."""

    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    draft_vocab_size: int
    taps: int
    target_width: int
    has_embedding: bool = False
    vocab_size: int = 0  # of its own embedding
    layers: int = 1

    @property
    def parameters(self) -> int:
        q, kv, width = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.width
        fuse = self.taps * self.target_width * width
        attention = 2 * width * (q + 2 * kv) + q * width  # it reads the token and the state, side by side
        own = self.vocab_size * width if self.has_embedding else 0
        norms = self.taps * self.target_width + 4 * width
        return fuse + attention + 3 * width * self.hidden + self.draft_vocab_size * width + norms + own

    @property
    def parameters_read(self) -> int:
        """In a pass: not the embedding."""
        return self.parameters - (self.vocab_size * self.width if self.has_embedding else 0)

    @property
    def cache_elements_per_token(self) -> int:
        """Keys and values of an entry, and the hidden states that the target keeps."""
        return 2 * self.kv_heads * self.head_dim + self.taps * self.target_width


def trained_head(target: Shape, draft_vocab_size: int) -> HeadShape:
    """The head that `outpace distill` would train for a target: one of its layers over three of its hidden states."""
    return HeadShape(
        width=target.width,
        hidden=target.hidden,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        draft_vocab_size=min(draft_vocab_size, target.vocab_size),
        taps=min(3, target.layers),
        target_width=target.width,
    )

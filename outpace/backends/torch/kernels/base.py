"""The operations of a layer that have more than one implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outpace.backends.torch.step import StepInputs


@dataclass(slots=True)
class Cache:
    """One layer's pages. A page holds the same tokens of every head, head by head, so that each head's are together."""

    keys: Tensor  # [num_pages, num_kv_heads, page_tokens, head_dim]
    values: Tensor


@dataclass(slots=True)
class Normed:
    """The next norm's work, begun by the kernel that made its input: `x` lacks only the division by its RMS."""

    x: Tensor  # [tokens, width], times the norm's weight
    squares: Tensor  # float32 [tokens, tiles]: sums of squares before that


@dataclass(slots=True)
class Hidden:
    """The stream that layers add to."""

    residual: Tensor  # [tokens, width]
    normed: Normed | None = None


class Ops(Protocol):
    """Weights are [outputs, inputs]. `norm` is the weight of an RMSNorm."""

    def embed(self, tokens: Tensor, embedding: Tensor) -> Hidden: ...

    def norm_linear(self, h: Hidden, norm: Tensor, epsilon: float, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, h: Hidden, next_norm: Tensor) -> Hidden:
        """h + linear(x), and what can be done of the norm that follows; may reuse h's memory."""
        ...

    def norm_swiglu(self, h: Hidden, norm: Tensor, epsilon: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        """silu(gate) * up of a fused [2 hidden, width] weight."""
        ...

    def norm_logits(self, h: Hidden, norm: Tensor, epsilon: float, head: Tensor) -> Tensor:
        """In float32."""
        ...

    def attend(
        self,
        qkv: Tensor,
        cache: Cache,
        step: StepInputs,
        rope: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        epsilon: float,
    ) -> Tensor:
        """Keys, rotated, and values into the cache; then every token over its row's cache, as far as it sees.

        [tokens, heads * head_dim]
        """
        ...

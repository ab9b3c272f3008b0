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


class Ops(Protocol):
    """`x` is [tokens, width]; weights are [outputs, inputs]."""

    def norm_linear(self, x: Tensor, norm: Tensor, epsilon: float, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """residual + linear(x); may reuse the residual's memory."""
        ...

    def norm_swiglu(self, x: Tensor, norm: Tensor, epsilon: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        """silu(gate) * up of a fused [2 hidden, width] weight."""
        ...

    def norm_logits(self, x: Tensor, norm: Tensor, epsilon: float, head: Tensor) -> Tensor:
        """In float32."""
        ...

    def rotate_and_store(
        self,
        qkv: Tensor,
        cache: Cache,
        step: StepInputs,
        rope: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        epsilon: float,
    ) -> Tensor:
        """Queries rotated, [tokens, heads, head_dim]; keys, rotated, and values into the cache."""
        ...

    def attention(self, q: Tensor, cache: Cache, step: StepInputs) -> Tensor:
        """Every token over its row's cache up to itself: [tokens, heads * head_dim]."""
        ...

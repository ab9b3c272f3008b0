"""The operations of a layer that have more than one implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outpace.backends.torch.execution.step import StepInputs
from outpace.backends.torch.storage import Weight
from outpace.backends.torch.storage.scaled import Scaled
from outpace.models.architecture import Experts


@dataclass(slots=True)
class Cache:
    """One layer's pages. A page holds the same tokens for every head; the tokens of one head are contiguous."""

    keys: Tensor  # [num_pages, num_kv_heads, page_tokens, head_dim]
    values: Tensor
    first: int = 0  # positions before it are not attended to
    key_scales: Tensor | None = None  # float32 [num_pages, num_kv_heads, page_tokens], if keys and values have 8 bits
    value_scales: Tensor | None = None


FIXED_BLOCK = 64  # tokens of a context per iteration, where attention divides contexts at fixed places
_FIXED_SHARE, _MOST_FIXED_SHARES = 256, 32


def fixed_shares(most_tokens: int) -> tuple[int, int]:
    """Tokens of a share, and how many shares the longest context has, where these must not depend on the step."""
    share = max(_FIXED_SHARE, -(-most_tokens // (_MOST_FIXED_SHARES * FIXED_BLOCK)) * FIXED_BLOCK)
    return share, -(-most_tokens // share)


@dataclass(frozen=True, slots=True)
class Scores:
    """How attention scores are computed, where a family differs from Llama."""

    scale: float | None = None  # of the products of queries and keys; None: head_dim ** -0.5
    softcap: float | None = None  # c * tanh(x / c) of these
    window: int | None = None  # latest tokens that a token attends to, itself included; None: all


LLAMA = Scores()


@dataclass(slots=True)
class Normed:
    """A partly computed norm, from the kernel that made its input: only the division by the RMS is missing."""

    x: Tensor  # [tokens, width], times the norm's weight
    squares: Tensor  # float32 [tokens, tiles]: sums of squares before the weight


@dataclass(frozen=True, slots=True)
class Operands:
    """Arguments of a fused product's kernel; `x` stands for absent tensors."""

    values: Tensor  # [tokens, K]
    pointers: tuple[Tensor, ...]  # x, weight, scales, bias, residual, out, squares, next norm, next x, next squares
    num_squares: int
    flags: tuple[bool, bool, bool, bool, bool]  # has scales, squares, bias, residual, next
    normed: Normed | None  # the next norm, as far as the kernel computes it

    @staticmethod
    def of(
        x: Tensor | Normed,
        weight: Tensor | Scaled,
        out: Tensor,
        num_tiles: int,
        bias: Tensor | None,
        residual: Tensor | None,
        next_norm: Tensor | None,
    ) -> Operands:
        values, squares = (x.x, x.squares) if isinstance(x, Normed) else (x, None)
        matrix, scales = (weight.values, weight.scales) if isinstance(weight, Scaled) else (weight, None)
        assert values.is_contiguous() and matrix.is_contiguous() and out.is_contiguous()
        normed = None
        if next_norm is not None:
            sums = torch.empty((len(values), num_tiles), dtype=torch.float32, device=out.device)
            normed = Normed(torch.empty_like(out), sums)
        begun = (normed.x, normed.squares) if normed is not None else (None, None)
        given = (values, matrix, scales, bias, residual, out, squares, next_norm, *begun)
        return Operands(
            values,
            tuple([tensor if tensor is not None else values for tensor in given]),
            0 if squares is None else squares.shape[1],
            (scales is not None, squares is not None, bias is not None, residual is not None, normed is not None),
            normed,
        )


@dataclass(slots=True)
class Hidden:
    """The residual stream."""

    residual: Tensor  # [tokens, width]
    normed: Normed | None = None


class Ops(Protocol):
    """Weights are [outputs, inputs]. `norm` is the weight of an RMSNorm."""

    has_trees: bool  # `attend` supports `StepInputs.branches`

    def embed(self, tokens: Tensor, embedding: Tensor) -> Hidden: ...

    def norm(self, x: Tensor, norm: Tensor, epsilon: float) -> Tensor: ...

    def linear(self, x: Tensor, weight: Weight) -> Tensor: ...

    def norm_linear(self, h: Hidden, norm: Tensor, epsilon: float, weight: Weight, bias: Tensor | None) -> Tensor: ...

    def linear_add(self, x: Tensor, weight: Weight, bias: Tensor | None, h: Hidden, next_norm: Tensor) -> Hidden:
        """h + linear(x), and the next norm as far as possible; may reuse h's memory."""
        ...

    def linear_norm_add(
        self, x: Tensor, weight: Weight, bias: Tensor | None, norm: Tensor, epsilon: float, h: Hidden, next_norm: Tensor
    ) -> Hidden:
        """h + norm(linear(x)), and the next norm as far as possible; may reuse h's memory."""
        ...

    def norm_swiglu(self, h: Hidden, norm: Tensor, epsilon: float, weight: Weight, bias: Tensor | None) -> Tensor:
        """silu(gate) * up of a fused [2 hidden, width] weight."""
        ...

    def geglu(self, gate_up: Tensor) -> Tensor:
        """gelu(gate) * up, by the approximation with tanh; [tokens, 2 hidden] to [tokens, hidden]."""
        ...

    def experts(
        self, x: Tensor, positions: Tensor, router: Tensor, gate_up: Weight, down: Weight, experts: Experts
    ) -> Tensor:
        """The weighted sum of the outputs of each token's experts, which are MLPs with silu. `gate_up` and `down` hold
        the experts' matrices one after the other. Tokens in gaps may be left out."""
        ...

    def norm_logits(self, h: Hidden, norm: Tensor, epsilon: float, head: Weight, room: Tensor | None = None) -> Tensor:
        """In float32; written into `room`, if given."""
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
        scores: Scores = LLAMA,
    ) -> Tensor:
        """Write rotated keys and values into the cache; then attend from every token to the visible part of its row.

        [tokens, heads * head_dim]
        """
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
        """Write keys and values as `attend` does; returns the rotated queries, of which `qkv` may have none."""
        ...

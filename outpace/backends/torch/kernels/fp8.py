"""Products of FP8 weights with many tokens, by torch: the tokens are rounded to FP8 too, each by its largest value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outpace.backends.torch.storage.scaled import FP8, Scaled

_LARGEST = tl.constexpr(448.0)


@dataclass(frozen=True, slots=True)
class RoundedTokens:
    values: Tensor  # FP8 [tokens, K]
    scales: Tensor  # float32 [tokens, 1]


@triton.jit
def _round_kernel(
    x_ptr, norm_ptr, values_ptr, scales_ptr, epsilon, K: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + token * K + k, k < K, 0.0).to(tl.float32)
    if HAS_NORM:
        x = x * tl.rsqrt(tl.sum(x * x) / K + epsilon) * tl.load(norm_ptr + k, k < K, 0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x)) / _LARGEST, 1e-30)
    tl.store(values_ptr + token * K + k, (x / scale).to(values_ptr.dtype.element_ty), k < K)
    tl.store(scales_ptr + token, scale)


def _round(x: Tensor, norm: Tensor | None, epsilon: float, dependent: bool) -> RoundedTokens:
    num_tokens, k = x.shape
    found = RoundedTokens(torch.empty_like(x, dtype=FP8), torch.empty((num_tokens, 1), device=x.device))
    block = triton.next_power_of_2(k)
    _round_kernel[(num_tokens,)](
        x, x if norm is None else norm, found.values, found.scales, epsilon, k, block, norm is not None, dependent,
        num_warps=16 if block > 8192 else 8 if block >= 2048 else 4, **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
    return found


def round_rows(x: Tensor, *, dependent: bool = False) -> RoundedTokens:
    return _round(x, None, 0.0, dependent)


def round_normed(x: Tensor, norm: Tensor, epsilon: float, *, dependent: bool = False) -> RoundedTokens:
    """After an RMSNorm."""
    return _round(x, norm, epsilon, dependent)


def linear(x: RoundedTokens, weight: Scaled, bias: Tensor | None = None) -> Tensor:
    """In bfloat16."""
    out: Tensor = torch._scaled_mm(
        x.values, weight.values.T, x.scales, weight.scales[None, :], out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return out if bias is None else out.add_(bias)

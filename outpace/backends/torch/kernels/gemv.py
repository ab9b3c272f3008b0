"""A matrix times one token, with its neighbours fused in: plain decoding of a single sequence.

The same products as `linear.py`, which takes several tokens with matrix units. One token needs none, so a program is
only a few rows of the weight. It loads its first weights before the previous kernel has ended, and enough programs run
to keep memory busy. Sums are float32, in another order than in `linear.py`: a token alone and the same token in a batch
may round differently.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outpace.backends.torch.kernels.base import Normed, Operands
from outpace.backends.torch.storage.scaled import Scaled


@dataclass(frozen=True, slots=True)
class GemvConfig:
    block_n: int  # rows of the weight per program
    block_k: int  # columns per iteration
    num_warps: int


def default_config(n: int, k: int, *, is_swiglu: bool) -> GemvConfig:
    """A good config on an H200 for weights of such a size, by `benchmarks/gpu_tune.py`."""
    if is_swiglu:
        return GemvConfig(1, 1024, 2)
    if k >= 2 * n:  # few, long rows
        return GemvConfig(16, 2048, 8)
    return GemvConfig(4, 2048, 4)


@triton.jit(do_not_specialize=["num_squares"])
def _gemv_kernel(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, residual_ptr, out_ptr, squares_ptr, next_norm_ptr, next_x_ptr,
    next_squares_ptr, num_squares, epsilon,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SQUARES_BLOCK: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_SQUARES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_NEXT: tl.constexpr, IS_SWIGLU: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    pid = tl.program_id(0)
    n, k = pid * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_row = n < N
    rows = weight_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    if DEPENDENT:
        gdc_launch_dependents()
    w = tl.load(rows, (k < K)[None, :], 0.0, eviction_policy="evict_first")
    up = w
    if IS_SWIGLU:
        up = tl.load(rows + N * K, (k < K)[None, :], 0.0, eviction_policy="evict_first")
    if DEPENDENT:
        gdc_wait()
    if HAS_SQUARES:
        j = tl.arange(0, SQUARES_BLOCK)
        squares = tl.load(squares_ptr + j, j < num_squares, 0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + n, is_row, 0.0).to(tl.float32)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    acc_up = acc
    for c in tl.static_range(CHUNKS):
        x = tl.load(x_ptr + c * BLOCK_K + k, c * BLOCK_K + k < K, 0.0).to(tl.float32)[None, :]
        now, now_up = w, up
        if c + 1 < CHUNKS:
            there = (k < K - (c + 1) * BLOCK_K)[None, :]
            w = tl.load(rows + (c + 1) * BLOCK_K, there, 0.0, eviction_policy="evict_first")
            if IS_SWIGLU:
                up = tl.load(rows + N * K + (c + 1) * BLOCK_K, there, 0.0, eviction_policy="evict_first")
        acc += now.to(tl.float32) * x
        if IS_SWIGLU:
            acc_up += now_up.to(tl.float32) * x
    y = tl.sum(acc, 1)
    y_up = y
    if IS_SWIGLU:
        y_up = tl.sum(acc_up, 1)
    if HAS_SCALES:
        y *= tl.load(scales_ptr + n, is_row, 0.0)
        if IS_SWIGLU:
            y_up *= tl.load(scales_ptr + N + n, is_row, 0.0)
    if HAS_SQUARES:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + epsilon)
        y = y * scale
        y_up = y_up * scale
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, is_row, 0.0).to(tl.float32)
        if IS_SWIGLU:
            y_up += tl.load(bias_ptr + N + n, is_row, 0.0).to(tl.float32)
    if IS_SWIGLU:
        y = y * tl.sigmoid(y) * y_up
    if HAS_RESIDUAL:
        y += residual
    out = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + n, out, is_row)
    if HAS_NEXT:
        wide = tl.where(is_row, out.to(tl.float32), 0.0)
        norm = tl.load(next_norm_ptr + n, is_row, 0.0).to(tl.float32)
        tl.store(next_x_ptr + n, (wide * norm).to(next_x_ptr.dtype.element_ty), is_row)
        tl.store(next_squares_ptr + pid, tl.sum(wide * wide, 0))


def gemv_linear(
    x: Tensor | Normed,
    weight: Tensor | Scaled,
    out: Tensor,
    config: GemvConfig,
    *,
    epsilon: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    next_norm: Tensor | None = None,
    swiglu: bool = False,
    dependent: bool = False,
) -> Normed | None:
    """`linear.stream_linear` for x [1, K]."""
    n = weight.shape[0] // (2 if swiglu else 1)
    programs = triton.cdiv(n, config.block_n)
    given = Operands.of(x, weight, out, programs, bias, residual, next_norm)
    num_tokens, k = given.values.shape
    assert num_tokens == 1
    _gemv_kernel[(programs,)](
        *given.pointers, given.num_squares, epsilon, n, k, config.block_n,
        min(config.block_k, triton.next_power_of_2(k)), triton.next_power_of_2(max(given.num_squares, 1)),
        *given.flags, swiglu, dependent,
        num_warps=config.num_warps, **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
    return given.normed

"""A matrix times 2 to 8 tokens on the matrix units, with small programs as in `gemv.py`.

The same products as `linear.py`. There, programs stream tile after tile, and most weights are not yet loaded when the
previous kernel ends. Here a program is a few rows of the weight: it loads the first of them at once, and is small
enough to start beside the previous kernel's programs. The warps of a program divide K among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outpace.backends.torch.kernels.assembly import widen
from outpace.backends.torch.kernels.base import Normed, Operands
from outpace.backends.torch.storage.scaled import Scaled

MAX_TOKENS = 8


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    block_n: int  # rows of the weight per program
    block_k: int  # columns per iteration, in each part of K
    num_warps: int  # each has a part of K


@triton.jit
def _add_product(acc, w, x):
    """The weight is the first operand: the matrix units take 16 rows of it, and as few as 8 tokens."""
    return tl.dot(widen(w, x.dtype), tl.permute(x, (0, 2, 1)), acc, input_precision="ieee")


@triton.jit(do_not_specialize=["M", "num_squares"])
def _skinny_gemm_kernel(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, residual_ptr, out_ptr, squares_ptr, next_norm_ptr, next_x_ptr,
    next_squares_ptr, M, num_squares, epsilon,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, SQUARES_BLOCK: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_SQUARES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NEXT: tl.constexpr, IS_SWIGLU: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The first dimension of weights, tokens and sums is the part of K; each warp has one part."""
    PART: tl.constexpr = K // PARTS
    CHUNKS: tl.constexpr = PART // BLOCK_K
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)
    m, n = tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_token = n < N, m < M
    k = tl.arange(0, PARTS)[:, None, None] * PART + tl.arange(0, BLOCK_K)[None, None, :]
    rows = weight_ptr + tl.minimum(n, N - 1).to(tl.int64)[None, :, None] * K + k
    xs, there = x_ptr + m[None, :, None] * K + k, is_token[None, :, None]
    if DEPENDENT:
        gdc_launch_dependents()
    w = tl.load(rows, eviction_policy="evict_first")
    up = w
    if IS_SWIGLU:
        up = tl.load(rows + N * K, eviction_policy="evict_first")
    if DEPENDENT:
        gdc_wait()
    x = tl.load(xs, there, 0.0)
    places, mask = m[None, :] * N + n[:, None], is_row[:, None] & is_token[None, :]
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + places, mask, 0.0).to(tl.float32)
    if HAS_SQUARES:
        j = tl.arange(0, SQUARES_BLOCK)
        known = is_token[:, None] & (j < num_squares)[None, :]
        squares = tl.sum(tl.load(squares_ptr + m[:, None] * num_squares + j[None, :], known, 0.0), 1)
        scale = tl.rsqrt(squares / K + epsilon)[None, :]
    acc = tl.zeros((PARTS, BLOCK_N, BLOCK_M), tl.float32)
    acc_up = acc
    for c in range(1, CHUNKS):
        next_w = tl.load(rows + c * BLOCK_K, eviction_policy="evict_first")
        next_x = tl.load(xs + c * BLOCK_K, there, 0.0)
        acc = _add_product(acc, w, x)
        if IS_SWIGLU:
            next_up = tl.load(rows + N * K + c * BLOCK_K, eviction_policy="evict_first")
            acc_up = _add_product(acc_up, up, x)
            up = next_up
        w, x = next_w, next_x
    acc = _add_product(acc, w, x)
    if IS_SWIGLU:
        acc_up = _add_product(acc_up, up, x)
    y = tl.sum(acc, 0)
    y_up = y
    if IS_SWIGLU:
        y_up = tl.sum(acc_up, 0)
    if HAS_SCALES:
        y *= tl.load(scales_ptr + n, is_row, 0.0)[:, None]
        if IS_SWIGLU:
            y_up *= tl.load(scales_ptr + N + n, is_row, 0.0)[:, None]
    if HAS_SQUARES:
        y = y * scale
        y_up = y_up * scale
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, is_row, 0.0).to(tl.float32)[:, None]
        if IS_SWIGLU:
            y_up += tl.load(bias_ptr + N + n, is_row, 0.0).to(tl.float32)[:, None]
    if IS_SWIGLU:
        y = y * tl.sigmoid(y) * y_up
    if HAS_RESIDUAL:
        y += residual
    out = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places, out, mask)
    if HAS_NEXT:
        wide = tl.where(mask, out.to(tl.float32), 0.0)
        norm = tl.load(next_norm_ptr + n, is_row, 0.0).to(tl.float32)
        tl.store(next_x_ptr + places, (wide * norm[:, None]).to(next_x_ptr.dtype.element_ty), mask)
        tl.store(next_squares_ptr + m * TILES + tile, tl.sum(wide * wide, 0), is_token)


def skinny_linear(
    x: Tensor | Normed,
    weight: Tensor | Scaled,
    out: Tensor,
    config: SkinnyConfig,
    *,
    epsilon: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    next_norm: Tensor | None = None,
    swiglu: bool = False,
    dependent: bool = False,
) -> Normed | None:
    """`linear.stream_linear` for x [M, K], M at most MAX_TOKENS."""
    n = weight.shape[0] // (2 if swiglu else 1)
    tiles = triton.cdiv(n, config.block_n)
    given = Operands.of(x, weight, out, tiles, bias, residual, next_norm)
    num_tokens, k = given.values.shape
    assert num_tokens <= MAX_TOKENS and k % (config.block_k * config.num_warps) == 0
    _skinny_gemm_kernel[(tiles,)](
        *given.pointers, num_tokens, given.num_squares, epsilon, n, k, MAX_TOKENS, config.block_n, config.block_k,
        config.num_warps, triton.next_power_of_2(max(given.num_squares, 1)), *given.flags, swiglu, dependent,
        num_warps=config.num_warps, num_stages=1, **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
    return given.normed

"""The epilogue of a product's tile: norm, bias, activation, residual, and the first part of the next norm."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_epilogue_inputs(
    tile, residual_ptr, squares_ptr, next_norm_ptr, M, num_squares, N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SQUARES_BLOCK: tl.constexpr, HAS_SQUARES: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_NEXT: tl.constexpr,
):  # fmt: skip
    """Load a tile's epilogue inputs: sums of squares, residual, the next norm's weight."""
    m, n = tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    squares, residual, norm = m, m, m  # placeholders for inputs that are not needed
    if HAS_SQUARES:
        j = tl.arange(0, SQUARES_BLOCK)
        there = (m < M)[:, None] & (j < num_squares)[None, :]
        squares = tl.load(squares_ptr + m[:, None] * num_squares + j[None, :], there, 0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + m[:, None] * N + n[None, :], (m < M)[:, None] & (n < N)[None, :], 0.0)
    if HAS_NEXT:
        norm = tl.load(next_norm_ptr + n, n < N, 0.0)
    return squares, residual, norm


@triton.jit
def apply_epilogue(
    acc, acc_up, squares, residual, norm, tile, out_ptr, scales_ptr, bias_ptr, next_x_ptr, next_squares_ptr, M, epsilon,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_SQUARES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_NEXT: tl.constexpr, IS_SWIGLU: tl.constexpr,
):  # fmt: skip
    m, n = tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (m < M)[:, None] & (n < N)[None, :]
    if HAS_SCALES:
        acc *= tl.load(scales_ptr + n, n < N, 0.0)[None, :]
        if IS_SWIGLU:
            acc_up *= tl.load(scales_ptr + N + n, n < N, 0.0)[None, :]
    if HAS_SQUARES:
        scale = tl.rsqrt(tl.sum(squares, 1) / K + epsilon)[:, None]
        acc = acc * scale
        acc_up = acc_up * scale
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)[None, :]
        if IS_SWIGLU:
            acc_up += tl.load(bias_ptr + N + n, n < N, 0.0).to(tl.float32)[None, :]
    if IS_SWIGLU:
        acc = acc * tl.sigmoid(acc) * acc_up
    places = m[:, None] * N + n[None, :]
    if HAS_RESIDUAL:
        acc += residual.to(tl.float32)
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places, out, mask)
    if HAS_NEXT:
        wide = tl.where(mask, out.to(tl.float32), 0.0)
        tl.store(next_x_ptr + places, (wide * norm.to(tl.float32)[None, :]).to(next_x_ptr.dtype.element_ty), mask)
        tl.store(next_squares_ptr + m * TILES + tile, tl.sum(wide * wide, 1), m < M)

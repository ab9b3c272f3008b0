"""The epilogue of a product's tile: sums of its splits, norm, bias, activation, residual, the first part of the next
norm."""

from __future__ import annotations

import triton
import triton.language as tl

from outpace.backends.torch.kernels.assembly import publish


@triton.jit
def sum_of_splits(
    acc, acc_up, split, parts_ptr, counters_ptr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
    IS_SWIGLU: tl.constexpr,
):  # fmt: skip
    """(sums [HEIGHT, WIDTH] of all programs of a tile, and whether this program has them). The last one to come here
    adds them in order, so results do not depend on which it is. The tile is the grid's first dimension."""
    PART: tl.constexpr = HEIGHT * WIDTH
    tile = tl.program_id(0)
    inside = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    first = parts_ptr + tile.to(tl.int64) * (SPLITS * 2 * PART) + inside
    mine = first + split * (2 * PART)
    tl.store(mine, acc)
    if IS_SWIGLU:
        tl.store(mine + PART, acc_up)
    publish()
    is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        tl.store(counters_ptr + tile, 0)
        acc = tl.load(first, cache_modifier=".cg")
        if IS_SWIGLU:
            acc_up = tl.load(first + PART, cache_modifier=".cg")
        for s in tl.static_range(1, SPLITS):
            acc += tl.load(first + s * 2 * PART, cache_modifier=".cg")
            if IS_SWIGLU:
                acc_up += tl.load(first + (s * 2 + 1) * PART, cache_modifier=".cg")
    return acc, acc_up, is_last


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


@triton.jit
def finish_columns(
    y, y_up, tile, m, n, is_row, is_token, scales_ptr, bias_ptr, residual_ptr, out_ptr, squares_ptr, next_norm_ptr,
    next_x_ptr, next_squares_ptr, num_squares, epsilon, N: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr,
    HAS_SCALES: tl.constexpr, SQUARES_BLOCK: tl.constexpr, HAS_SQUARES: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_NEXT: tl.constexpr, IS_SWIGLU: tl.constexpr,
):  # fmt: skip
    """`apply_epilogue`, loads included, for sums whose columns are the tokens."""
    if HAS_SCALES:
        y *= tl.load(scales_ptr + n, is_row, 0.0)[:, None]
        if IS_SWIGLU:
            y_up *= tl.load(scales_ptr + N + n, is_row, 0.0)[:, None]
    if HAS_SQUARES:
        j = tl.arange(0, SQUARES_BLOCK)
        known = is_token[:, None] & (j < num_squares)[None, :]
        squares = tl.sum(tl.load(squares_ptr + m[:, None] * num_squares + j[None, :], known, 0.0), 1)
        rms = tl.rsqrt(squares / K + epsilon)[None, :]
        y = y * rms
        y_up = y_up * rms
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, is_row, 0.0).to(tl.float32)[:, None]
        if IS_SWIGLU:
            y_up += tl.load(bias_ptr + N + n, is_row, 0.0).to(tl.float32)[:, None]
    if IS_SWIGLU:
        y = y * tl.sigmoid(y) * y_up
    places, mask = m[None, :].to(tl.int64) * N + n[:, None], is_row[:, None] & is_token[None, :]
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + places, mask, 0.0).to(tl.float32)
    out = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places, out, mask)
    if HAS_NEXT:
        wide = tl.where(mask, out.to(tl.float32), 0.0)
        norm = tl.load(next_norm_ptr + n, is_row, 0.0).to(tl.float32)
        tl.store(next_x_ptr + places, (wide * norm[:, None]).to(next_x_ptr.dtype.element_ty), mask)
        tl.store(next_squares_ptr + m * TILES + tile, tl.sum(wide * wide, 0), is_token)

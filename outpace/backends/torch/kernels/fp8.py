"""Products of FP8 weights with many tokens by FP8's matrix units, which need tokens in FP8.

A token is rounded by its largest value. As two numbers, the rounded value and what rounding left of it, it keeps the
precision of bfloat16; as one, it does not. Our kernel is for up to a few hundred tokens, where reading the weights
still takes most of the time: its programs divide K among them where a product has few tiles, and what follows the
product is fused in. Torch's is for more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outpace.backends.torch.kernels.epilogue import finish_columns, sum_of_splits
from outpace.backends.torch.kernels.linear import Scratch
from outpace.backends.torch.storage.scaled import FP8, Scaled

_LARGEST = tl.constexpr(448.0)
_LOW = tl.constexpr(16.0)  # what rounding leaves is at most 16 of 448
_MOST_COLUMNS = 128  # of a program: tokens times terms


@dataclass(frozen=True, slots=True)
class RoundedConfig:
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1  # programs that divide a tile's K among them
    terms: int = 1  # of a token


@dataclass(frozen=True, slots=True)
class RoundedTokens:
    values: Tensor  # FP8 [terms, tokens, K]; the second term is times _LOW
    scales: Tensor  # float32 [tokens, 1]


@triton.jit
def _round_kernel(
    x_ptr, norm_ptr, values_ptr, scales_ptr, epsilon, K: tl.constexpr, BLOCK: tl.constexpr, TERMS: tl.constexpr,
    HAS_NORM: tl.constexpr, DEPENDENT: tl.constexpr,
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
    x = x / scale
    first = x.to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + token * K + k, first, k < K)
    if TERMS > 1:
        rest = (x - first.to(tl.float32)) * _LOW
        tl.store(values_ptr + (tl.num_programs(0) + token) * K + k, rest.to(values_ptr.dtype.element_ty), k < K)
    tl.store(scales_ptr + token, scale)


def _round(x: Tensor, norm: Tensor | None, epsilon: float, terms: int, dependent: bool) -> RoundedTokens:
    num_tokens, k = x.shape
    values = torch.empty((terms, num_tokens, k), dtype=FP8, device=x.device)
    found = RoundedTokens(values, torch.empty((num_tokens, 1), device=x.device))
    block = triton.next_power_of_2(k)
    _round_kernel[(num_tokens,)](
        x, x if norm is None else norm, values, found.scales, epsilon, k, block, terms, norm is not None, dependent,
        num_warps=16 if block > 8192 else 8 if block >= 2048 else 4, **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
    return found


def round_rows(x: Tensor, *, terms: int = 1, dependent: bool = False) -> RoundedTokens:
    return _round(x, None, 0.0, terms, dependent)


def round_normed(
    x: Tensor, norm: Tensor, epsilon: float, *, terms: int = 1, dependent: bool = False
) -> RoundedTokens:  # fmt: skip
    """After an RMSNorm."""
    return _round(x, norm, epsilon, terms, dependent)


def linear(x: RoundedTokens, weight: Scaled, bias: Tensor | None = None) -> Tensor:
    """By torch, in bfloat16."""
    out: Tensor = torch._scaled_mm(
        x.values[0], weight.values.T, x.scales, weight.scales[None, :], out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return out if bias is None else out.add_(bias)


@triton.jit(do_not_specialize=["M", "num_token_tiles"])
def _rounded_kernel(
    x_ptr, token_scales_ptr, weight_ptr, scales_ptr, bias_ptr, residual_ptr, out_ptr, parts_ptr, counters_ptr, M,
    num_token_tiles, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, TERMS: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, IS_SWIGLU: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The weight is the first operand: the matrix units take 64 rows of it, and as few as 8 tokens."""
    SLICES: tl.constexpr = K // BLOCK_K
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    COLUMNS: tl.constexpr = TERMS * BLOCK_M
    # The matrix units add FP8 with few bits; with two terms, which are to be exact, only the products of a slice.
    MOST: tl.constexpr = BLOCK_K if TERMS > 1 else None
    # Programs with the same weights are neighbours: all but the first of them find the weights in the cache.
    tile, split = tl.program_id(0) // num_token_tiles, tl.program_id(1)
    first = tl.program_id(0) % num_token_tiles * BLOCK_M
    in_slice, column = tl.arange(0, BLOCK_K), tl.arange(0, COLUMNS)
    token = tl.minimum(first + column % BLOCK_M, M - 1) + column // BLOCK_M * M
    row = tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
    tokens = x_ptr + token[:, None].to(tl.int64) * K + in_slice[None, :]
    rows = weight_ptr + row[:, None] * K + in_slice[None, :]
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros((BLOCK_N, COLUMNS), tl.float32)
    acc_up = tl.zeros((BLOCK_N, COLUMNS), tl.float32)
    for i in range(split * SLICES // SPLITS, (split + 1) * SLICES // SPLITS):
        x = tl.load(tokens + i * BLOCK_K).T
        w = tl.load(rows + i * BLOCK_K, eviction_policy="evict_first")
        acc = tl.dot(w, x, acc, max_num_imprecise_acc=MOST)
        if IS_SWIGLU:
            w_up = tl.load(rows + N * K + i * BLOCK_K, eviction_policy="evict_first")
            acc_up = tl.dot(w_up, x, acc_up, max_num_imprecise_acc=MOST)
    m, n = first + tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    y, y_up = _sum_of_terms(acc, BLOCK_N, BLOCK_M, TERMS), acc_up
    if IS_SWIGLU:
        y_up = _sum_of_terms(acc_up, BLOCK_N, BLOCK_M, TERMS)
    is_last = True
    if SPLITS > 1:
        y, y_up, is_last = sum_of_splits(
            y, y_up, split, parts_ptr, counters_ptr, BLOCK_N, BLOCK_M, SPLITS, IS_SWIGLU
        )  # fmt: skip
    if is_last:
        scales = tl.load(token_scales_ptr + m, m < M, 0.0)[None, :]
        finish_columns(
            y * scales, y_up * scales if IS_SWIGLU else y, tile, m, n, n < N, m < M, scales_ptr, bias_ptr,
            residual_ptr, out_ptr, x_ptr, x_ptr, x_ptr, x_ptr, 0, 0.0, N, K, TILES, True, 1, False, HAS_BIAS,
            HAS_RESIDUAL, False, IS_SWIGLU,
        )  # fmt: skip


@triton.jit
def _sum_of_terms(acc, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TERMS: tl.constexpr):
    if TERMS > 1:
        high, low = tl.split(tl.permute(tl.reshape(acc, (HEIGHT, 2, WIDTH)), (0, 2, 1)))
        acc = high + low * (1 / _LOW)
    return acc


def rounded_linear(
    x: RoundedTokens,
    weight: Scaled,
    out: Tensor,
    scratch: Scratch,
    config: RoundedConfig,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
    dependent: bool = False,
) -> None:
    """Write into `out`, which may be the residual. Weight [N, K], or [2N, K] for a swiglu."""
    n = weight.shape[0] // (2 if swiglu else 1)
    terms, num_tokens, k = x.values.shape
    block_m = min(max(16, triton.next_power_of_2(num_tokens)), _MOST_COLUMNS // terms)
    token_tiles, tiles = triton.cdiv(num_tokens, block_m), triton.cdiv(n, config.block_n)
    assert k % config.block_k == 0 and weight.values.is_contiguous() and out.is_contiguous()
    if config.splits > 1:
        scratch.need(tiles * token_tiles * config.splits, block_m, config.block_n)
    _rounded_kernel[(tiles * token_tiles, config.splits)](
        x.values, x.scales, weight.values, weight.scales, out if bias is None else bias,
        out if residual is None else residual, out, scratch.parts, scratch.counters, num_tokens, token_tiles, n, k,
        block_m, config.block_n, config.block_k, terms, config.splits, bias is not None, residual is not None, swiglu,
        dependent, num_warps=config.num_warps, num_stages=config.num_stages,
        **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip

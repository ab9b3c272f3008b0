"""A matrix product whose sums have one order, whatever the number of tokens.

Every result is the sum of one loop over K, with tiles that depend on the weight alone. So a token has the same bits
alone, in a batch and in any chunk of a prompt. Tokens beyond a tile take further programs, which are neighbours: they
find the weights in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outpace.backends.torch.kernels.base import Operands
from outpace.backends.torch.kernels.linear import stream_tile
from outpace.backends.torch.storage.scaled import Scaled

MIN_BLOCK_K = 16


@dataclass(frozen=True, slots=True)
class FixedConfig:
    block_m: int  # tokens of a program
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def fixed_config(n: int, k: int, itemsize: int) -> FixedConfig:
    """By the weight alone. Few columns for a program where there are few columns, so that all processors have some."""
    most_k = 128 if itemsize <= 2 else 64
    block_k = next(size for size in (128, 64, 32, MIN_BLOCK_K) if size <= most_k and k % size == 0)
    if itemsize > 2:  # float32 has no matrix units, and a large tile would not fit into registers
        return FixedConfig(16, 32, block_k, num_warps=4, num_stages=2)
    block_n = 32 if n < 1 << 13 else 64 if n < 1 << 16 else 128
    return FixedConfig(64, block_n, block_k, num_warps=4, num_stages=4)


@triton.jit(do_not_specialize=["M", "num_token_tiles"])
def _fixed_kernel(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, residual_ptr, out_ptr, M, num_token_tiles,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_SWIGLU: tl.constexpr,
    THREADS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    tile, first = tl.program_id(0) // num_token_tiles, tl.program_id(0) % num_token_tiles * BLOCK_M
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    at = first.to(tl.int64)
    stream_tile(
        x_ptr + at * K, weight_ptr, scales_ptr, bias_ptr, residual_ptr + at * N, out_ptr + at * N, x_ptr, x_ptr, x_ptr,
        x_ptr, M - first, 0, 0.0, tile, N, K, BLOCK_M, BLOCK_N, BLOCK_K, 1, HAS_SCALES, False, HAS_BIAS, HAS_RESIDUAL,
        False, IS_SWIGLU, THREADS,
    )  # fmt: skip


def fixed_linear(
    x: Tensor,
    weight: Tensor | Scaled,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
    dependent: bool = False,
) -> None:
    """Write into `out`, which may be the residual. x [M, K], weight [N, K], or [2N, K] for a swiglu."""
    n = weight.shape[0] // (2 if swiglu else 1)
    num_tokens, k = x.shape
    config = fixed_config(n, k, x.element_size())
    given = Operands.of(x, weight, out, 1, bias, residual, None)
    values, matrix, scales, biases, residuals, results, *_ = given.pointers
    has_scales, _, has_bias, has_residual, _ = given.flags
    token_tiles = triton.cdiv(num_tokens, config.block_m)
    _fixed_kernel[(triton.cdiv(n, config.block_n) * token_tiles,)](
        values, matrix, scales, biases, residuals, results, num_tokens, token_tiles, n, k,
        config.block_m, config.block_n, config.block_k, has_scales, has_bias, has_residual, swiglu,
        32 * config.num_warps, dependent,
        num_warps=config.num_warps, num_stages=config.num_stages, **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip

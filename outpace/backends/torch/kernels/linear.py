"""A matrix product for few tokens that streams the weights at memory speed, with its neighbours fused in.

    out = residual + bias + x @ weight.T          or   silu(gate) * up   of the same

With few tokens, reading the weights bounds the speed, so the design keeps that stream even and unbroken. A program
loads its first weights before the previous kernel has ended, and computes one tile in a minimal loop. If that makes too
many programs, a fixed number of them take the same number of tiles each, in one flat loop whose loads run ahead across
tiles. If it makes too few, tiles are cut into slices of K, and the last program to finish a tile adds its parts in
order: results never depend on timing. For a single token, `gemv.py` is faster.

RMSNorm needs no kernel of its own. The product that makes an activation also multiplies it by the next norm's weight
and sums the squares of each tile (`Normed`); the product that reads it divides its sums by the root mean square.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outpace.backends.torch.kernels.assembly import prefetch_bytes, publish, widen
from outpace.backends.torch.kernels.base import Normed, Operands
from outpace.backends.torch.kernels.epilogue import apply_epilogue, load_epilogue_inputs
from outpace.backends.torch.storage.scaled import Scaled

_MIN_BLOCK_N = 16  # fewest columns that the matrix units take
_MOST_HELD = tl.constexpr(64)  # most sums of squares that a thread holds in registers
_MAX_UNEVEN = 0.04  # idle share of programs above which tiles are cut


@dataclass(frozen=True, slots=True)
class LinearConfig:
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1  # at most; 0: one program per tile, without a limit
    prefetch: int = 0  # slices of K to prefetch into L2 before waiting for the previous kernel
    dependent_launch: bool = True  # start while the previous kernel ends


def default_config(n: int, k: int, *, is_swiglu: bool) -> LinearConfig:
    """The fastest config on an H200 for 16-bit weights of such a size, by `benchmarks/gpu_tune.py`."""
    block_k = next(size for size in (512, 256, 128, 64) if k % size == 0)
    if is_swiglu:
        return LinearConfig(32, min(block_k, 256), num_warps=4, num_stages=4)
    if n * k >= 1 << 28:  # an output head: even large tiles are enough for an even division
        return LinearConfig(64, min(block_k, 256), num_warps=4, num_stages=4)
    return LinearConfig(16, block_k, num_warps=2, num_stages=4, programs_per_sm=2)


@triton.jit
def stream_tile(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, residual_ptr, out_ptr, squares_ptr, next_norm_ptr, next_x_ptr,
    next_squares_ptr, M, num_squares, epsilon, tile, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SQUARES_BLOCK: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_SQUARES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NEXT: tl.constexpr,
    IS_SWIGLU: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """One tile in a minimal loop; epilogue inputs are loaded before it, if registers suffice."""
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    LOADS_FIRST: tl.constexpr = not HAS_SQUARES or BLOCK_M * SQUARES_BLOCK <= _MOST_HELD * THREADS
    if LOADS_FIRST:
        squares, residual, norm = load_epilogue_inputs(
            tile, residual_ptr, squares_ptr, next_norm_ptr, M, num_squares, N, BLOCK_M, BLOCK_N, SQUARES_BLOCK,
            HAS_SQUARES, HAS_RESIDUAL, HAS_NEXT,
        )  # fmt: skip
    m, in_slice = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    n = tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
    xs, there = x_ptr + m[:, None] * K + in_slice[None, :], (m < M)[:, None]
    rows = weight_ptr + n[:, None] * K + in_slice[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(xs + k, there, 0.0)
        w = tl.load(rows + k, eviction_policy="evict_first")
        acc = tl.dot(x, widen(w, x.dtype).T, acc, input_precision="ieee")
        if IS_SWIGLU:
            w_up = tl.load(rows + N * K + k, eviction_policy="evict_first")
            acc_up = tl.dot(x, widen(w_up, x.dtype).T, acc_up, input_precision="ieee")
    if not LOADS_FIRST:
        squares, residual, norm = load_epilogue_inputs(
            tile, residual_ptr, squares_ptr, next_norm_ptr, M, num_squares, N, BLOCK_M, BLOCK_N, SQUARES_BLOCK,
            HAS_SQUARES, HAS_RESIDUAL, HAS_NEXT,
        )  # fmt: skip
    apply_epilogue(
        acc, acc_up, squares, residual, norm, tile, out_ptr, scales_ptr, bias_ptr, next_x_ptr, next_squares_ptr, M,
        epsilon, N, K, BLOCK_M, BLOCK_N, TILES, HAS_SCALES, HAS_SQUARES, HAS_BIAS, HAS_RESIDUAL, HAS_NEXT, IS_SWIGLU,
    )  # fmt: skip


@triton.jit
def _stream_tiles(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, residual_ptr, out_ptr, squares_ptr, next_norm_ptr, next_x_ptr,
    next_squares_ptr, parts_ptr, counters_ptr, M, num_squares, epsilon, start, stop,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, MAX_PARTS: tl.constexpr, SQUARES_BLOCK: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_SQUARES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NEXT: tl.constexpr,
    IS_SWIGLU: tl.constexpr,
):  # fmt: skip
    """Slices from start to stop, numbered across all tiles: loads run ahead across tiles."""
    SLICES: tl.constexpr = K // BLOCK_K
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TOTAL: tl.constexpr = TILES * SLICES
    PART: tl.constexpr = BLOCK_M * BLOCK_N
    pid = tl.program_id(0)
    m, in_tile, in_slice = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(start, stop):
        tile = i // SLICES
        k = i % SLICES * BLOCK_K + in_slice
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], (m < M)[:, None], 0.0)
        n = tl.minimum(tile * BLOCK_N + in_tile, N - 1).to(tl.int64)
        w = tl.load(weight_ptr + n[:, None] * K + k[None, :], eviction_policy="evict_first")
        acc = tl.dot(x, widen(w, x.dtype).T, acc, input_precision="ieee")
        if IS_SWIGLU:
            w_up = tl.load(weight_ptr + (n + N)[:, None] * K + k[None, :], eviction_policy="evict_first")
            acc_up = tl.dot(x, widen(w_up, x.dtype).T, acc_up, input_precision="ieee")
        if (i % SLICES == SLICES - 1) | (i == stop - 1):
            is_last = True
            if MAX_PARTS > 1:
                # The programs `first` to `last` share this tile.
                first = ((tile * SLICES + 1) * NUM_PROGRAMS - 1) // TOTAL
                last = ((tile * SLICES + SLICES) * NUM_PROGRAMS - 1) // TOTAL
                if first != last:
                    # A program has at most two unfinished tiles: the one it begins with and the one it ends with.
                    slot = pid * 2 + (tile != start // SLICES).to(tl.int32)
                    inside = m[:, None] * BLOCK_N + in_tile[None, :]
                    tl.store(parts_ptr + slot * 2 * PART + inside, acc)
                    if IS_SWIGLU:
                        tl.store(parts_ptr + (slot * 2 + 1) * PART + inside, acc_up)
                    publish()
                    is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == last - first
                    if is_last:
                        tl.store(counters_ptr + tile, 0)
                        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                        acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                        for j in tl.static_range(MAX_PARTS):
                            owner = first + j
                            there = owner <= last
                            slot = owner * 2 + (tile != owner * TOTAL // NUM_PROGRAMS // SLICES).to(tl.int32)
                            part = parts_ptr + slot * 2 * PART + inside
                            acc += tl.load(part, there, 0.0, cache_modifier=".cg")
                            if IS_SWIGLU:
                                acc_up += tl.load(part + PART, there, 0.0, cache_modifier=".cg")
            if is_last:
                squares, residual, norm = load_epilogue_inputs(
                    tile, residual_ptr, squares_ptr, next_norm_ptr, M, num_squares, N, BLOCK_M, BLOCK_N, SQUARES_BLOCK,
                    HAS_SQUARES, HAS_RESIDUAL, HAS_NEXT,
                )  # fmt: skip
                apply_epilogue(
                    acc, acc_up, squares, residual, norm, tile, out_ptr, scales_ptr, bias_ptr, next_x_ptr,
                    next_squares_ptr, M, epsilon, N, K, BLOCK_M, BLOCK_N, TILES, HAS_SCALES, HAS_SQUARES, HAS_BIAS,
                    HAS_RESIDUAL, HAS_NEXT, IS_SWIGLU,
                )  # fmt: skip
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@triton.jit(do_not_specialize=["M", "num_squares"])
def _linear_kernel(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, residual_ptr, out_ptr, squares_ptr, next_norm_ptr, next_x_ptr,
    next_squares_ptr, parts_ptr, counters_ptr, M, num_squares, epsilon,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, MAX_PARTS: tl.constexpr, SQUARES_BLOCK: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_SQUARES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NEXT: tl.constexpr,
    IS_SWIGLU: tl.constexpr, PREFETCH: tl.constexpr, THREADS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    SLICES: tl.constexpr = K // BLOCK_K
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TOTAL: tl.constexpr = TILES * SLICES
    pid = tl.program_id(0)
    if MAX_PARTS == 1:
        start, stop = pid * TILES // NUM_PROGRAMS * SLICES, (pid + 1) * TILES // NUM_PROGRAMS * SLICES
    else:
        start, stop = pid * TOTAL // NUM_PROGRAMS, (pid + 1) * TOTAL // NUM_PROGRAMS
    if DEPENDENT:
        gdc_launch_dependents()
        if PREFETCH > 0:
            LENGTH: tl.constexpr = PREFETCH * BLOCK_K * BLOCK_N // THREADS  # of a row, for each thread
            thread = tl.arange(0, THREADS)
            row = tl.minimum(start // SLICES * BLOCK_N + thread % BLOCK_N, N - 1).to(tl.int64)
            column = tl.minimum(start % SLICES * BLOCK_K + thread // BLOCK_N * LENGTH, K - LENGTH)
            prefetch_bytes(weight_ptr + row * K + column, LENGTH * weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
            if IS_SWIGLU:
                prefetch_bytes(
                    weight_ptr + (row + N) * K + column, LENGTH * weight_ptr.dtype.element_ty.primitive_bitwidth // 8
                )
        gdc_wait()
    if NUM_PROGRAMS == TILES:
        stream_tile(
            x_ptr, weight_ptr, scales_ptr, bias_ptr, residual_ptr, out_ptr, squares_ptr, next_norm_ptr, next_x_ptr,
            next_squares_ptr, M, num_squares, epsilon, pid, N, K, BLOCK_M, BLOCK_N, BLOCK_K, SQUARES_BLOCK,
            HAS_SCALES, HAS_SQUARES, HAS_BIAS, HAS_RESIDUAL, HAS_NEXT, IS_SWIGLU, THREADS,
        )  # fmt: skip
    else:
        _stream_tiles(
            x_ptr, weight_ptr, scales_ptr, bias_ptr, residual_ptr, out_ptr, squares_ptr, next_norm_ptr, next_x_ptr,
            next_squares_ptr, parts_ptr, counters_ptr, M, num_squares, epsilon, start, stop, N, K, BLOCK_M, BLOCK_N,
            BLOCK_K, NUM_PROGRAMS, MAX_PARTS, SQUARES_BLOCK, HAS_SCALES, HAS_SQUARES, HAS_BIAS, HAS_RESIDUAL, HAS_NEXT,
            IS_SWIGLU,
        )  # fmt: skip


@cache
def _layout(n: int, k: int, block_n: int, block_k: int, max_programs: int) -> tuple[int, int]:
    """(number of programs, most programs that share one tile)."""
    slices, tiles = k // block_k, -(-n // block_n)
    if not max_programs:
        return tiles, 1
    rounds = -(-tiles // max_programs)
    while (programs := -(-tiles // rounds)) > max_programs // 2:
        if programs * rounds <= tiles * (1 + _MAX_UNEVEN):
            return programs, 1
        rounds += 1
    return _cut(tiles, slices, max_programs)


def _cut(tiles: int, slices: int, max_programs: int) -> tuple[int, int]:
    total = tiles * slices
    programs = min(max_programs, total)
    owners = [((i + 1) * programs - 1) // total for i in range(total)]
    return programs, max(owners[t + slices - 1] - owners[t] + 1 for t in range(0, total, slices))


class Scratch:
    """Memory for the parts of shared tiles; counters are zero between kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outgrown: list[Tensor] = []  # graphs captured earlier still use them
        self.parts = torch.empty(0, dtype=torch.float32, device=device)
        self.counters = torch.zeros(1 << 15, dtype=torch.int32, device=device)

    def need(self, programs: int, block_m: int, block_n: int) -> None:
        if self.parts.numel() < 4 * programs * block_m * block_n:
            self._outgrown.append(self.parts)
            self.parts = torch.empty(4 * programs * block_m * block_n, dtype=torch.float32, device=self._device)


def block_rows(num_tokens: int) -> int:
    """Tokens padded for the matrix units: a power of two, at least 16."""
    return max(16, int(triton.next_power_of_2(num_tokens)))


def stream_linear(
    x: Tensor | Normed,
    weight: Tensor | Scaled,
    out: Tensor,
    scratch: Scratch,
    config: LinearConfig,
    num_sms: int,
    *,
    epsilon: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    next_norm: Tensor | None = None,
    swiglu: bool = False,
) -> Normed | None:
    """Write into `out`, which may be the residual. x [M, K], weight [N, K], or [2N, K] for a swiglu; M at most 64.

    With `next_norm`, the weight of the next norm, also returns `out` prepared for the product after that norm.
    """
    n = weight.shape[0] // (2 if swiglu else 1)
    given = Operands.of(x, weight, out, -(-n // config.block_n), bias, residual, next_norm)
    num_tokens, k = given.values.shape
    block_m = block_rows(num_tokens)
    assert k % config.block_k == 0 and given.num_squares <= k // _MIN_BLOCK_N
    programs, max_parts = _layout(n, k, config.block_n, config.block_k, num_sms * config.programs_per_sm)
    if max_parts > 1:
        scratch.need(programs, block_m, config.block_n)
    threads = 32 * config.num_warps
    _linear_kernel[(programs,)](
        *given.pointers, scratch.parts, scratch.counters, num_tokens, given.num_squares, epsilon,
        n, k, block_m, config.block_n, config.block_k, programs, max_parts,
        triton.next_power_of_2(k // _MIN_BLOCK_N), *given.flags, swiglu,
        min(config.prefetch, k // config.block_k), threads, config.dependent_launch,
        num_warps=config.num_warps, num_stages=config.num_stages,
        **({"launch_pdl": True} if config.dependent_launch else {}),
    )  # fmt: skip
    return given.normed

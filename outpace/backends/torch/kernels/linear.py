"""A matrix product for few tokens that streams the weights at the speed of memory, with its neighbours fused in.

    out = residual + bias + x @ weight.T          or   silu(gate) * up   of the same

With a handful of tokens a product is as fast as its weights can be read, so everything serves an even, unbroken stream:
a fixed number of programs take the same number of tiles each, as one flat loop whose loads run ahead across tiles; and
a program asks for its first weights before the previous kernel has ended. Where whole tiles cannot be shared evenly,
tiles are cut into slices of K and the last program to finish one adds the parts in order: results never depend on
timing. For a single token, `vector.py` is faster.

RMSNorm costs nothing here. The product that makes an activation also multiplies it by the next norm's weight and sums
the squares of each tile (`Normed`); the product that reads it divides its finished sums by the root of their mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outpace.backends.torch.kernels.base import Normed, Operands

_ON_GPU = tl.constexpr(not triton.knobs.runtime.interpret)  # Triton's interpreter runs one program after another
_MIN_BLOCK_N = 16  # as few columns as the matrix units take
_MAX_UNEVEN = 0.04  # of the time, that some programs may wait for others before tiles are cut


@dataclass(frozen=True, slots=True)
class LinearConfig:
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1  # at most
    prefetch: int = 0  # slices of K to ask into the L2 cache before waiting for the previous kernel
    dependent_launch: bool = True  # begin while the previous kernel ends


def default_config(n: int, k: int, *, is_swiglu: bool) -> LinearConfig:
    """What was fastest on an H200 for 16-bit weights of such a size, by `benchmarks/gpu_tune.py`."""
    block_k = next(size for size in (512, 256, 128, 64) if k % size == 0)
    if is_swiglu:
        return LinearConfig(32, min(block_k, 256), num_warps=4, num_stages=4)
    if n * k >= 1 << 28:  # a head: so many tiles that large ones can be shared evenly
        return LinearConfig(64, min(block_k, 256), num_warps=4, num_stages=4)
    return LinearConfig(16, block_k, num_warps=2, num_stages=4, programs_per_sm=2)


@triton.jit
def _prefetch(pointers, num_bytes):
    """Into the L2 cache. One element per thread, else the same lines are asked for several times."""
    if _ON_GPU:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r",
            [pointers.to(tl.int64), tl.full(pointers.shape, num_bytes, tl.int32)], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def prefetch_line(pointers):
    if _ON_GPU:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _publish():
    """All this program has stored is visible to whoever sees what it does next. Triton's own barrier would keep the
    loop around it from being pipelined."""
    if _ON_GPU:
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; bar.sync 0; mov.b32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _finish(
    acc, acc_up, tile, out_ptr, bias_ptr, residual_ptr, squares_ptr, next_norm_ptr, next_x_ptr, next_squares_ptr,
    M, num_squares, epsilon, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TILES: tl.constexpr, SQUARES_BLOCK: tl.constexpr, HAS_SQUARES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NEXT: tl.constexpr, IS_SWIGLU: tl.constexpr,
):  # fmt: skip
    m, n = tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (m < M)[:, None] & (n < N)[None, :]
    if HAS_SQUARES:
        j = tl.arange(0, SQUARES_BLOCK)
        there = (m < M)[:, None] & (j < num_squares)[None, :]
        squares = tl.sum(tl.load(squares_ptr + m[:, None] * num_squares + j[None, :], there, 0.0), 1)
        scale = tl.rsqrt(squares / K + epsilon)[:, None]
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
        acc += tl.load(residual_ptr + places, mask, 0.0).to(tl.float32)
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places, out, mask)
    if HAS_NEXT:
        wide = tl.where(mask, out.to(tl.float32), 0.0)
        norm = tl.load(next_norm_ptr + n, n < N, 0.0).to(tl.float32)
        tl.store(next_x_ptr + places, (wide * norm[None, :]).to(next_x_ptr.dtype.element_ty), mask)
        tl.store(next_squares_ptr + m * TILES + tile, tl.sum(wide * wide, 1), m < M)


@triton.jit(do_not_specialize=["M", "num_squares"])
def _linear_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, squares_ptr, next_norm_ptr, next_x_ptr, next_squares_ptr,
    parts_ptr, counters_ptr, M, num_squares, epsilon,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, MAX_PARTS: tl.constexpr, SQUARES_BLOCK: tl.constexpr, HAS_SQUARES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NEXT: tl.constexpr, IS_SWIGLU: tl.constexpr,
    PREFETCH: tl.constexpr, THREADS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    SLICES: tl.constexpr = K // BLOCK_K
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TOTAL: tl.constexpr = TILES * SLICES
    PART: tl.constexpr = BLOCK_M * BLOCK_N
    pid = tl.program_id(0)
    if MAX_PARTS == 1:
        start, stop = pid * TILES // NUM_PROGRAMS * SLICES, (pid + 1) * TILES // NUM_PROGRAMS * SLICES
    else:
        start, stop = pid * TOTAL // NUM_PROGRAMS, (pid + 1) * TOTAL // NUM_PROGRAMS
    m, in_tile, in_slice = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    if DEPENDENT:
        gdc_launch_dependents()
        if PREFETCH > 0:
            LENGTH: tl.constexpr = PREFETCH * BLOCK_K * BLOCK_N // THREADS  # of a row, for each thread
            thread = tl.arange(0, THREADS)
            row = tl.minimum(start // SLICES * BLOCK_N + thread % BLOCK_N, N - 1).to(tl.int64)
            column = tl.minimum(start % SLICES * BLOCK_K + thread // BLOCK_N * LENGTH, K - LENGTH)
            _prefetch(weight_ptr + row * K + column, LENGTH * weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
            if IS_SWIGLU:
                _prefetch(
                    weight_ptr + (row + N) * K + column, LENGTH * weight_ptr.dtype.element_ty.primitive_bitwidth // 8
                )
        gdc_wait()
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(start, stop):
        tile = i // SLICES
        k = i % SLICES * BLOCK_K + in_slice
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], (m < M)[:, None], 0.0)
        n = tl.minimum(tile * BLOCK_N + in_tile, N - 1).to(tl.int64)
        w = tl.load(weight_ptr + n[:, None] * K + k[None, :], eviction_policy="evict_first")
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
        if IS_SWIGLU:
            w_up = tl.load(weight_ptr + (n + N)[:, None] * K + k[None, :], eviction_policy="evict_first")
            acc_up = tl.dot(x, w_up.T, acc_up, input_precision="ieee")
        if (i % SLICES == SLICES - 1) | (i == stop - 1):
            is_last = True
            if MAX_PARTS > 1:
                # Who else worked on this tile: the programs that own its first to its last piece.
                first = ((tile * SLICES + 1) * NUM_PROGRAMS - 1) // TOTAL
                last = ((tile * SLICES + SLICES) * NUM_PROGRAMS - 1) // TOTAL
                if first != last:
                    # A program has at most two unfinished tiles: the one it begins with and the one it ends with.
                    slot = pid * 2 + (tile != start // SLICES).to(tl.int32)
                    inside = m[:, None] * BLOCK_N + in_tile[None, :]
                    tl.store(parts_ptr + slot * 2 * PART + inside, acc)
                    if IS_SWIGLU:
                        tl.store(parts_ptr + (slot * 2 + 1) * PART + inside, acc_up)
                    _publish()
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
                _finish(
                    acc, acc_up, tile, out_ptr, bias_ptr, residual_ptr, squares_ptr,
                    next_norm_ptr, next_x_ptr, next_squares_ptr, M, num_squares, epsilon, N, K, BLOCK_M, BLOCK_N, TILES,
                    SQUARES_BLOCK, HAS_SQUARES, HAS_BIAS, HAS_RESIDUAL, HAS_NEXT, IS_SWIGLU,
                )  # fmt: skip
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@cache
def _layout(n: int, k: int, block_n: int, block_k: int, max_programs: int) -> tuple[int, int]:
    """(programs, most programs that share a tile)."""
    slices, tiles = k // block_k, -(-n // block_n)
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
    """Room for the parts of shared tiles; counters are zero between kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outgrown: list[Tensor] = []  # graphs captured earlier still point at them
        self.parts = torch.empty(0, dtype=torch.float32, device=device)
        self.counters = torch.zeros(1 << 15, dtype=torch.int32, device=device)

    def need(self, programs: int, block_m: int, block_n: int) -> None:
        if self.parts.numel() < 4 * programs * block_m * block_n:
            self._outgrown.append(self.parts)
            self.parts = torch.empty(4 * programs * block_m * block_n, dtype=torch.float32, device=self._device)


def block_rows(num_tokens: int) -> int:
    """Tokens as the matrix units take them: 16 at least, a power of two."""
    return max(16, int(triton.next_power_of_2(num_tokens)))


def stream_linear(
    x: Tensor | Normed,
    weight: Tensor,
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
    """Into `out`, which may be the residual. x [M, K], weight [N, K], or [2N, K] for a swiglu; M at most 64.

    With `next_norm`, the weight of the norm that follows, also returns `out` as the product after it wants it.
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

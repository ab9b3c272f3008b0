"""A matrix product for few tokens that streams the weights at the speed of memory, with its neighbours fused in.

    out = residual + bias + norm(x) @ weight.T          or   silu(gate) * up   of the same

With a handful of tokens a product is as fast as its weights can be read, so everything serves an even, unbroken stream:
a fixed number of programs share all (tile, slice of K) pieces to within one, each walking its share as one flat loop
whose loads run ahead across tiles; where a tile's pieces fall to several programs, the last to finish adds the parts in
order, so that results do not depend on timing. RMSNorm costs nothing: its weight multiplies x on the way in, and the
sum of squares is gathered along the same loop and applied to the finished sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_ON_GPU = tl.constexpr(not triton.knobs.runtime.interpret)  # Triton's interpreter runs one program after another


@dataclass(frozen=True, slots=True)
class LinearConfig:
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    prefetch: int = 0  # slices of K to ask into the L2 cache before waiting for the previous kernel
    dependent_launch: bool = True  # begin while the previous kernel ends


@triton.jit
def _prefetch(pointers):
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
    acc, acc_up, squares, tile, out_ptr, bias_ptr, residual_ptr, M, epsilon,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_SWIGLU: tl.constexpr,
):  # fmt: skip
    m, n = tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (m < M)[:, None] & (n < N)[None, :]
    if HAS_NORM:
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
    tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["M"])
def _linear_kernel(
    x_ptr, weight_ptr, norm_ptr, bias_ptr, residual_ptr, out_ptr, parts_ptr, squares_ptr, counters_ptr, M, epsilon,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, MAX_PARTS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_SWIGLU: tl.constexpr,
    PREFETCH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    SLICES: tl.constexpr = K // BLOCK_K
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TOTAL: tl.constexpr = TILES * SLICES
    PART: tl.constexpr = BLOCK_M * BLOCK_N
    pid = tl.program_id(0)
    start, stop = pid * TOTAL // NUM_PROGRAMS, (pid + 1) * TOTAL // NUM_PROGRAMS
    m, in_tile, in_slice = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    if DEPENDENT:
        gdc_launch_dependents()
        # Weights do not depend on the previous kernel: they can be on their way while it ends.
        for ahead in tl.static_range(PREFETCH):
            lines = (start + ahead) % SLICES * BLOCK_K + tl.arange(0, BLOCK_K // 64) * 64
            rows = tl.minimum((start + ahead) // SLICES * BLOCK_N + in_tile, N - 1)
            _prefetch(weight_ptr + rows.to(tl.int64)[:, None] * K + lines[None, :])
            if IS_SWIGLU:
                _prefetch(weight_ptr + (rows + N).to(tl.int64)[:, None] * K + lines[None, :])
        gdc_wait()
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for i in range(start, stop):
        tile = i // SLICES
        k = i % SLICES * BLOCK_K + in_slice
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], (m < M)[:, None], 0.0)
        if HAS_NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            x = (wide * tl.load(norm_ptr + k).to(tl.float32)[None, :]).to(x.dtype)
        n = tl.minimum(tile * BLOCK_N + in_tile, N - 1).to(tl.int64)
        w = tl.load(weight_ptr + n[:, None] * K + k[None, :], eviction_policy="evict_first")
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
        if IS_SWIGLU:
            w_up = tl.load(weight_ptr + (n + N)[:, None] * K + k[None, :], eviction_policy="evict_first")
            acc_up = tl.dot(x, w_up.T, acc_up, input_precision="ieee")
        if (i % SLICES == SLICES - 1) | (i == stop - 1):
            # Who else worked on this tile: the programs that own its first to its last piece.
            first = ((tile * SLICES + 1) * NUM_PROGRAMS - 1) // TOTAL
            last = ((tile * SLICES + SLICES) * NUM_PROGRAMS - 1) // TOTAL
            is_last = True
            if first != last:
                # A program has at most two unfinished tiles: the one it begins with and the one it ends with.
                slot = pid * 2 + (tile != start // SLICES).to(tl.int32)
                inside = m[:, None] * BLOCK_N + in_tile[None, :]
                tl.store(parts_ptr + slot * 2 * PART + inside, acc)
                if IS_SWIGLU:
                    tl.store(parts_ptr + (slot * 2 + 1) * PART + inside, acc_up)
                if HAS_NORM:
                    tl.store(squares_ptr + slot * BLOCK_M + m, squares)
                _publish()
                is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == last - first
                if is_last:
                    tl.store(counters_ptr + tile, 0)
                    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                    acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                    squares = tl.zeros((BLOCK_M,), tl.float32)
                    for j in tl.static_range(MAX_PARTS):
                        owner = first + j
                        there = owner <= last
                        slot = owner * 2 + (tile != owner * TOTAL // NUM_PROGRAMS // SLICES).to(tl.int32)
                        part = parts_ptr + slot * 2 * PART + inside
                        acc += tl.load(part, there, 0.0, cache_modifier=".cg")
                        if IS_SWIGLU:
                            acc_up += tl.load(part + PART, there, 0.0, cache_modifier=".cg")
                        if HAS_NORM:
                            squares += tl.load(squares_ptr + slot * BLOCK_M + m, there, 0.0, cache_modifier=".cg")
            if is_last:
                _finish(
                    acc, acc_up, squares, tile, out_ptr, bias_ptr, residual_ptr, M, epsilon,
                    N, K, BLOCK_M, BLOCK_N, HAS_NORM, HAS_BIAS, HAS_RESIDUAL, IS_SWIGLU,
                )  # fmt: skip
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            squares = tl.zeros((BLOCK_M,), tl.float32)


@cache
def _layout(n: int, k: int, block_n: int, block_k: int, max_programs: int) -> tuple[int, int]:
    """(programs, most programs that share a tile)."""
    slices = k // block_k
    total = -(-n // block_n) * slices
    programs = min(max_programs, total)
    owners = [((i + 1) * programs - 1) // total for i in range(total)]
    return programs, max(owners[t + slices - 1] - owners[t] + 1 for t in range(0, total, slices))


class Scratch:
    """Room for the parts of shared tiles; counters are zero between kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outgrown: list[Tensor] = []  # graphs captured earlier still point at them
        self.parts = torch.empty(0, dtype=torch.float32, device=device)
        self.squares = torch.empty(0, dtype=torch.float32, device=device)
        self.counters = torch.zeros(1 << 15, dtype=torch.int32, device=device)

    def need(self, programs: int, block_m: int, block_n: int) -> None:
        if self.parts.numel() < 4 * programs * block_m * block_n:
            self._outgrown.append(self.parts)
            self.parts = torch.empty(4 * programs * block_m * block_n, dtype=torch.float32, device=self._device)
        if self.squares.numel() < 2 * programs * block_m:
            self._outgrown.append(self.squares)
            self.squares = torch.empty(2 * programs * block_m, dtype=torch.float32, device=self._device)


def block_rows(num_tokens: int) -> int:
    """Tokens as the matrix units take them: 16 at least, a power of two."""
    return max(16, int(triton.next_power_of_2(num_tokens)))


def stream_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    scratch: Scratch,
    config: LinearConfig,
    num_sms: int,
    *,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
) -> Tensor:
    """Into `out`, which may be the residual. x [M, K], weight [N, K], or [2N, K] for a swiglu; M at most 64."""
    num_tokens, k = x.shape
    n = weight.shape[0] // (2 if swiglu else 1)
    block_m = block_rows(num_tokens)
    assert k % config.block_k == 0 and x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    programs, max_parts = _layout(n, k, config.block_n, config.block_k, num_sms * config.programs_per_sm)
    scratch.need(programs, block_m, config.block_n)
    options = {"launch_pdl": True} if config.dependent_launch else {}
    _linear_kernel[(programs,)](
        x, weight, norm if norm is not None else x, bias if bias is not None else x,
        residual if residual is not None else x, out, scratch.parts, scratch.squares, scratch.counters,
        num_tokens, epsilon, n, k, block_m, config.block_n, config.block_k, programs, max_parts,
        norm is not None, bias is not None, residual is not None, swiglu, config.prefetch, config.dependent_launch,
        num_warps=config.num_warps, num_stages=config.num_stages, **options,
    )  # fmt: skip
    return out

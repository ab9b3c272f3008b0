"""A planar matrix (`storage/planar.py`) times tokens on the matrix units, with its neighbours fused in.

The weight is the first operand: its codes are unpacked in registers into exact small numbers of 16 bits, and the sums
of a group are multiplied by the group's scale in float32. So no weight is rounded. A program has a few rows, and its
warps divide K among them (`parts`), because a tile of more rows would leave most of the GPU idle. Minima need the sums
of the tokens over a group: the matrix units compute them too, by a product with ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outpace.backends.torch.kernels.assembly import ON_GPU
from outpace.backends.torch.kernels.base import Normed, Operands
from outpace.backends.torch.storage.planar import Planar


@dataclass(frozen=True, slots=True)
class PlanarConfig:
    block_n: int  # rows of the weight per program
    parts: int  # of K; each is summed by its own warps
    num_warps: int
    num_stages: int


def _assembly(body: str) -> tl.constexpr:
    return tl.constexpr("{ .reg .b32 t, u, v; " + body + " }")


# By plane. Two neighbours share a register. 0xEA: (a & b) | c.
_NIBBLES = [
    _assembly(f"shr.u32 t, $1, {4 * plane}; lop3.b32 $0, t, 0x000f000f, 0x43004300, 0xEA;") for plane in range(4)
]
_BYTES = [
    _assembly(
        f"shr.u32 t, $1, {8 * plane}; lop3.b32 u, t, 0x00800080, 0x43804380, 0x6A; "  # 0x6A: (a & b) ^ c
        "lop3.b32 t, t, 0x007f007f, 0x43004300, 0xEA; mov.b32 v, 0xBF80BF80; fma.rn.bf16x2 $0, u, v, t;"  # t - u
    )
    for plane in range(2)
]
# Bits of FP8 moved to their place in bfloat16 are the value times 2**-120.
_FP8 = [
    _assembly(
        f"{move}; and.b32 t, t, 0x07f007f0; lop3.b32 t, u, 0x80008000, t, 0xEA; mov.b32 u, 0x7B807B80; "
        "mov.b32 v, 0x80008000; fma.rn.bf16x2 $0, t, u, v;"
    )
    for move in ("shl.b32 t, $1, 4; shl.b32 u, $1, 8", "shr.u32 t, $1, 4; mov.b32 u, $1")
]
_NIBBLES_0, _NIBBLES_1, _NIBBLES_2, _NIBBLES_3 = _NIBBLES
_BYTES_0, _BYTES_1 = _BYTES
_FP8_0, _FP8_1 = _FP8


@triton.jit
def _unpack_pairs(units, ASSEMBLY: tl.constexpr):
    return tl.inline_asm_elementwise(ASSEMBLY, "=r,r", [units], tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def _nibbles(units, J: tl.constexpr):
    """128 + code of plane J: such a number of 16 bits has the code in its lowest bits."""
    if J == 0:
        found = _unpack_pairs(units, _NIBBLES_0)
    elif J == 1:
        found = _unpack_pairs(units, _NIBBLES_1)
    elif J == 2:
        found = _unpack_pairs(units, _NIBBLES_2)
    else:
        found = _unpack_pairs(units, _NIBBLES_3)
    return found


@triton.jit
def _bytes(units, J: tl.constexpr, IS_FP8: tl.constexpr):
    """The number of plane J in FP8; or its code less 128, as (128 + lower seven bits) - (128 or 256)."""
    if ON_GPU:
        if IS_FP8:
            found = _unpack_pairs(units, _FP8_0) if J == 0 else _unpack_pairs(units, _FP8_1)
        else:
            found = _unpack_pairs(units, _BYTES_0) if J == 0 else _unpack_pairs(units, _BYTES_1)
    else:
        code = ((units >> (8 * J)) & 0xFF).to(tl.int32)
        if IS_FP8:
            bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
            found = bits.to(tl.float32, bitcast=True) * 2.0**120
        else:
            found = code.to(tl.float32) - 128
    return found


@triton.jit
def _codes(
    units, high, chunk, J: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, IS_FP8: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """The codes of plane J, less the zero; exact."""
    if BITS == 8:
        found = _bytes(units, J, IS_FP8)
    elif BITS == 4 and ON_GPU:
        found = _nibbles(units, J) - (128.0 + ZERO)
    else:
        code = (units >> (4 * J)) & 0xF
        if BITS > 4:
            HIGH: tl.constexpr = BITS - 4
            MASK: tl.constexpr = ((1 << HIGH) - 1) << 4
            SHARED: tl.constexpr = 2 // HIGH  # chunks that share a byte
            wide = high.to(tl.int16) << 4
            code |= (wide >> ((chunk % SHARED * 4 + J) * HIGH).to(tl.int16)) & MASK
        if ON_GPU:  # as in `_nibbles`: no conversion from an integer, which is slow
            found = (code | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True) - (128.0 + ZERO)
        else:
            found = code.to(tl.float32) - ZERO
    return found.to(dtype)


@triton.jit
def _lifted(of_parts, PARTS: tl.constexpr, NDIM: tl.constexpr):
    """A value for each part, with dimensions for what a part has; with one part, a plain number."""
    if PARTS == 1:
        found = of_parts
    elif NDIM == 2:
        found = of_parts[:, None]
    else:
        found = of_parts[:, None, None]
    return found


@triton.jit
def _scale(values, blocks, group, block_of_group: tl.constexpr, ROWS: tl.constexpr, HAS_BLOCKS: tl.constexpr):
    """Scales or minima of a group in float32; `values` and `blocks` point to the first group of every row."""
    scale = tl.load(values + group * ROWS).to(tl.float32)
    if HAS_BLOCKS:
        scale *= tl.load(blocks + group // block_of_group * ROWS).to(tl.float32)
    return scale


@triton.jit
def _minimum(values, blocks, group, scale, block_of_group: tl.constexpr, ROWS: tl.constexpr,
             HAS_BLOCKS: tl.constexpr, HAS_ZEROS: tl.constexpr):  # fmt: skip
    minimum = _scale(values, blocks, group, block_of_group, ROWS, HAS_BLOCKS)
    if HAS_ZEROS:
        minimum *= scale
    return minimum


@triton.jit
def _scales_of(
    values, blocks, chunk, PARTS: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Of the up to four groups of a chunk."""
    group = _lifted(chunk * CHUNK // GROUP, PARTS, 2)
    s0 = _scale(values, blocks, group, BLOCK // GROUP, ROWS, HAS_BLOCKS)
    s1, s2, s3 = s0, s0, s0
    if GROUPS > 1:
        s1 = _scale(values, blocks, group + 1, BLOCK // GROUP, ROWS, HAS_BLOCKS)
    if GROUPS > 2:
        s2 = _scale(values, blocks, group + 2, BLOCK // GROUP, ROWS, HAS_BLOCKS)
        s3 = _scale(values, blocks, group + 3, BLOCK // GROUP, ROWS, HAS_BLOCKS)
    return s0, s1, s2, s3


@triton.jit(do_not_specialize=["M", "num_squares"])
def _planar_kernel(
    x_ptr, units_ptr, bias_ptr, residual_ptr, out_ptr, squares_ptr, next_norm_ptr, next_x_ptr, next_squares_ptr,
    high_ptr, scales_ptr, minima_ptr, block_scales_ptr, block_minima_ptr, M, num_squares, epsilon,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
    BITS: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, ZERO: tl.constexpr,
    IS_FP8: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BLOCKS: tl.constexpr,
    SQUARES_BLOCK: tl.constexpr, HAS_SQUARES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_NEXT: tl.constexpr, IS_SWIGLU: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """If there are several parts of K, they are the first dimension of units, tokens and sums."""
    PLANES: tl.constexpr = 2 if BITS == 8 else 4
    CHUNK: tl.constexpr = PLANES * PLANE
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    PART: tl.constexpr = (CHUNKS + PARTS - 1) // PARTS  # chunks
    # Groups of a chunk, and planes of a group; a group that is larger than a chunk counts as one in each of its chunks.
    GROUPS: tl.constexpr = CHUNK // GROUP if GROUP < CHUNK else 1
    RUN: tl.constexpr = PLANES // GROUPS
    ROWS: tl.constexpr = 2 * N if IS_SWIGLU else N
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    IS_EVEN: tl.constexpr = K % CHUNK == 0 and CHUNKS % PARTS == 0
    HAS_HIGH: tl.constexpr = BITS == 5 or BITS == 6
    SHARED: tl.constexpr = 2 // (BITS - 4) if HAS_HIGH else 1
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    tile = tl.program_id(0)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_token = n < N, m < M
    rows = tl.minimum(n, N - 1)
    i = tl.arange(0, PLANE)
    in_tile = rows[:, None] * PLANE + i[None, :]
    xs = x_ptr + m[None, :].to(tl.int64) * K + i[:, None]
    there = is_token[None, :]
    row = rows
    if PARTS == 1:
        first = 0
        sums_zero = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        ones = tl.full((BLOCK_N, PLANE), 1.0, dtype)
    else:
        first = tl.arange(0, PARTS) * PART  # chunk of each part
        in_tile, xs, there, row = in_tile[None, :, :], xs[None, :, :], there[None, :, :], rows[None, :]
        sums_zero = tl.zeros((PARTS, BLOCK_N, BLOCK_M), tl.float32)
        ones = tl.full((PARTS, BLOCK_N, PLANE), 1.0, dtype)
    scales, minima = scales_ptr + row, minima_ptr + row
    block_scales, block_minima = block_scales_ptr + row, block_minima_ptr + row
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    acc, acc_up = sums_zero, sums_zero
    # Scales are loaded one chunk ahead: the loads of a loop that no product reads directly are not pipelined.
    begin = tl.minimum(first, CHUNKS - 1)
    scale = _scales_of(scales, block_scales, begin, PARTS, GROUPS, CHUNK, GROUP, BLOCK, ROWS, HAS_BLOCKS)
    minimum, scale_up, minimum_up = scale, scale, scale
    if HAS_MINIMA:
        minimum = _scales_of(minima, block_minima, begin, PARTS, GROUPS, CHUNK, GROUP, BLOCK, ROWS, HAS_BLOCKS)
    if IS_SWIGLU:
        scale_up = _scales_of(scales + N, block_scales + N, begin, PARTS, GROUPS, CHUNK, GROUP, BLOCK, ROWS, HAS_BLOCKS)
        if HAS_MINIMA:
            minimum_up = _scales_of(
                minima + N, block_minima + N, begin, PARTS, GROUPS, CHUNK, GROUP, BLOCK, ROWS, HAS_BLOCKS
            )
    for c in range(PART):
        chunk = first + c
        if not IS_EVEN:
            chunk = tl.minimum(chunk, CHUNKS - 1)
        after = tl.minimum(chunk + 1, CHUNKS - 1)
        next_scale = _scales_of(scales, block_scales, after, PARTS, GROUPS, CHUNK, GROUP, BLOCK, ROWS, HAS_BLOCKS)
        next_minimum, next_scale_up, next_minimum_up = next_scale, next_scale, next_scale
        if HAS_MINIMA:
            next_minimum = _scales_of(minima, block_minima, after, PARTS, GROUPS, CHUNK, GROUP, BLOCK, ROWS, HAS_BLOCKS)
        chunks = _lifted(chunk, PARTS, 3)
        at = chunks.to(tl.int64) * (ROWS * PLANE) + in_tile
        units = tl.load(units_ptr + at, eviction_policy="evict_first")
        high = units
        if HAS_HIGH:
            high_at = (chunks // SHARED).to(tl.int64) * (ROWS * PLANE) + in_tile
            high = tl.load(high_ptr + high_at)
        up, high_up = units, high
        if IS_SWIGLU:
            next_scale_up = _scales_of(
                scales + N, block_scales + N, after, PARTS, GROUPS, CHUNK, GROUP, BLOCK, ROWS, HAS_BLOCKS
            )
            if HAS_MINIMA:
                next_minimum_up = _scales_of(
                    minima + N, block_minima + N, after, PARTS, GROUPS, CHUNK, GROUP, BLOCK, ROWS, HAS_BLOCKS
                )
            up = tl.load(units_ptr + at + N * PLANE, eviction_policy="evict_first")
            if HAS_HIGH:
                high_up = tl.load(high_ptr + high_at + N * PLANE)
        column = _lifted(first + c, PARTS, 3) * CHUNK
        for g in tl.static_range(GROUPS):
            sums, sums_up, totals = sums_zero, sums_zero, sums_zero
            for r in tl.static_range(RUN):
                mask = there
                if not IS_EVEN:
                    mask = there & (column + (g * RUN + r) * PLANE + i[:, None] < K)
                x = tl.load(xs + column + (g * RUN + r) * PLANE, mask, 0.0)
                code = _codes(units, high, chunks, g * RUN + r, BITS, ZERO, IS_FP8, dtype)
                sums = tl.dot(code, x, sums, input_precision="ieee")
                if IS_SWIGLU:
                    code = _codes(up, high_up, chunks, g * RUN + r, BITS, ZERO, IS_FP8, dtype)
                    sums_up = tl.dot(code, x, sums_up, input_precision="ieee")
                if HAS_MINIMA:
                    totals = tl.dot(ones, x, totals, input_precision="ieee")
            acc += sums * tl.expand_dims(scale[g], -1)
            if HAS_MINIMA:
                if HAS_ZEROS:
                    acc -= totals * tl.expand_dims(minimum[g] * scale[g], -1)
                else:
                    acc -= totals * tl.expand_dims(minimum[g], -1)
            if IS_SWIGLU:
                acc_up += sums_up * tl.expand_dims(scale_up[g], -1)
                if HAS_MINIMA:
                    if HAS_ZEROS:
                        acc_up -= totals * tl.expand_dims(minimum_up[g] * scale_up[g], -1)
                    else:
                        acc_up -= totals * tl.expand_dims(minimum_up[g], -1)
        scale, minimum, scale_up, minimum_up = next_scale, next_minimum, next_scale_up, next_minimum_up
    y, y_up = acc, acc_up
    if PARTS > 1:
        y = tl.sum(acc, 0)
        y_up = tl.sum(acc_up, 0) if IS_SWIGLU else y
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


def block_tokens(num_tokens: int) -> int:
    """Tokens of a program: the matrix units take as few as 8."""
    return min(max(8, int(triton.next_power_of_2(num_tokens))), 64)


def planar_linear(
    x: Tensor | Normed,
    weight: Planar,
    out: Tensor,
    config: PlanarConfig,
    *,
    epsilon: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    next_norm: Tensor | None = None,
    swiglu: bool = False,
    dependent: bool = False,
) -> Normed | None:
    """`linear.stream_linear` for a planar weight, and for any number of tokens."""
    f, rows = weight.format, weight.shape[0]
    n = rows // (2 if swiglu else 1)
    tiles = triton.cdiv(n, config.block_n)
    given = Operands.of(x, weight.units, out, tiles, bias, residual, next_norm)
    num_tokens, k = given.values.shape
    assert k == weight.num_columns
    tensors = (weight.high, weight.scales, weight.minima, weight.block_scales, weight.block_minima)
    block_m = block_tokens(num_tokens)
    _planar_kernel[(tiles, triton.cdiv(num_tokens, block_m))](
        *given.pointers[:2], *given.pointers[3:],
        *[tensor if tensor is not None else weight.units for tensor in tensors],
        num_tokens, given.num_squares, epsilon, n, k, block_m, config.block_n, config.parts, f.bits, f.plane, f.group,
        f.block, f.zero, f.is_fp8, f.has_minima, f.has_zeros, f.has_blocks,
        triton.next_power_of_2(max(given.num_squares, 1)),
        *given.flags[1:], swiglu, dependent,
        num_warps=config.num_warps, num_stages=config.num_stages, **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
    return given.normed


@triton.jit
def _unpack_kernel(
    units_ptr, high_ptr, scales_ptr, minima_ptr, block_scales_ptr, block_minima_ptr, out_ptr,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BITS: tl.constexpr, PLANE: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, ZERO: tl.constexpr, IS_FP8: tl.constexpr, HAS_MINIMA: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BLOCKS: tl.constexpr,
):  # fmt: skip
    PLANES: tl.constexpr = 2 if BITS == 8 else 4
    CHUNK: tl.constexpr = PLANES * PLANE
    HAS_HIGH: tl.constexpr = BITS == 5 or BITS == 6
    SHARED: tl.constexpr = 2 // (BITS - 4) if HAS_HIGH else 1
    chunk = tl.program_id(0)
    n, i = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, PLANE)
    rows = tl.minimum(n, N - 1)
    in_tile = rows[:, None] * PLANE + i[None, :]
    units = tl.load(units_ptr + chunk.to(tl.int64) * (N * PLANE) + in_tile)
    high = units
    if HAS_HIGH:
        high = tl.load(high_ptr + (chunk // SHARED).to(tl.int64) * (N * PLANE) + in_tile)
    for j in tl.static_range(PLANES):
        group = (chunk * CHUNK + j * PLANE) // GROUP
        scale = _scale(scales_ptr + rows, block_scales_ptr + rows, group, BLOCK // GROUP, N, HAS_BLOCKS)
        w = _codes(units, high, chunk, j, BITS, ZERO, IS_FP8, tl.float32) * scale[:, None]
        if HAS_MINIMA:
            w -= _minimum(
                minima_ptr + rows, block_minima_ptr + rows, group, scale, BLOCK // GROUP, N, HAS_BLOCKS, HAS_ZEROS
            )[:, None]
        k = chunk * CHUNK + j * PLANE + i
        mask = (n < N)[:, None] & (k < K)[None, :]
        tl.store(out_ptr + n[:, None].to(tl.int64) * K + k[None, :], w.to(out_ptr.dtype.element_ty), mask)


def unpack(weight: Planar, dtype: torch.dtype) -> Tensor:
    """The weights [rows, columns], for the library's product: with many tokens, computing takes longer than this."""
    f, (n, k) = weight.format, weight.shape
    out = torch.empty((n, k), dtype=dtype, device=weight.device)
    tensors = (weight.high, weight.scales, weight.minima, weight.block_scales, weight.block_minima)
    _unpack_kernel[(triton.cdiv(k, f.chunk), triton.cdiv(n, 64))](
        weight.units, *[tensor if tensor is not None else weight.units for tensor in tensors], out,
        n, k, 64, f.bits, f.plane, f.group, f.block, f.zero, f.is_fp8, f.has_minima, f.has_zeros, f.has_blocks,
    )  # fmt: skip
    return out

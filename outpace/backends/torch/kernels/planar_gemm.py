"""Weights of 4 to 8 bits times tokens on the matrix units, with their neighbours fused in.

The weight is the first operand: its codes are unpacked in registers into exact small numbers of 16 bits, and the sums
of a group are multiplied by the group's scale in float32. So no weight is rounded. A program has a few rows, and its
warps divide K among them (`parts`), because a tile of more rows would leave most of the GPU idle. Minima need the sums
of the tokens over a group: the matrix units compute them too, by a product with ones.

Memory is read without shared memory and without barriers. A thread loads 16 bytes of a row; the columns of a plane are
numbered anew for weights and tokens alike, so that these bytes are what the matrix units expect from this thread.
Weights are planar (`storage/planar.py`) or rows of 8 bits (`storage/scaled.py`), whose planes are the even and the odd
columns. A word of 32 bits is two units: as values of 16 bits they would be copied at the end of every step, which waits
for the weights of the next. Upper bits are loaded for both units of a word at once: Triton takes the narrowest load
behind an operand for the width of its values, and from bytes it derives a layout with 8 neighbours for each thread,
which is wrong for a plane of 16 columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outpace.backends.torch.kernels.assembly import ON_GPU
from outpace.backends.torch.kernels.base import Normed, Operands
from outpace.backends.torch.kernels.epilogue import finish_columns, sum_of_splits
from outpace.backends.torch.kernels.linear import Scratch
from outpace.backends.torch.storage.planar import Planar
from outpace.backends.torch.storage.scaled import Scaled, is_fp8

_MOST_BLOCK_TOKENS = 32  # more would not fit into registers
_ROW_PLANE = 32  # units of a row that four threads load at once
_TYPES = {
    torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.uint8: tl.uint8,
    torch.int8: tl.int8,
}  # fmt: skip
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True, slots=True)
class PlanarConfig:
    block_n: int  # rows of the weight per program
    parts: int  # of K in a program
    num_warps: int  # they divide parts times bands among them
    splits: int = 1  # programs that divide a tile's K among them
    bands: int = 1  # of a program's rows; they find the same tokens in the cache
    unroll: int = 2  # steps; with one, registers are copied at its end, which waits for the next weights


def _assembly(body: str) -> str:
    return "{ .reg .b32 t, u, v, w; " + body + " mov.b32 {$0, $1}, w; }"


# By plane, for a word of two neighbouring units. 0xEA: (a & b) | c. A code in the lowest bits of bfloat16's 128 is
# 128 + code.
_NIBBLES = {
    (plane, zero): _assembly(
        f"shr.u32 t, $2, {4 * plane}; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xEA; mov.b32 u, 0x3F803F80; "
        f"mov.b32 v, 0xC3{zero:02X}C3{zero:02X}; fma.rn.bf16x2 w, t, u, v;"  # t - (128 + zero)
    )
    for plane in range(4)
    for zero in (0, 8)
}
# Integers are (128 + lower seven bits) - (128 or 256).
_BYTES = {
    (plane, kind): _assembly(
        f"shr.u32 t, $2, {8 * plane}; lop3.b32 u, t, 0x00800080, {upper}; "
        "lop3.b32 t, t, 0x007f007f, 0x43004300, 0xEA; mov.b32 v, 0xBF80BF80; fma.rn.bf16x2 w, u, v, t;"  # t - u
    )
    for plane in range(2)
    for kind, upper in (("code", "0x43804380, 0x6A"), ("signed", "0x43004300, 0xEA"))  # 0x6A: (a & b) ^ c
}
# Bits of FP8 moved to their place in bfloat16 are the value times 2**-120.
_FP8 = {
    (plane, "fp8"): _assembly(
        f"{move}; and.b32 t, t, 0x07f007f0; lop3.b32 t, u, 0x80008000, t, 0xEA; mov.b32 u, 0x7B807B80; "
        "mov.b32 v, 0x80008000; fma.rn.bf16x2 w, t, u, v;"
    )
    for plane, move in enumerate(("shl.b32 t, $2, 4; shl.b32 u, $2, 8", "shr.u32 t, $2, 4; mov.b32 u, $2"))
}


@triton.constexpr_function
def _unpacking(bits, plane, zero, kind):
    return _NIBBLES[plane, zero] if bits == 4 else (_BYTES | _FP8)[plane, kind]


@triton.jit
def _units(words):
    """A word is two neighbours."""
    return tl.interleave((words & 0xFFFF).to(tl.int16), (words >> 16).to(tl.int16))


@triton.jit
def _codes(
    words, high, chunk, J: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, KIND: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """The codes of plane J, less the zero; for FP8, its numbers. Exact."""
    if ON_GPU and (BITS == 4 or BITS == 8):
        first, second = tl.inline_asm_elementwise(
            _unpacking(BITS, J, ZERO, KIND), "=h,=h,r", [words], (tl.int16, tl.int16), is_pure=True, pack=1
        )
        found = tl.interleave(first, second).to(tl.bfloat16, bitcast=True)
    elif BITS == 8:
        code = ((_units(words) >> (8 * J)) & 0xFF).to(tl.int32)
        if KIND == "fp8":
            bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
            found = bits.to(tl.float32, bitcast=True) * 2.0**120
        elif KIND == "signed":
            found = ((code ^ 0x80) - 0x80).to(tl.float32)
        else:
            found = code.to(tl.float32) - 128
    else:
        pair = (words >> (4 * J)) & 0x000F000F
        if BITS > 4:
            HIGH: tl.constexpr = BITS - 4
            MASK: tl.constexpr = ((1 << HIGH) - 1) * 0x00100010
            SHARED: tl.constexpr = 2 // HIGH  # chunks that share a byte
            both = high.to(tl.int32)
            wide = ((both & 0xFF) << 4) | ((both & 0xFF00) << 12)  # a byte above the low bits of each unit
            pair |= (wide >> ((chunk % SHARED * 4 + J) * HIGH)) & MASK
        code = _units(pair)
        if ON_GPU:  # no conversion from an integer, which is slow
            found = (code | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True) - (128.0 + ZERO)
        else:
            found = code.to(tl.float32) - ZERO
    return found.to(dtype)


@triton.jit
def _in_words(ptr, chunk, rows, ROWS: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr):
    """The words with a chunk's scales, one or two; `WORD`: columns of a word, which may be more than a chunk's."""
    at = ptr + chunk * CHUNK // WORD * ROWS + rows
    first = tl.load(at)
    second = first
    if WORDS > 1:
        second = tl.load(at + ROWS)
    return first, second


@triton.jit
def _of_group(words, g: tl.constexpr, PER_WORD: tl.constexpr, dtype: tl.constexpr):
    """A group's scales or minima in float32."""
    word = words[g // PER_WORD]
    if PER_WORD > 1:
        word = word >> (g % PER_WORD * dtype.primitive_bitwidth)
        if dtype == tl.uint8:
            word = word & 0xFF
        elif dtype == tl.int8:
            word = word.to(tl.int8)
        elif dtype.primitive_bitwidth == 16:
            word = word.to(tl.int16).to(dtype, bitcast=True)
        else:
            word = word.to(tl.int32).to(dtype, bitcast=True)
    return word.to(tl.float32)


@triton.jit
def _weight_operand(t, PIECES: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
    """[4, 8, pieces, R, E] to [pieces, rows, columns]. A thread keeps its values: they are its operands."""
    t = tl.reshape(t, (4, 8, PIECES, R, 2, E // 4, 2))
    return tl.reshape(tl.permute(t, (2, 3, 1, 5, 0, 4, 6)), (PIECES, 8 * R, 4 * E))


@triton.jit
def _token_operand(t, PIECES: tl.constexpr, T: tl.constexpr, E: tl.constexpr):
    """The same for tokens, which become columns."""
    t = tl.reshape(t, (4, 8, PIECES, T, 2, E // 4, 2))
    return tl.reshape(tl.permute(t, (2, 5, 0, 4, 6, 3, 1)), (PIECES, 4 * E, 8 * T))


@triton.jit
def _for_sums(t, PIECES: tl.constexpr, R: tl.constexpr, T: tl.constexpr):
    """Numbers of rows [4, 8, pieces, R], the same for each of the 4, to [pieces, rows, tokens]; threads keep theirs."""
    t = tl.broadcast_to(t[:, :, :, :, None, None], (4, 8, PIECES, R, T, 2))
    return tl.reshape(tl.permute(t, (2, 3, 1, 4, 0, 5)), (PIECES, 8 * R, 8 * T))


@triton.jit
def _load_tokens(xs, at, there, j: tl.constexpr, K: tl.constexpr, PLANE: tl.constexpr, IS_EVEN: tl.constexpr):
    """A plane's tokens; `at`: the first column of each part."""
    mask = there
    if not IS_EVEN:
        mask = there & (at + j * PLANE < K)
    return tl.load(xs + j * PLANE, mask, 0.0)


@triton.jit
def _add_plane(
    sums, units, high, chunk, x, J: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, KIND: tl.constexpr,
    PIECES: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    code = _codes(units, high, chunk, J, BITS, ZERO, KIND, x.dtype)
    return tl.dot(_weight_operand(code, PIECES, R, E), x, sums, input_precision="ieee")


@triton.jit(do_not_specialize=["M", "num_token_tiles", "num_squares"])
def _planar_kernel(
    x_ptr, units_ptr, bias_ptr, residual_ptr, out_ptr, squares_ptr, next_norm_ptr, next_x_ptr, next_squares_ptr,
    high_ptr, scales_ptr, minima_ptr, block_scales_ptr, block_minima_ptr, parts_ptr, counters_ptr, M, num_token_tiles,
    num_squares, epsilon, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr, BANDS: tl.constexpr, SPLITS: tl.constexpr, UNROLL: tl.constexpr,
    BITS: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, ZERO: tl.constexpr,
    KIND: tl.constexpr, PER_WORD: tl.constexpr, SCALE: tl.constexpr, MINIMUM: tl.constexpr, HAS_MINIMA: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BLOCKS: tl.constexpr, IS_ROWS: tl.constexpr, SQUARES_BLOCK: tl.constexpr,
    HAS_SQUARES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NEXT: tl.constexpr,
    IS_SWIGLU: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The first dimension of weights, tokens and sums is the part of K and the band of rows, and the warps divide it.

    With `IS_ROWS`, units are two neighbours of a row of 8-bit weights, and a row has one scale."""
    PLANES: tl.constexpr = 2 if BITS == 8 else 4
    CHUNK: tl.constexpr = PLANES * PLANE
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    STEPS: tl.constexpr = (CHUNKS + PARTS * SPLITS - 1) // (PARTS * SPLITS)
    IS_EVEN: tl.constexpr = K % CHUNK == 0 and CHUNKS % (PARTS * SPLITS) == 0
    # Groups of a chunk, and planes of a group; a group that is larger than a chunk counts as one in each of its chunks.
    GROUPS: tl.constexpr = CHUNK // GROUP if GROUP < CHUNK else 1
    RUN: tl.constexpr = PLANES // GROUPS
    WORD: tl.constexpr = GROUP * PER_WORD
    WORDS: tl.constexpr = GROUPS // PER_WORD
    ROWS: tl.constexpr = 2 * N if IS_SWIGLU else N
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    HAS_HIGH: tl.constexpr = BITS == 5 or BITS == 6
    SHARED: tl.constexpr = 2 // (BITS - 4) if HAS_HIGH else 1
    E: tl.constexpr = PLANE // 4  # units of a row that a thread loads at once
    PIECES: tl.constexpr = PARTS * BANDS
    R: tl.constexpr = BLOCK_N // (8 * BANDS)
    T: tl.constexpr = BLOCK_M // 8
    ROW_STRIDE: tl.constexpr = K // 2 if IS_ROWS else PLANE
    CHUNK_STRIDE: tl.constexpr = PLANE if IS_ROWS else ROWS * PLANE
    # Programs with the same weights are neighbours: all but the first of them find the weights in the cache.
    tile, split = tl.program_id(0) // num_token_tiles, tl.program_id(1)
    first_token = tl.program_id(0) % num_token_tiles * BLOCK_M
    # As the matrix units divide an operand among the threads of a warp: 4 threads share a row, and 8 rows are apart.
    quarter = tl.arange(0, 4)[:, None, None, None, None]
    eighth = tl.arange(0, 8)[None, :, None, None, None]
    part = tl.arange(0, PIECES)[None, None, :, None, None] // BANDS
    band = tl.arange(0, PIECES)[None, None, :, None, None] % BANDS
    repeat_n = tl.arange(0, R)[None, None, None, :, None]
    repeat_m = tl.arange(0, T)[None, None, None, :, None]
    i = tl.arange(0, E)[None, None, None, None, :]
    begin = split * (STEPS * PARTS)  # chunk
    lane_rows = tl.minimum(tile * BLOCK_N + (band * R + repeat_n) * 8 + eighth, N - 1)
    lane_tokens = first_token + repeat_m * 8 + eighth
    words = tl.arange(0, E // 2)[None, None, None, None, :]
    in_row = lane_rows * (ROW_STRIDE // 2) + quarter * (E // 2) + words
    at = quarter * E + i
    if IS_ROWS:
        at = quarter * (2 * E) + i  # and as many after them
    xs = x_ptr + lane_tokens.to(tl.int64) * K + at
    there = lane_tokens < M
    m, n = first_token + tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_token = n < N, m < M
    # Four threads load the same scales, because all four have sums of these rows.
    parts = tl.arange(0, PIECES)[None, None, :, None] // BANDS
    rows = (tl.arange(0, PIECES)[None, None, :, None] % BANDS) * (8 * R) + tl.arange(0, R)[None, None, None, :] * 8
    rows = tl.minimum(tile * BLOCK_N + rows + tl.arange(0, 8)[None, :, None, None], N - 1)
    rows = tl.broadcast_to(rows, (4, 8, PIECES, R))
    one = tl.full((PIECES, 8 * R, PLANE // 2), 1.0, x_ptr.dtype.element_ty)
    ones = tl.interleave(one, one)  # as the codes are made, so that tokens are the same operand for both
    zeros = tl.zeros((PIECES, 8 * R, BLOCK_M), tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
    # Weights are loaded a step ahead, and the first of them before the previous kernel has ended.
    chunk = tl.minimum(begin + part, CHUNKS - 1)
    place = chunk.to(tl.int64) * (CHUNK_STRIDE // 2) + in_row
    units = tl.load(units_ptr + place, eviction_policy="evict_first")
    up = units
    if IS_SWIGLU:
        up = tl.load(units_ptr + place + N * ROW_STRIDE // 2, eviction_policy="evict_first")
    scale = (rows, rows)
    scale_up, minimum, minimum_up = scale, scale, scale
    if not IS_ROWS:
        chunks = tl.minimum(begin + parts, CHUNKS - 1)
        scale = _in_words(scales_ptr, chunks, rows, ROWS, WORD, WORDS, CHUNK)
        scale_up, minimum, minimum_up = scale, scale, scale
        if IS_SWIGLU:
            scale_up = _in_words(scales_ptr, chunks, rows + N, ROWS, WORD, WORDS, CHUNK)
        if HAS_MINIMA:
            minimum = _in_words(minima_ptr, chunks, rows, ROWS, WORD, WORDS, CHUNK)
            minimum_up = minimum
            if IS_SWIGLU:
                minimum_up = _in_words(minima_ptr, chunks, rows + N, ROWS, WORD, WORDS, CHUNK)
    if DEPENDENT:
        gdc_wait()
    acc, acc_up = zeros, zeros
    for c in tl.range(0, STEPS, loop_unroll_factor=UNROLL):
        now, now_up = units, up
        now_scale, now_scale_up, now_minimum, now_minimum_up = scale, scale_up, minimum, minimum_up
        chunk = begin + c * PARTS + part
        chunks = begin + c * PARTS + parts
        column = chunk * CHUNK  # of a part's tokens; beyond the last one there are none
        if not IS_EVEN:
            chunk = tl.minimum(chunk, CHUNKS - 1)
            chunks = tl.minimum(chunks, CHUNKS - 1)
        high, high_up = now, now
        if HAS_HIGH:
            high_at = (chunk // SHARED).to(tl.int64) * (CHUNK_STRIDE // 2) + in_row
            high = tl.load(high_ptr + high_at)
            high_up = high
            if IS_SWIGLU:
                high_up = tl.load(high_ptr + high_at + N * ROW_STRIDE // 2)
        if STEPS > 1:
            after = tl.minimum(begin + (c + 1) * PARTS + part, CHUNKS - 1)
            place = after.to(tl.int64) * (CHUNK_STRIDE // 2) + in_row
            units = tl.load(units_ptr + place, eviction_policy="evict_first")
            up = units
            if IS_SWIGLU:
                up = tl.load(units_ptr + place + N * ROW_STRIDE // 2, eviction_policy="evict_first")
            if not IS_ROWS:
                afters = tl.minimum(begin + (c + 1) * PARTS + parts, CHUNKS - 1)
                scale = _in_words(scales_ptr, afters, rows, ROWS, WORD, WORDS, CHUNK)
                scale_up, minimum, minimum_up = scale, scale, scale
                if IS_SWIGLU:
                    scale_up = _in_words(scales_ptr, afters, rows + N, ROWS, WORD, WORDS, CHUNK)
                if HAS_MINIMA:
                    minimum = _in_words(minima_ptr, afters, rows, ROWS, WORD, WORDS, CHUNK)
                    minimum_up = minimum
                    if IS_SWIGLU:
                        minimum_up = _in_words(minima_ptr, afters, rows + N, ROWS, WORD, WORDS, CHUNK)
        if IS_ROWS:
            half = tl.arange(0, 2)[None, None, None, None, :, None]
            pairs_at = tl.expand_dims(xs + column, 4) + half * E
            mask = tl.expand_dims(there, 4)
            if not IS_EVEN:
                mask = mask & (tl.expand_dims(at + column, 4) + half * E < K)
            tokens = tl.load(pairs_at, mask, 0.0)
            x0, x1 = tl.split(tl.reshape(tokens, (4, 8, PIECES, T, E, 2)))
            x0, x1 = _token_operand(x0, PIECES, T, E), _token_operand(x1, PIECES, T, E)
            acc = _add_plane(acc, now, high, chunk, x0, 0, BITS, ZERO, KIND, PIECES, R, E)
            acc = _add_plane(acc, now, high, chunk, x1, 1, BITS, ZERO, KIND, PIECES, R, E)
            if IS_SWIGLU:
                acc_up = _add_plane(acc_up, now_up, high_up, chunk, x0, 0, BITS, ZERO, KIND, PIECES, R, E)
                acc_up = _add_plane(acc_up, now_up, high_up, chunk, x1, 1, BITS, ZERO, KIND, PIECES, R, E)
        else:
            block_scale, block_minimum = rows, rows
            block_scale_up, block_minimum_up = rows, rows
            if HAS_BLOCKS:
                block = chunks * CHUNK // BLOCK * ROWS + rows
                block_scale = tl.load(block_scales_ptr + block).to(tl.float32)
                if HAS_MINIMA:
                    block_minimum = tl.load(block_minima_ptr + block).to(tl.float32)
                if IS_SWIGLU:
                    block_scale_up = tl.load(block_scales_ptr + block + N).to(tl.float32)
                    if HAS_MINIMA:
                        block_minimum_up = tl.load(block_minima_ptr + block + N).to(tl.float32)
            for g in tl.static_range(GROUPS):
                sums, sums_up, totals = zeros, zeros, zeros
                for r in tl.static_range(RUN):
                    x = _load_tokens(xs + column, at + column, there, g * RUN + r, K, PLANE, IS_EVEN)
                    x = _token_operand(x, PIECES, T, E)
                    sums = _add_plane(sums, now, high, chunk, x, g * RUN + r, BITS, ZERO, KIND, PIECES, R, E)
                    if IS_SWIGLU:
                        sums_up = _add_plane(
                            sums_up, now_up, high_up, chunk, x, g * RUN + r, BITS, ZERO, KIND, PIECES, R, E
                        )
                    if HAS_MINIMA:
                        totals = tl.dot(ones, x, totals, input_precision="ieee")
                by = _of_group(now_scale, g, PER_WORD, SCALE)
                if HAS_BLOCKS:
                    by *= block_scale
                acc += sums * _for_sums(by, PIECES, R, T)
                if HAS_MINIMA:
                    less = _of_group(now_minimum, g, PER_WORD, MINIMUM)
                    if HAS_ZEROS:
                        less *= by
                    if HAS_BLOCKS:
                        less *= block_minimum
                    acc -= totals * _for_sums(less, PIECES, R, T)
                if IS_SWIGLU:
                    by = _of_group(now_scale_up, g, PER_WORD, SCALE)
                    if HAS_BLOCKS:
                        by *= block_scale_up
                    acc_up += sums_up * _for_sums(by, PIECES, R, T)
                    if HAS_MINIMA:
                        less = _of_group(now_minimum_up, g, PER_WORD, MINIMUM)
                        if HAS_ZEROS:
                            less *= by
                        if HAS_BLOCKS:
                            less *= block_minimum_up
                        acc_up -= totals * _for_sums(less, PIECES, R, T)
    y = tl.sum(tl.reshape(acc, (PARTS, BLOCK_N, BLOCK_M)), 0)
    y_up = y
    if IS_SWIGLU:
        y_up = tl.sum(tl.reshape(acc_up, (PARTS, BLOCK_N, BLOCK_M)), 0)
    is_last = True
    if SPLITS > 1:
        y, y_up, is_last = sum_of_splits(y, y_up, split, parts_ptr, counters_ptr, BLOCK_N, BLOCK_M, SPLITS, IS_SWIGLU)
    if is_last:
        finish_columns(
            y, y_up, tile, m, n, is_row, is_token, scales_ptr, bias_ptr, residual_ptr, out_ptr, squares_ptr,
            next_norm_ptr, next_x_ptr, next_squares_ptr, num_squares, epsilon, N, K, TILES, IS_ROWS, SQUARES_BLOCK,
            HAS_SQUARES, HAS_BIAS, HAS_RESIDUAL, HAS_NEXT, IS_SWIGLU,
        )  # fmt: skip


def block_tokens(num_tokens: int) -> int:
    """Tokens of a program: the matrix units take as few as 8."""
    return min(max(8, int(triton.next_power_of_2(num_tokens))), _MOST_BLOCK_TOKENS)


def planar_linear(
    x: Tensor | Normed,
    weight: Planar | Scaled,
    out: Tensor,
    scratch: Scratch,
    config: PlanarConfig,
    *,
    epsilon: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    next_norm: Tensor | None = None,
    swiglu: bool = False,
    dependent: bool = False,
) -> Normed | None:
    """`linear.stream_linear` for a weight of 4 to 8 bits, and for any number of tokens."""
    n = weight.shape[0] // (2 if swiglu else 1)
    tiles = triton.cdiv(n, config.block_n)
    stored = _Stored.of(weight)
    given = Operands.of(x, stored.units, out, tiles, bias, residual, next_norm)
    num_tokens, k = given.values.shape
    assert k == weight.shape[1]
    block_m = block_tokens(num_tokens)
    token_tiles = triton.cdiv(num_tokens, block_m)
    assert config.parts * config.bands % config.num_warps == 0
    if config.splits > 1:
        scratch.need(tiles * token_tiles * config.splits, block_m, config.block_n)
    _planar_kernel[(tiles * token_tiles, config.splits)](
        *given.pointers[:2], *given.pointers[3:], *stored.tensors, scratch.parts, scratch.counters,
        num_tokens, token_tiles, given.num_squares, epsilon, n, k, block_m, config.block_n, config.parts, config.bands,
        config.splits, config.unroll, *stored.flags, triton.next_power_of_2(max(given.num_squares, 1)),
        *given.flags[1:], swiglu, dependent, num_warps=config.num_warps, num_stages=1,
        **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
    return given.normed


@dataclass(frozen=True, slots=True)
class _Stored:
    """A weight as the kernels take it; the units stand for absent tensors."""

    units: Tensor
    tensors: tuple[Tensor, ...]  # high, scales, minima, block scales, block minima
    flags: tuple[Any, ...]  # from BITS to IS_ROWS

    @staticmethod
    def of(weight: Planar | Scaled) -> _Stored:
        if isinstance(weight, Scaled):
            units = weight.values.view(torch.int32)
            kind = "fp8" if is_fp8(weight) else "signed"
            flags = (8, _ROW_PLANE, weight.shape[1], 256, 0, kind, 1, tl.float32, tl.float32, False, False, False, True)
            return _Stored(units, (units, weight.scales, units, units, units), flags)
        f = weight.format
        words = [None if each is None else _as_words(each) for each in (weight.scales, weight.minima)]
        high = None if weight.high is None else weight.high.view(torch.int16)
        found = (high, *words, weight.block_scales, weight.block_minima)
        flags = (
            f.bits, f.plane, f.group, f.block, f.zero, "fp8" if f.is_fp8 else "code", f.scales_per_word,
            _TYPES[weight.scales.dtype], _TYPES[(weight.scales if weight.minima is None else weight.minima).dtype],
            f.has_minima, f.has_zeros, f.has_blocks, False,
        )  # fmt: skip
        units = weight.units.view(torch.int32)
        return _Stored(units, tuple([units if tensor is None else tensor for tensor in found]), flags)


def _as_words(values: Tensor) -> Tensor:
    """[words, rows, values of a word] as one number for each word."""
    size = values.shape[2] * values.element_size()
    return values if values.shape[2] == 1 else values.view(_WORDS[size])


@triton.jit
def _unpack_kernel(
    units_ptr, high_ptr, scales_ptr, minima_ptr, block_scales_ptr, block_minima_ptr, out_ptr,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BITS: tl.constexpr, PLANE: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, ZERO: tl.constexpr, KIND: tl.constexpr, PER_WORD: tl.constexpr,
    SCALE: tl.constexpr, MINIMUM: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr, IS_ROWS: tl.constexpr,
):  # fmt: skip
    PLANES: tl.constexpr = 2 if BITS == 8 else 4
    CHUNK: tl.constexpr = PLANES * PLANE
    GROUPS: tl.constexpr = CHUNK // GROUP if GROUP < CHUNK else 1
    HAS_HIGH: tl.constexpr = BITS == 5 or BITS == 6
    SHARED: tl.constexpr = 2 // (BITS - 4) if HAS_HIGH else 1
    chunk = tl.program_id(0)
    n, i = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, PLANE)
    rows = tl.minimum(n, N - 1)
    words = rows[:, None] * (PLANE // 2) + tl.arange(0, PLANE // 2)[None, :]
    units = tl.load(units_ptr + chunk.to(tl.int64) * (N * PLANE // 2) + words)
    high = units
    if HAS_HIGH:
        high = tl.load(high_ptr + (chunk // SHARED).to(tl.int64) * (N * PLANE // 2) + words)
    scales = _in_words(scales_ptr, chunk, rows, N, GROUP * PER_WORD, GROUPS // PER_WORD, CHUNK)
    minima = scales
    if HAS_MINIMA:
        minima = _in_words(minima_ptr, chunk, rows, N, GROUP * PER_WORD, GROUPS // PER_WORD, CHUNK)
    block = chunk * CHUNK // BLOCK * N + rows
    for j in tl.static_range(PLANES):
        scale = _of_group(scales, j * GROUPS // PLANES, PER_WORD, SCALE)
        if HAS_BLOCKS:
            scale *= tl.load(block_scales_ptr + block).to(tl.float32)
        w = _codes(units, high, chunk, j, BITS, ZERO, KIND, tl.float32) * scale[:, None]
        if HAS_MINIMA:
            minimum = _of_group(minima, j * GROUPS // PLANES, PER_WORD, MINIMUM)
            if HAS_ZEROS:
                minimum *= scale
            if HAS_BLOCKS:
                minimum *= tl.load(block_minima_ptr + block).to(tl.float32)
            w -= minimum[:, None]
        k = chunk * CHUNK + j * PLANE + i
        mask = (n < N)[:, None] & (k < K)[None, :]
        tl.store(out_ptr + n[:, None].to(tl.int64) * K + k[None, :], w.to(out_ptr.dtype.element_ty), mask)


def unpack(weight: Planar, dtype: torch.dtype) -> Tensor:
    """The weights [rows, columns], for the library's product: with many tokens, computing takes longer than this."""
    n, k = weight.shape
    out = torch.empty((n, k), dtype=dtype, device=weight.device)
    stored = _Stored.of(weight)
    _unpack_kernel[(triton.cdiv(k, weight.format.chunk), triton.cdiv(n, 64))](
        stored.units, *stored.tensors, out, n, k, 64, *stored.flags
    )
    return out

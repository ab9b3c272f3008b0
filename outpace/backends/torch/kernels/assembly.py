"""Inline assembly for what Triton cannot express; Triton's interpreter needs none of it."""

from __future__ import annotations

import triton
import triton.language as tl

ON_GPU = tl.constexpr(not triton.knobs.runtime.interpret)  # Triton's interpreter runs one program after another


@triton.jit
def prefetch_bytes(pointers, num_bytes):
    """Into the L2 cache. One element per thread, else several threads prefetch the same lines."""
    if ON_GPU:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r",
            [pointers.to(tl.int64), tl.full(pointers.shape, num_bytes, tl.int32)], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def prefetch_line(pointers):
    if ON_GPU:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def publish():
    """Make all stores of this program visible before its next operation is. Triton's own barrier would prevent
    pipelining of the loop around it."""
    if ON_GPU:
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; bar.sync 0; mov.b32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
        )


# FP8 (e4m3) has the exponent bias 7, bfloat16 has 127: its bits, moved to their place in the wider number, are the
# value times 2**-120. Four values are in a register. 0xEA: (a & b) | c.
_PAIR = (
    "prmt.b32 t, $2, 0, {bytes}; shr.u32 u, t, 4; and.b32 u, u, 0x07f007f0; lop3.b32 u, t, 0x80008000, u, 0xEA; "
    "fma.rn.bf16x2 {out}, u, a, b; "
)
_FP8_TO_BFLOAT16 = tl.constexpr(
    "{ .reg .b32 t, u, a, b; mov.b32 a, 0x7B807B80; mov.b32 b, 0x80008000; "  # 2**120 and -0
    + _PAIR.format(bytes="0x1404", out="$0")
    + _PAIR.format(bytes="0x3424", out="$1")
    + "}"
)


@triton.jit
def widen(w, dtype: tl.constexpr):
    """Weights in the dtype of the tokens. Triton converts FP8 by way of other formats, several times slower."""
    if ON_GPU and w.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        wide = tl.inline_asm_elementwise(_FP8_TO_BFLOAT16, "=r,=r,r", [w], tl.bfloat16, is_pure=True, pack=4)
    else:
        wide = w.to(dtype)
    return wide

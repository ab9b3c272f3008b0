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

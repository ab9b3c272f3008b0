"""Compiles the product of planar weights for a GPU, which needs none, and looks at how operands lie in registers.

Triton derives from the loads behind an operand how many neighbouring columns a thread holds (`kWidth`). Four threads
share a row: where they would hold more columns than a plane has, Triton's code multiplies wrong columns, and its
interpreter, which knows no threads, does not show it.
"""

from __future__ import annotations

import os
import re

import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")
pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot be compiled")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outpace.backends.torch.kernels import planar_gemm
from outpace.backends.torch.storage import planar

_THREADS = 4  # of a row
_POINTERS = {
    torch.int8: "*i8", torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
    torch.float16: "*fp16",
}  # fmt: skip


def compiled(format: planar.PlanarFormat) -> str:
    """Triton's intermediate code of a product for an H100 or H200."""
    kernel, rows, columns = planar_gemm._planar_kernel, 64, 2304
    stored = planar_gemm._Stored.of(planar.allocate(format, rows, columns, torch.device("cpu")))
    names = kernel.arg_names
    first = names.index("N")
    # From N to UNROLL, those of the format, and no neighbour fused in.
    values = (rows, columns, 8, 16, 8, 1, 1, 2, *stored.flags, 1, *[False] * 6)
    constants = dict(zip(names[first:], values, strict=True))
    types = dict.fromkeys(names[:first], "*bf16") | dict.fromkeys(constants, "constexpr")
    types |= dict.fromkeys(("M", "num_token_tiles", "num_squares", "epsilon"), "i32") | {"epsilon": "fp32"}
    types |= dict.fromkeys(("squares_ptr", "next_squares_ptr", "parts_ptr"), "*fp32") | {"counters_ptr": "*i32"}
    high = names.index("high_ptr")
    types |= {name: _POINTERS[t.dtype] for name, t in zip(names[high:], stored.tensors, strict=False)}
    types["units_ptr"] = _POINTERS[stored.units.dtype]
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.endswith("_ptr")}
    source = ASTSource(kernel, types, {(names.index(name),): value for name, value in constants.items()}, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8, "num_stages": 1})
    return str(made.asm["ttgir"])


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("format", [planar.Q4_K, planar.Q5_K, planar.Q6_K, planar.Q8_0], ids=lambda f: f.name)
def test_the_threads_of_a_row_hold_different_columns(format):
    widths = {int(width) for width in re.findall(r"kWidth = (\d+)", compiled(format))}
    assert widths
    assert _THREADS * max(widths) <= format.plane

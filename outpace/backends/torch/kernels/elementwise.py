"""Embedding; RMSNorm and SwiGLU as separate kernels, for steps of many tokens, which use library products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _embed_kernel(
    tokens_ptr, embedding_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    at, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + at).to(tl.int64)
    tl.store(out_ptr + at * WIDTH + i, tl.load(embedding_ptr + token * WIDTH + i, i < WIDTH), i < WIDTH)


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * WIDTH
    i = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + i, i < WIDTH, 0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + at + i, i < WIDTH, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / WIDTH + epsilon)
    tl.store(out_ptr + at + i, (x * scale * weight).to(out_ptr.dtype.element_ty), i < WIDTH)


@triton.jit
def _swiglu_kernel(gate_up_ptr, out_ptr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up_ptr + token * 2 * HIDDEN + i, i < HIDDEN, 0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * HIDDEN + HIDDEN + i, i < HIDDEN, 0.0).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + i, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), i < HIDDEN)


def embed(tokens: Tensor, embedding: Tensor, *, dependent: bool = False) -> Tensor:
    width, block = embedding.shape[1], 1024
    out = torch.empty((len(tokens), width), dtype=embedding.dtype, device=embedding.device)
    _embed_kernel[(len(tokens), triton.cdiv(width, block))](
        tokens, embedding, out, width, block, dependent, **({"launch_pdl": True} if dependent else {})
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, *, dependent: bool = False) -> Tensor:
    """`dependent`: start while the previous kernel ends."""
    out = torch.empty_like(x)
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(len(x),)](
        x, weight, out, epsilon, width, block, dependent,
        num_warps=8 if block >= 2048 else 4, **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
    return out


def swiglu(gate_up: Tensor, *, dependent: bool = False) -> Tensor:
    hidden = gate_up.shape[1] // 2
    out = torch.empty((len(gate_up), hidden), dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    _swiglu_kernel[(len(gate_up), triton.cdiv(hidden, block))](
        gate_up, out, hidden, block, dependent, **({"launch_pdl": True} if dependent else {})
    )
    return out

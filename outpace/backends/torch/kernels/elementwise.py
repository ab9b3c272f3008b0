"""Embedding; RMSNorm, SwiGLU and GeGLU as separate kernels: steps of many tokens use library products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outpace.backends.torch.kernels.base import Normed


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
def _add_normed_kernel(
    x_ptr, weight_ptr, residual_ptr, next_weight_ptr, next_x_ptr, squares_ptr, epsilon, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, HAS_NEXT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask, places = i < WIDTH, token * WIDTH + i
    weight = tl.load(weight_ptr + i, mask, 0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + places, mask, 0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x) / WIDTH + epsilon) * weight
    out = (tl.load(residual_ptr + places, mask, 0.0).to(tl.float32) + normed).to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + places, out, mask)
    if HAS_NEXT:
        wide = out.to(tl.float32)
        next_x = wide * tl.load(next_weight_ptr + i, mask, 0.0).to(tl.float32)
        tl.store(next_x_ptr + places, next_x.to(next_x_ptr.dtype.element_ty), mask)
        tl.store(squares_ptr + token, tl.sum(wide * wide))


@triton.jit
def gelu_tanh(x):
    """0.5 x (1 + tanh(y)), which is x sigmoid(2 y)."""
    return x * tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))  # 2 sqrt(2 / pi)


@triton.jit
def _glu_kernel(
    gate_up_ptr, out_ptr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, IS_GELU: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up_ptr + token * 2 * HIDDEN + i, i < HIDDEN, 0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * HIDDEN + HIDDEN + i, i < HIDDEN, 0.0).to(tl.float32)
    active = gelu_tanh(gate) if IS_GELU else gate * tl.sigmoid(gate)
    tl.store(out_ptr + token * HIDDEN + i, (active * up).to(out_ptr.dtype.element_ty), i < HIDDEN)


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


def add_normed(
    x: Tensor, weight: Tensor, epsilon: float, residual: Tensor, next_norm: Tensor | None, *, dependent: bool = False
) -> Normed | None:
    """Add the norm of `x` to the residual, in place; with the weight of the next norm, also prepare that."""
    width = x.shape[1]
    normed = None
    if next_norm is not None:
        normed = Normed(torch.empty_like(residual), torch.empty((len(x), 1), dtype=torch.float32, device=x.device))
    block = triton.next_power_of_2(width)
    _add_normed_kernel[(len(x),)](
        x, weight, residual, weight if next_norm is None else next_norm, x if normed is None else normed.x,
        x if normed is None else normed.squares, epsilon, width, block, normed is not None, dependent,
        num_warps=8 if block >= 2048 else 4, **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
    return normed


def swiglu(gate_up: Tensor, *, dependent: bool = False) -> Tensor:
    return _glu(gate_up, is_gelu=False, dependent=dependent)


def geglu(gate_up: Tensor, *, dependent: bool = False) -> Tensor:
    return _glu(gate_up, is_gelu=True, dependent=dependent)


def _glu(gate_up: Tensor, *, is_gelu: bool, dependent: bool) -> Tensor:
    hidden = gate_up.shape[1] // 2
    out = torch.empty((len(gate_up), hidden), dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    _glu_kernel[(len(gate_up), triton.cdiv(hidden, block))](
        gate_up, out, hidden, block, is_gelu, dependent, **({"launch_pdl": True} if dependent else {})
    )
    return out

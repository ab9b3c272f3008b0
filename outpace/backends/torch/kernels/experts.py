"""Products of tokens with the experts that a router chose for them.

A pair is a token and one of its experts. With few pairs, each is multiplied by itself: an expert that two tokens share
is read twice, but nothing has to be sorted. With more pairs than experts, they are sorted by expert, and each block of
pairs has one expert, so an expert is read once per block. All shapes depend on the number of tokens only, so a graph
can capture this; blocks that are not needed end at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outpace.backends.torch.kernels.assembly import widen
from outpace.backends.torch.storage import Weight
from outpace.backends.torch.storage.scaled import Scaled

_SMALL_BLOCK, _LARGE_BLOCK = 16, 64  # pairs; 16 are the fewest that the matrix units take


@triton.jit
def _expert_kernel(
    x_ptr, weight_ptr, scales_ptr, factors_ptr, out_ptr, order_ptr, experts_ptr, firsts_ptr, ends_ptr,
    N: tl.constexpr, K: tl.constexpr, NUM_EXPERTS: tl.constexpr, PAIRS_PER_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_SORTED: tl.constexpr,
    HAS_SCALES: tl.constexpr, IS_SWIGLU: tl.constexpr, HAS_FACTORS: tl.constexpr,
):  # fmt: skip
    """One block of pairs times a tile of their expert's rows. x has one row for PAIRS_PER_ROW pairs; out, for each."""
    block, tile = tl.program_id(0), tl.program_id(1)
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if expert < NUM_EXPERTS:
        if IS_SORTED:
            place = tl.load(firsts_ptr + block) + m
            is_real = place < tl.load(ends_ptr + block)
            pair = tl.load(order_ptr + place, is_real, 0).to(tl.int64)
        else:
            is_real = m == 0
            pair = (block + m * 0).to(tl.int64)
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = expert * (2 * N if IS_SWIGLU else N) + tl.minimum(n, N - 1)
        xs = x_ptr + (pair // PAIRS_PER_ROW)[:, None] * K + k[None, :]
        weights = weight_ptr + rows[:, None] * K + k[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for at in range(0, K, BLOCK_K):
            there = (k < K - at)[None, :]
            x = tl.load(xs + at, is_real[:, None] & there, 0.0)
            acc = tl.dot(x, widen(tl.load(weights + at, there, 0.0), x.dtype).T, acc, input_precision="ieee")
            if IS_SWIGLU:
                up = tl.load(weights + N * K + at, there, 0.0)
                acc_up = tl.dot(x, widen(up, x.dtype).T, acc_up, input_precision="ieee")
        if HAS_SCALES:
            acc *= tl.load(scales_ptr + rows)[None, :]
            if IS_SWIGLU:
                acc_up *= tl.load(scales_ptr + rows + N)[None, :]
        if IS_SWIGLU:
            acc = acc * tl.sigmoid(acc) * acc_up
        if HAS_FACTORS:
            acc *= tl.load(factors_ptr + pair, is_real, 0.0)[:, None]
        mask = is_real[:, None] & (n < N)[None, :]
        tl.store(out_ptr + pair[:, None] * N + n[None, :], acc.to(out_ptr.dtype.element_ty), mask)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Pairs, grouped so that those of a block have one expert."""

    size: int  # most pairs of a block
    experts: Tensor  # [blocks]: the number of experts stands for none
    order: Tensor | None  # pairs by expert; None: the block of each pair is its own
    firsts: Tensor | None  # [blocks]: places in the order
    ends: Tensor | None


def group_pairs(experts: Tensor, num_experts: int) -> Blocks:
    """`experts`: int64, of each pair; `num_experts` stands for none."""
    num_pairs = len(experts)
    if num_pairs <= num_experts:
        return Blocks(1, experts, None, None, None)
    size = _SMALL_BLOCK if num_pairs <= _SMALL_BLOCK * num_experts else _LARGE_BLOCK
    order = experts.argsort(stable=True)
    counts = experts.new_zeros(num_experts + 1).scatter_add_(0, experts, torch.ones_like(experts))[:-1]
    ends = counts.cumsum(0)
    num_blocks = (counts + size - 1) // size
    block_ends = num_blocks.cumsum(0)
    most = min(num_pairs, num_experts + num_pairs // size)
    block = torch.arange(most, device=experts.device)
    owner = torch.searchsorted(block_ends, block, right=True)
    known = owner.clamp(max=num_experts - 1)
    firsts = (ends - counts)[known] + (block - (block_ends - num_blocks)[known]) * size
    return Blocks(size, owner, order, firsts, ends[known])


def mixed(
    x: Tensor,
    positions: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Weight,
    down: Weight,
    num_experts: int,
) -> Tensor:
    """The weighted sum of each token's experts' outputs. chosen, weights: [tokens, experts per token]."""
    num_tokens, per_token = chosen.shape
    pairs = torch.where(positions[:, None] < 0, num_experts, chosen).flatten()
    blocks = group_pairs(pairs, num_experts)
    hidden = x.new_empty((num_tokens * per_token, gate_up.shape[0] // (2 * num_experts)))
    _multiply(x, gate_up, hidden, blocks, num_experts, pairs_per_row=per_token, is_swiglu=True)
    out = x.new_zeros((num_tokens * per_token, x.shape[1]))  # tokens in gaps keep zeros
    _multiply(hidden, down, out, blocks, num_experts, factors=weights.flatten())
    return out.view(num_tokens, per_token, -1).sum(1)


def _multiply(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    blocks: Blocks,
    num_experts: int,
    *,
    pairs_per_row: int = 1,
    is_swiglu: bool = False,
    factors: Tensor | None = None,
) -> None:
    if not isinstance(weight, Tensor | Scaled):
        raise TypeError(f"experts' weights are dense or have a scale per row, and these are {type(weight).__name__}")
    matrix, scales = (weight.values, weight.scales) if isinstance(weight, Scaled) else (weight, None)
    n, k = out.shape[1], x.shape[1]
    # Not measured yet: small tiles, so that few pairs have enough programs.
    block_n, block_k = (64, 64) if blocks.size == _LARGE_BLOCK else (32, 256 // x.element_size())
    given = (scales, factors, out, blocks.order, blocks.experts, blocks.firsts, blocks.ends)
    _expert_kernel[(len(blocks.experts), triton.cdiv(n, block_n))](
        x, matrix, *(tensor if tensor is not None else x for tensor in given),
        n, k, num_experts, pairs_per_row, max(blocks.size, _SMALL_BLOCK), block_n, block_k, blocks.order is not None,
        scales is not None, is_swiglu, factors is not None,
        num_warps=4, num_stages=3,
    )  # fmt: skip

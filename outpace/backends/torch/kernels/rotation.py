"""RoPE and the write into the paged cache, as a separate kernel before attention of long rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outpace.backends.torch.execution.step import StepInputs
from outpace.backends.torch.kernels.base import Cache
from outpace.backends.torch.kernels.cache_rounding import codes_of, scales_of


@dataclass(frozen=True, slots=True)
class Rotation:
    """Norm and RoPE of queries and keys."""

    rope: Tensor  # float32 [positions, head_dim]: cosines, then sines
    q_norm: Tensor | None
    k_norm: Tensor | None
    epsilon: float


@triton.jit
def _store_codes(places, slots, first, second, mask, is_key, HALF: tl.constexpr, dtype: tl.constexpr):
    """The two halves of each head, rounded to 8 bits, and the scale of the head."""
    scales = scales_of(tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1)), dtype)[:, None]
    tl.store(slots, scales, is_key)
    tl.store(places, codes_of(first, scales, dtype), mask & is_key)
    tl.store(places + HALF, codes_of(second, scales, dtype), mask & is_key)


@triton.jit(do_not_specialize=["table_width"])
def _rotate_kernel(
    qkv_ptr, q_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, rope_ptr, q_norm_ptr, k_norm_ptr,
    positions_ptr, token_rows_ptr, tables_ptr, begins_ptr, lengths_ptr, contexts_ptr, table_width, epsilon,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr, PAGE: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SCALES: tl.constexpr,
    DEPENDENT: tl.constexpr, HAS_TREES: tl.constexpr,
):  # fmt: skip
    """One program per token, for all heads: one program per head would take longer to start than to run."""
    HALF: tl.constexpr = DIM // 2
    token = tl.program_id(0)
    position = tl.load(positions_ptr + token)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if position >= 0:
        head, d = tl.arange(0, HEADS_BLOCK)[:, None], tl.arange(0, HALF_BLOCK)[None, :]
        is_query, is_key = head < NUM_HEADS, (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
        mask = (head < NUM_HEADS + NUM_KV_HEADS) & (d < HALF)
        source = qkv_ptr + token.to(tl.int64) * (NUM_HEADS + 2 * NUM_KV_HEADS) * DIM + head * DIM + d
        first = tl.load(source, mask, 0.0).to(tl.float32)
        second = tl.load(source + HALF, mask, 0.0).to(tl.float32)
        if HAS_NORM:
            scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + epsilon)[:, None]
            there = d < HALF
            norm = tl.where(is_query, tl.load(q_norm_ptr + d, there, 0.0), tl.load(k_norm_ptr + d, there, 0.0))
            first = first * scale * norm.to(tl.float32)
            q_second, k_second = q_norm_ptr + HALF + d, k_norm_ptr + HALF + d
            norm = tl.where(is_query, tl.load(q_second, there, 0.0), tl.load(k_second, there, 0.0))
            second = second * scale * norm.to(tl.float32)
        cosines = tl.load(rope_ptr + position * DIM + d, d < HALF, 0.0)
        sines = tl.load(rope_ptr + position * DIM + HALF + d, d < HALF, 0.0)
        rotated, rotated_second = first * cosines - second * sines, second * cosines + first * sines
        target = q_ptr + (token.to(tl.int64) * NUM_HEADS + head) * DIM + d
        tl.store(target, rotated.to(q_ptr.dtype.element_ty), mask & is_query)
        tl.store(target + HALF, rotated_second.to(q_ptr.dtype.element_ty), mask & is_query)
        row = tl.load(token_rows_ptr + token)
        place_in_row = position
        if HAS_TREES:
            before = tl.load(contexts_ptr + row) - tl.load(lengths_ptr + row) - tl.load(begins_ptr + row)
            place_in_row = before + token
        page = tl.load(tables_ptr + row * table_width + place_in_row // PAGE).to(tl.int64)
        slot = (page * NUM_KV_HEADS + head - NUM_HEADS) * PAGE + place_in_row % PAGE
        place = slot * DIM + d
        value = source + NUM_KV_HEADS * DIM
        value_first, value_second = tl.load(value, mask & is_key, 0.0), tl.load(value + HALF, mask & is_key, 0.0)
        if HAS_SCALES:
            dtype: tl.constexpr = keys_ptr.dtype.element_ty
            _store_codes(keys_ptr + place, key_scales_ptr + slot, rotated, rotated_second, mask, is_key, HALF, dtype)
            _store_codes(
                values_ptr + place, value_scales_ptr + slot, value_first.to(tl.float32), value_second.to(tl.float32),
                mask, is_key, HALF, dtype,
            )  # fmt: skip
        else:
            tl.store(keys_ptr + place, rotated.to(keys_ptr.dtype.element_ty), mask & is_key)
            tl.store(keys_ptr + place + HALF, rotated_second.to(keys_ptr.dtype.element_ty), mask & is_key)
            tl.store(values_ptr + place, value_first, mask & is_key)
            tl.store(values_ptr + place + HALF, value_second, mask & is_key)


def rotate_and_store(
    qkv: Tensor, cache: Cache, step: StepInputs, rotation: Rotation, *, dependent: bool = False
) -> Tensor:
    """Returns the queries, of which there may be none."""
    _, num_kv_heads, page_tokens, dim = cache.keys.shape
    num_tokens = len(qkv)
    num_heads = qkv.shape[1] // dim - 2 * num_kv_heads
    q = torch.empty((num_tokens, num_heads, dim), dtype=qkv.dtype, device=qkv.device)
    has_norm = rotation.q_norm is not None
    key_scales, value_scales = cache.key_scales, cache.value_scales
    heads_block = triton.next_power_of_2(num_heads + num_kv_heads)
    _rotate_kernel[(num_tokens,)](
        qkv, q if num_heads else qkv, cache.keys, cache.values, cache.keys if key_scales is None else key_scales,
        cache.values if value_scales is None else value_scales, rotation.rope,
        rotation.q_norm if has_norm else qkv, rotation.k_norm if has_norm else qkv,
        step.positions, step.token_rows, step.tables, step.begins, step.lengths, step.contexts,
        step.shape.table_width, rotation.epsilon,
        num_heads, num_kv_heads, dim, heads_block, triton.next_power_of_2(dim // 2), page_tokens, has_norm,
        key_scales is not None, dependent, step.branches is not None, num_warps=4,
        **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
    return q

"""Attention of ragged rows over a paged cache; for short rows, also RoPE and the write into the cache.

One program takes a few tokens of one row with all the query heads that share a key head, so keys are read once for the
group, and one share of the row's context. With few rows, dividing contexts is the only way to fill the GPU; with many,
it keeps a long context from delaying the others. A second kernel joins the shares. Decode, verification and prefill use
the same kernel with different lengths. If the cache has 8 bits, its codes are multiplied as they are: the scale of a
key multiplies the key's scores, and that of a value its weights.

Nodes of a tree (`step.Branches`) attend by a bit mask to the row's last places. Their positions are not their places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outpace.backends.torch.execution.step import StepInputs
from outpace.backends.torch.kernels.assembly import prefetch_line, widen
from outpace.backends.torch.kernels.base import FIXED_BLOCK, LLAMA, Cache, Scores, fixed_shares
from outpace.backends.torch.kernels.cache_rounding import codes_of, scales_of
from outpace.backends.torch.kernels.rotation import Rotation, rotate_and_store

_LOG2_E = 1.4426950408889634
_MAX_SPLITS = 64
_MAX_BLOCK_BYTES = 128 * 128 * 2  # of one block of keys; as many for values, and two stages of both
_TILE_ROWS = 64  # most query rows (tokens times heads of a group) of one program


@triton.jit
def _rotated(
    source, is_real, position, d, rope_ptr, norm_ptr, epsilon, DIM: tl.constexpr, HAS_NORM: tl.constexpr
):  # fmt: skip
    """Rows of a head after the norm, if any, and RoPE; d [DIM_BLOCK]; source, is_real, position [rows]."""
    HALF: tl.constexpr = DIM // 2
    mask = is_real[:, None] & (d < DIM)[None, :]
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    x = tl.load(source[:, None] + d[None, :], mask, 0.0).to(tl.float32)
    y = tl.load(source[:, None] + partner[None, :], mask, 0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + epsilon)[:, None]
        x = x * scale * tl.load(norm_ptr + d, d < DIM, 0.0).to(tl.float32)[None, :]
        y = y * scale * tl.load(norm_ptr + partner, d < DIM, 0.0).to(tl.float32)[None, :]
    angle = rope_ptr + position[:, None] * DIM + (d % HALF)[None, :]
    sines = tl.load(angle + HALF, mask, 0.0)
    return x * tl.load(angle, mask, 0.0) + y * tl.where((d < HALF)[None, :], -sines, sines)


@triton.jit
def _store_new(
    qkv_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, rope_ptr, k_norm_ptr, epsilon,
    positions_ptr, begin, length, context, low, high, kv_head,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, NEW_BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_TREES: tl.constexpr,
):  # fmt: skip
    """Write the rotated keys and the values of a row's new tokens between low and high into the cache."""
    new, d = tl.arange(0, NEW_BLOCK), tl.arange(0, DIM_BLOCK)
    t = context - length + new
    is_mine = (new < length) & (t >= low) & (t < high)
    source = qkv_ptr + ((begin + new).to(tl.int64) * (NUM_HEADS + 2 * NUM_KV_HEADS) + NUM_HEADS + kv_head) * DIM
    page = tl.load(table_ptr + t // PAGE, is_mine, 0).to(tl.int64)
    slot = (page * NUM_KV_HEADS + kv_head) * PAGE + t % PAGE
    there = (slot * DIM)[:, None] + d[None, :]
    mask = is_mine[:, None] & (d < DIM)[None, :]
    position = t
    if HAS_TREES:
        position = tl.load(positions_ptr + begin + new, is_mine, 0)
    keys = _rotated(source, is_mine, position, d, rope_ptr, k_norm_ptr, epsilon, DIM, HAS_NORM)
    values = tl.load(source[:, None] + NUM_KV_HEADS * DIM + d[None, :], mask, 0.0)
    if HAS_SCALES:
        dtype: tl.constexpr = keys_ptr.dtype.element_ty
        scales = scales_of(tl.max(tl.abs(keys), 1), dtype)
        tl.store(key_scales_ptr + slot, scales, is_mine)
        tl.store(keys_ptr + there, codes_of(keys, scales[:, None], dtype), mask)
        wide = values.to(tl.float32)
        scales = scales_of(tl.max(tl.abs(wide), 1), dtype)
        tl.store(value_scales_ptr + slot, scales, is_mine)
        tl.store(values_ptr + there, codes_of(wide, scales[:, None], dtype), mask)
    else:
        tl.store(keys_ptr + there, keys.to(keys_ptr.dtype.element_ty), mask)
        tl.store(values_ptr + there, values, mask)


@triton.jit
def _oldest(context, length, tile, TILE_TOKENS: tl.constexpr, WINDOW: tl.constexpr, HAS_TREES: tl.constexpr):
    """The first place that a token of the tile attends to; WINDOW 0: all."""
    oldest = context * 0
    if WINDOW > 0:
        oldest = tl.maximum(context - length + tile * TILE_TOKENS - WINDOW + 1, 0)
        if HAS_TREES:  # a node's position may be as early as that of the row's first token
            oldest = tl.maximum(context - length - WINDOW + 1, 0)
    return oldest


@triton.jit
def _share(num_seen, SHARE: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Tokens of context per program: SHARE, or more if NUM_SPLITS programs would not cover what is seen."""
    return tl.maximum(SHARE, tl.cdiv(tl.cdiv(num_seen, NUM_SPLITS), BLOCK_KV) * BLOCK_KV)


@triton.jit(do_not_specialize=["table_width", "num_tiles"])  # one compiled kernel serves prompts of any length
def _attention_kernel(
    q_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, out_ptr, parts_ptr, stats_ptr,
    begins_ptr, lengths_ptr, contexts_ptr, tables_ptr, table_width, num_tiles, scale, softcap,
    rope_ptr, q_norm_ptr, k_norm_ptr, epsilon, positions_ptr, masks_ptr, roots_ptr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, TILE_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_KV: tl.constexpr, NUM_SPLITS: tl.constexpr, SHARE: tl.constexpr, NEW_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_SCALES: tl.constexpr, THREADS: tl.constexpr, DEPENDENT: tl.constexpr,
    FIRST: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_TREES: tl.constexpr,
):  # fmt: skip
    """NEW_BLOCK > 0: q_ptr is the fused product; this kernel rotates and writes the cache. 0: q is already rotated."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    ALL_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    row, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    kv_head, split = tl.program_id(1), tl.program_id(2)
    begin, length = tl.load(begins_ptr + row), tl.load(lengths_ptr + row)
    context = tl.load(contexts_ptr + row)
    visible = context - length + tl.minimum((tile + 1) * TILE_TOKENS, length)
    oldest = _oldest(context, length, tile, TILE_TOKENS, WINDOW, HAS_TREES)
    share = _share(visible - oldest, SHARE, NUM_SPLITS, BLOCK_KV)
    low = oldest + split * share
    high = tl.minimum(low + share, visible)
    if DEPENDENT:
        gdc_launch_dependents()
        SIZE: tl.constexpr = DIM * keys_ptr.dtype.element_ty.primitive_bitwidth // 8
        if SIZE % 128 == 0:
            # Tokens already in the cache do not depend on the previous kernel.
            ahead = low + tl.arange(0, THREADS)
            known = ahead < tl.minimum(high, context - length)
            ahead_page = tl.load(tables_ptr + row * table_width + ahead // PAGE, known, 0).to(tl.int64)
            ahead = tl.where(known, ((ahead_page * NUM_KV_HEADS + kv_head) * PAGE + ahead % PAGE) * DIM, 0)
            for i in tl.static_range(SIZE // 128):
                prefetch_line(keys_ptr + ahead + i * (DIM * 128 // SIZE))
                prefetch_line(values_ptr + ahead + i * (DIM * 128 // SIZE))
    if (tile * TILE_TOKENS < length) & (low < visible):
        if DEPENDENT:
            gdc_wait()
        m, d = tl.arange(0, BLOCK_M), tl.arange(0, DIM_BLOCK)
        in_row = tile * TILE_TOKENS + m // GROUP
        is_real = (m < TILE_TOKENS * GROUP) & (in_row < length)
        token = (begin + in_row).to(tl.int64)
        head = kv_head * GROUP + m % GROUP
        place = token * NUM_HEADS + head
        own_place = context - length + in_row
        position = own_place
        if HAS_TREES:
            position = tl.load(positions_ptr + token, is_real, 0)
            branch, root = tl.load(masks_ptr + token, is_real, 0), tl.load(roots_ptr + row)
        if NEW_BLOCK > 0:
            _store_new(
                q_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, tables_ptr + row * table_width, rope_ptr,
                k_norm_ptr, epsilon, positions_ptr, begin, length, context, low, high, kv_head,
                NUM_HEADS, NUM_KV_HEADS, DIM, DIM_BLOCK, PAGE, NEW_BLOCK, HAS_NORM, HAS_SCALES, HAS_TREES,
            )  # fmt: skip
            q = _rotated(
                q_ptr + (token * ALL_HEADS + head) * DIM, is_real, position, d, rope_ptr, q_norm_ptr, epsilon,
                DIM, HAS_NORM,
            ).to(q_ptr.dtype.element_ty)  # fmt: skip
            tl.debug_barrier()
        else:
            q = tl.load(q_ptr + place[:, None] * DIM + d[None, :], is_real[:, None] & (d < DIM)[None, :], 0.0)
        best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, DIM_BLOCK), tl.float32)
        for at in range(low, high, BLOCK_KV):
            t = at + tl.arange(0, BLOCK_KV)
            page = tl.load(tables_ptr + row * table_width + t // PAGE, t < high, 0).to(tl.int64)
            slot = (page * NUM_KV_HEADS + kv_head) * PAGE + t % PAGE
            there = slot * DIM
            mask = (t < high)[:, None] & (d < DIM)[None, :]
            k = tl.load(keys_ptr + there[:, None] + d[None, :], mask, 0.0)
            scores = tl.dot(q, widen(k, q.dtype).T, input_precision="ieee") * scale
            if HAS_SCALES:
                scores *= tl.load(key_scales_ptr + slot, t < high, 0.0)[None, :]
            if HAS_SOFTCAP:
                scores = softcap * (2 * tl.sigmoid(2 * scores) - 1)  # tanh
            is_seen = t[None, :] <= own_place[:, None]
            position_of_t = t
            if HAS_TREES:
                bit = tl.minimum(tl.maximum(t - root, 0), 31)
                on_path = (t < root)[None, :] | (((branch[:, None] >> bit[None, :]) & 1) != 0)
                is_seen = tl.where((branch != 0)[:, None], on_path, is_seen)
                is_new = (t >= context - length) & (t < high)
                mine = begin + t - (context - length)
                position_of_t = tl.where(is_new, tl.load(positions_ptr + mine, is_new, 0), t)
            is_seen = is_seen & ((t >= FIRST) & (t < high))[None, :]
            if WINDOW > 0:
                is_seen = is_seen & (position_of_t[None, :] > position[:, None] - WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, 1))
            safe = tl.where(new_best == float("-inf"), 0.0, new_best)  # the token sees nothing of this share
            p = tl.exp2(scores - safe[:, None])
            fade = tl.exp2(best - safe)
            v = tl.load(values_ptr + there[:, None] + d[None, :], mask, 0.0)
            total = total * fade + tl.sum(p, 1)
            if HAS_SCALES:
                p *= tl.load(value_scales_ptr + slot, t < high, 0.0)[None, :]
            acc = tl.dot(p.to(q.dtype), widen(v, q.dtype), acc * fade[:, None], input_precision="ieee")
            best = new_best
        if NUM_SPLITS == 1:
            out = acc / total[:, None]
            tl.store(
                out_ptr + place[:, None] * DIM + d[None, :],
                out.to(out_ptr.dtype.element_ty),
                is_real[:, None] & (d < DIM)[None, :],
            )
        else:
            part = place * NUM_SPLITS + split
            tl.store(parts_ptr + part[:, None] * DIM + d[None, :], acc, is_real[:, None] & (d < DIM)[None, :])
            tl.store(stats_ptr + part * 2, best, is_real)
            tl.store(stats_ptr + part * 2 + 1, total, is_real)


@triton.jit
def _join_kernel(
    parts_ptr, stats_ptr, out_ptr, positions_ptr, token_rows_ptr, begins_ptr, lengths_ptr, contexts_ptr,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, TILE_TOKENS: tl.constexpr,
    BLOCK_KV: tl.constexpr, NUM_SPLITS: tl.constexpr, SHARE: tl.constexpr, SPLIT_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr, WINDOW: tl.constexpr, HAS_TREES: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions_ptr + token)
    row = tl.load(token_rows_ptr + token)
    length = tl.load(lengths_ptr + row)
    tile = (token - tl.load(begins_ptr + row)) // TILE_TOKENS
    context = tl.load(contexts_ptr + row)
    num_seen = context - length + tl.minimum((tile + 1) * TILE_TOKENS, length)
    num_seen -= _oldest(context, length, tile, TILE_TOKENS, WINDOW, HAS_TREES)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if position >= 0:
        s, d = tl.arange(0, SPLIT_BLOCK), tl.arange(0, DIM_BLOCK)
        place = token.to(tl.int64) * NUM_HEADS + head
        part = place * NUM_SPLITS + s
        is_used = (s < NUM_SPLITS) & (s * _share(num_seen, SHARE, NUM_SPLITS, BLOCK_KV) < num_seen)
        best = tl.load(stats_ptr + part * 2, is_used, float("-inf"))
        total = tl.load(stats_ptr + part * 2 + 1, is_used, 0.0)
        weight = tl.exp2(best - tl.max(best))
        mask = (total > 0.0)[:, None] & (d < DIM)[None, :]
        parts = tl.load(parts_ptr + part[:, None] * DIM + d[None, :], mask, 0.0)
        out = tl.sum(parts * weight[:, None], 0) / tl.sum(total * weight)
        tl.store(out_ptr + place * DIM + d, out.to(out_ptr.dtype.element_ty), d < DIM)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the work is divided among programs."""

    splits: int  # most shares of a context
    block_kv: int  # tokens of a share per iteration
    num_warps: int
    num_stages: int = 2
    share: int = 1  # fewest tokens of a share


def attend(
    qkv: Tensor,
    cache: Cache,
    step: StepInputs,
    rotation: Rotation,
    num_sms: int,
    *,
    scores: Scores = LLAMA,
    tiling: Tiling | None = None,
    dependent: bool = False,
) -> Tensor:
    """Rotation, the write into the cache, and attention: one kernel for short rows, two for long ones."""
    _, num_kv_heads, _, dim = cache.keys.shape
    group = qkv.shape[1] // (dim * num_kv_heads) - 2
    longest = step.shape.max_row_tokens
    is_fused = _tile_tokens(longest, group, qkv.dtype) >= longest  # else several programs would write one token
    q = qkv if is_fused else rotate_and_store(qkv, cache, step, rotation, dependent=dependent)
    return attention(
        q, cache, step, num_sms, scores=scores, tiling=tiling, rotation=rotation if is_fused else None,
        dependent=dependent,
    )  # fmt: skip


def attend_fixed(qkv: Tensor, cache: Cache, step: StepInputs, rotation: Rotation, *, dependent: bool = False) -> Tensor:
    """`attend` with sums in an order that depends only on a token's position, not on the step.

    Rotation is always a kernel of its own, tiles have one size, and contexts are divided at the same places. What a
    token does not see adds zeros, which change nothing.
    """
    _, num_kv_heads, page_tokens, dim = cache.keys.shape
    group = qkv.shape[1] // (dim * num_kv_heads) - 2
    share, splits = fixed_shares(step.shape.table_width * page_tokens)
    tiling = Tiling(splits, FIXED_BLOCK, num_warps=4, share=share)
    q = rotate_and_store(qkv, cache, step, rotation, dependent=dependent)
    return attention(q, cache, step, 0, tiling=tiling, tile_tokens=max(1, 16 // group), dependent=dependent)


def _tile_tokens(longest: int, group: int, dtype: torch.dtype) -> int:
    """New tokens of a row per program, which takes all the query heads of a key head."""
    # float32 has no matrix units, and a large tile would not fit into registers.
    tile_rows = _TILE_ROWS if dtype != torch.float32 else 16
    wanted = int(triton.next_power_of_2(longest))  # so that few variants are compiled
    return max(1, min(wanted, tile_rows // group))


def tiling_for(
    step: StepInputs, cache: Cache, num_tiles: int, block_m: int, dim_block: int, num_sms: int, window: int | None
) -> Tiling:  # fmt: skip
    """Measured on an H200, with contexts as different as those of Spec-Bench's questions.

    Contexts are split if there are too few rows to fill the GPU, and so that the longest context does not delay the
    others. More rows get larger shares. With many rows, joining costs more than splitting saves; the more tokens per
    row, the sooner.
    """
    _, num_kv_heads, page_tokens, _ = cache.keys.shape
    programs = step.shape.num_rows * num_kv_heads * num_tiles
    if num_tiles > 1:
        share, block_kv, num_warps = 256 if programs < 4 * num_sms else 0, 64, 4
    elif programs >= (4 if step.shape.max_row_tokens <= 2 else 1.5) * num_sms:
        share, block_kv, num_warps = 0, 128, 4
    elif programs > num_sms // 4:
        share, block_kv, num_warps = 256, 128, 4
    elif block_m > 16 or programs > num_sms // 8:
        share, block_kv, num_warps = 128, 128, 8 if block_m > 16 else 4
    else:
        share, block_kv, num_warps = 64, 64, 4
    if block_kv * dim_block * max(cache.keys.element_size(), 2) > _MAX_BLOCK_BYTES:  # codes are widened to 16 bits
        block_kv = 64
    longest = step.shape.table_width * page_tokens
    if window is not None:
        longest = min(longest, window + step.shape.max_row_tokens)
    splits = min(-(-longest // share), _MAX_SPLITS) if share else 1
    return Tiling(splits, block_kv, num_warps, share=max(share, 1))


def attention(
    q: Tensor,
    cache: Cache,
    step: StepInputs,
    num_sms: int,
    *,
    scores: Scores = LLAMA,
    tiling: Tiling | None = None,
    rotation: Rotation | None = None,
    tile_tokens: int | None = None,
    dependent: bool = False,
) -> Tensor:
    """`q` is rotated and the cache complete; or, with `rotation`, `q` is the fused product [tokens, q + 2 kv].
    `tile_tokens`: new tokens of a row per program, by default as many as are useful."""
    _, num_kv_heads, page_tokens, dim = cache.keys.shape
    num_tokens = len(q)
    num_heads = q.numel() // (num_tokens * dim) - (2 * num_kv_heads if rotation is not None else 0)
    group = num_heads // num_kv_heads
    longest = step.shape.max_row_tokens
    tile_tokens = tile_tokens or _tile_tokens(longest, group, q.dtype)
    num_tiles = -(-longest // tile_tokens)
    block_m = max(16, triton.next_power_of_2(tile_tokens * group))
    dim_block = triton.next_power_of_2(dim)
    tiling = tiling or tiling_for(step, cache, num_tiles, block_m, dim_block, num_sms, scores.window)
    splits = tiling.splits
    out = q.new_empty((num_tokens, num_heads, dim))
    parts = stats = out
    if splits > 1:
        parts = torch.empty((num_tokens, num_heads, splits, dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((num_tokens, num_heads, splits, 2), dtype=torch.float32, device=q.device)
    options = {"launch_pdl": True} if dependent else {}
    has_norm = rotation is not None and rotation.q_norm is not None
    window, cap = scores.window or 0, scores.softcap
    # The kernel computes powers of 2; a cap is applied to scores divided by it.
    scale, softcap = scores.scale or dim**-0.5, (cap or 0.0) * _LOG2_E
    scale = scale * _LOG2_E if cap is None else scale / cap
    key_scales, value_scales = cache.key_scales, cache.value_scales
    branches, has_trees = step.branches, step.branches is not None
    _attention_kernel[(step.shape.num_rows * num_tiles, num_kv_heads, splits)](
        q, cache.keys, cache.values, cache.keys if key_scales is None else key_scales,
        cache.values if value_scales is None else value_scales, out, parts, stats,
        step.begins, step.lengths, step.contexts, step.tables, step.shape.table_width, num_tiles,
        scale, softcap, rotation.rope if rotation is not None else q,
        rotation.q_norm if rotation is not None and has_norm else q,
        rotation.k_norm if rotation is not None and has_norm else q, rotation.epsilon if rotation is not None else 0.0,
        step.positions, branches.masks if branches is not None else step.positions,
        branches.roots if branches is not None else step.begins,
        num_heads, num_kv_heads, dim, dim_block, page_tokens, tile_tokens, block_m,
        tiling.block_kv, splits, tiling.share, triton.next_power_of_2(longest) if rotation is not None else 0, has_norm,
        key_scales is not None, 32 * tiling.num_warps, dependent, cache.first, window, cap is not None, has_trees,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **options,
    )  # fmt: skip
    if splits > 1:
        _join_kernel[(num_tokens, num_heads)](
            parts, stats, out, step.positions, step.token_rows, step.begins, step.lengths, step.contexts,
            num_heads, dim, dim_block, tile_tokens, tiling.block_kv, splits, tiling.share,
            triton.next_power_of_2(splits), dependent, window, has_trees, num_warps=4, **options,
        )  # fmt: skip
    return out.view(num_tokens, num_heads * dim)

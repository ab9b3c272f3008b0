"""Finds the borders of top-k, top-p and min-p: filters drop all tokens that are less likely than the border.

The search covers a bounded number of candidates. Each row reports whether they suffice to equal the host's result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outpace.backends.torch.kernels.numerics import UNFUSED, powers_of_two

NUM_CANDIDATES = 256
_BLOCK = 64  # tokens per block; the search for candidates first compares block maxima
_RANKED = 32  # candidates compared with all others at a time
# Powers are accurate to 2e-7, so a smaller exponent gives a power that is larger by at most twice that.
_SURELY = tl.constexpr(1.000001)
_EXACT_SUMS = tl.constexpr(2.0**-29)  # float32 numbers from this to 1 have an exact float64 sum in any order


@triton.jit
def is_kept(values, ids, border, border_id):
    """Whether a token is not after the border in descending order of value; of equals, the lower id comes first."""
    return (values > border) | ((values == border) & (ids <= border_id))


@triton.jit
def _border_kernel(
    values_ptr, ids_ptr, sharpness_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    border_ptr, border_id_ptr, norm_ptr, is_exact_ptr, is_unfiltered_ptr, num_rows,
    VOCAB: tl.constexpr, NUM: tl.constexpr, BLOCK: tl.constexpr, RANKED: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """The border of top-k; with BY_MASS, of top-p and min-p. Candidates are sorted by logit, the largest first."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    sharpness = tl.load(sharpness_ptr + row).to(tl.float32)
    top = tl.load(values_ptr + row * NUM)
    ids = tl.load(ids_ptr + row * NUM + i, i < NUM, VOCAB)
    p = powers_of_two((tl.load(values_ptr + row * NUM + i, i < NUM, -float("inf")) - top) * sharpness)
    # Upper bound for all tokens that are not candidates.
    floor = powers_of_two((tl.load(values_ptr + row * NUM + NUM - 1) - top) * sharpness) * _SURELY
    if NUM == VOCAB:
        floor = floor * 0.0
    if BY_MASS:
        k_border, k_border_id, norm = tl.load(border_ptr + row), tl.load(border_id_ptr + row), tl.load(norm_ptr + row)
        p = tl.div_rn(tl.where(is_kept(p, ids, k_border, k_border_id), p, 0.0), norm)
        floor = tl.where(floor < k_border, 0.0, tl.div_rn(floor, norm) * _SURELY)
    rank = tl.zeros((BLOCK,), tl.int32)
    before = tl.zeros((BLOCK,), tl.float64)
    top_p = tl.load(top_p_ptr + row)
    cutoff = ((1.0 - top_p) / VOCAB).to(tl.float32)
    for at in range(0, BLOCK, RANKED):
        j = at + tl.arange(0, RANKED)
        other_id = tl.load(ids_ptr + row * NUM + j, j < NUM, VOCAB)
        other = powers_of_two((tl.load(values_ptr + row * NUM + j, j < NUM, -float("inf")) - top) * sharpness)
        if BY_MASS:
            other = tl.div_rn(tl.where(is_kept(other, other_id, k_border, k_border_id), other, 0.0), norm)
            other = tl.where(other >= cutoff, other, 0.0)
        is_before = (other[None, :] > p[:, None]) | (
            (other[None, :] == p[:, None]) & (other_id[None, :] < ids[:, None])
        )
        rank += tl.sum(is_before.to(tl.int32), axis=1)
        before += tl.sum(tl.where(is_before, other[None, :].to(tl.float64), 0.0), axis=1)
    if BY_MASS:
        by_p, min_p = top_p < 1.0, tl.load(min_p_ptr + row).to(tl.float32)
        by_min = min_p > 0.0
        kept = (p > 0.0) & ((by_p == 0) | ((p >= cutoff) & (before < top_p)))
        smallest = tl.max(p, axis=0) * min_p
        kept = kept & (p >= smallest)
        border = tl.min(tl.where(kept, p, 2.0), axis=0)
        border_id = tl.max(tl.where(kept & (p == border), ids, -1), axis=0)
        is_cut = by_p | by_min
        # Sure if every kept token is likelier than all non-candidates, or if no non-candidate can be kept.
        reached = tl.sum(tl.where(p >= cutoff, p.to(tl.float64), 0.0), axis=0) >= top_p
        p_is_sure = (reached & (border > floor)) | (floor < cutoff)
        sure = (by_p & p_is_sure & (border >= _EXACT_SUMS)) | (by_min & (floor < smallest) & (by_p == 0))
        at = num_rows + row
        tl.store(border_ptr + at, tl.where(is_cut, border, -1.0))
        tl.store(border_id_ptr + at, border_id)
        tl.store(is_unfiltered_ptr + row, (is_cut == 0).to(tl.int32))
        is_exact = tl.load(is_exact_ptr + row) != 0
        tl.store(is_exact_ptr + row, (is_exact & (sure | (is_cut == 0))).to(tl.int32))
    else:
        top_k = tl.load(top_k_ptr + row)
        by_k = (top_k > 0) & (top_k < VOCAB)
        is_border = rank == tl.minimum(top_k, BLOCK).to(tl.int32) - 1
        border = tl.max(tl.where(is_border, p, -1.0), axis=0)
        by_k = by_k & ((border > 0.0) | (top_k > NUM))  # at border 0, dropped tokens weigh nothing
        tl.store(border_ptr + row, tl.where(by_k, border, -1.0))
        tl.store(border_id_ptr + row, tl.max(tl.where(is_border, ids, -1), axis=0))
        tl.store(is_exact_ptr + row, ((by_k == 0) | ((border > floor) & (top_k <= NUM))).to(tl.int32))


def find_borders(
    values: Tensor,
    ids: Tensor,
    vocab_size: int,
    params: tuple[Tensor, Tensor, Tensor, Tensor],
    borders: Tensor,
    border_ids: Tensor,
    norms: Tensor,
    exact: Tensor,
    unfiltered: Tensor,
    *,
    by_mass: bool,
) -> None:
    """Find the borders of top-k; with `by_mass`, of top-p and min-p, which need the sums after top-k in `norms`.

    `values` and `ids` are the candidates; `params` is sharpness, top-k, top-p, min-p; the rest is output.
    """
    num_rows, num = values.shape
    block = triton.next_power_of_2(num)
    _border_kernel[(num_rows,)](
        values, ids, *params, borders, border_ids, norms, exact, unfiltered, num_rows, vocab_size, num, block,
        min(_RANKED, block), by_mass, num_warps=4, **UNFUSED,
    )  # fmt: skip


def candidates(logits: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """The largest logits of each row, the largest first, and their int32 indexes: [rows, num_candidates].

    The n largest lie in the n blocks with the largest maxima, so only the maxima and those blocks are searched.
    """
    num_blocks = logits.shape[1] // _BLOCK
    if num_blocks <= num_candidates:
        values, ids = logits.topk(num_candidates, dim=-1)
        return values, ids.int()
    whole = logits[:, : num_blocks * _BLOCK].view(-1, num_blocks, _BLOCK)
    rest = logits[:, num_blocks * _BLOCK :]
    block = whole.amax(dim=-1).topk(num_candidates, dim=-1, sorted=False).indices
    members = whole.gather(1, block[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    values, place = torch.cat([members, rest], dim=1).topk(num_candidates, dim=-1)
    block_of = block.gather(1, (place // _BLOCK).clamp(max=num_candidates - 1))
    in_rest = place >= members.shape[1]
    ids = torch.where(in_rest, place - members.shape[1] + num_blocks * _BLOCK, block_of * _BLOCK + place % _BLOCK)
    return values, ids.int()

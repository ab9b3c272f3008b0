"""`execution/following.follow` in one kernel: a program per row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from outpace.backends.torch.execution.step import StepInputs
from outpace.backends.torch.kernels.numerics import UNFUSED, noise_key
from outpace.decoding.randomness import Purpose

if TYPE_CHECKING:
    from outpace.backends.torch.execution.following import Verified

_DRAFT = tl.constexpr(int(Purpose.DRAFT))


@triton.jit(do_not_specialize=["num_rows", "drafted_stride", "row_stride", "most"])
def _follow_kernel(
    own_ptr, found_ptr, drafted_ptr, lines_ptr, tokens_ptr, positions_ptr, lengths_ptr, contexts_ptr, outputs_ptr,
    later_positions_ptr, later_contexts_ptr, seeds_ptr, draw_positions_ptr, fed_ptr, num_rows, drafted_stride,
    row_stride, most,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BY_REJECTION: tl.constexpr, IS_INDEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    count = tl.load(lines_ptr + num_rows + row)
    if count >= 0:
        j = tl.arange(0, BLOCK)
        drafted = tl.load(drafted_ptr + j * drafted_stride + row * row_stride, j < count, -1)
        if BY_REJECTION:
            accepted = tl.load(found_ptr + row * 3).to(tl.int32)
            last = tl.load(found_ptr + row * 3 + 1).to(tl.int32)
        else:
            own = tl.load(own_ptr + tl.load(lines_ptr + row) + j, j <= count, -2)
            accepted = tl.min(tl.where((own != drafted) | (j >= count), j, BLOCK), axis=0)
            last = tl.sum(tl.where(j == accepted, own, 0), axis=0)
        last = tl.minimum(tl.maximum(last, 0), most)
        token = tl.where(j < accepted, drafted, tl.where(j == accepted, last, 0))
        at, there = row * WIDTH + j, j < WIDTH
        start = tl.load(positions_ptr + row * WIDTH)
        end = start + accepted + 1
        tl.store(tokens_ptr + at, token, there)
        tl.store(positions_ptr + at, tl.where(j <= accepted, start + j, -1), there)
        tl.store(lengths_ptr + row, accepted + 1)
        tl.store(contexts_ptr + row, end)
        tl.store(outputs_ptr + row, row * WIDTH + accepted)
        tl.store(later_positions_ptr + row, end - 1)
        tl.store(later_contexts_ptr + row, end)
        tl.store(draw_positions_ptr + row, end.to(tl.int64))
        if IS_INDEPENDENT:
            seed = tl.load(seeds_ptr + row).to(tl.uint64, bitcast=True)
            drawn_with = noise_key(seed, _DRAFT, end.to(tl.int64).to(tl.uint64, bitcast=True))
            tl.store(seeds_ptr + row, drawn_with.to(tl.int64, bitcast=True))
        tl.store(fed_ptr + row, accepted)
        tl.store(fed_ptr + num_rows + row, last)


def follow(
    verified: Verified,
    lines: Tensor,
    first: StepInputs,
    later: StepInputs,
    draw_words: Tensor,
    fed: Tensor,
    is_independent: bool,
) -> None:
    width, num_rows = first.shape.max_row_tokens, fed.shape[1]
    found = verified.found if verified.found is not None else lines
    assert fed.is_contiguous() and lines.is_contiguous()
    _follow_kernel[(num_rows,)](
        verified.own, found, verified.drafted, lines, first.tokens, first.positions, first.lengths, first.contexts,
        first.outputs, later.positions, later.contexts, draw_words[0], draw_words[1], fed, num_rows,
        *verified.drafted.stride(), verified.vocab_size - 1, width, triton.next_power_of_2(width),
        verified.found is not None, is_independent, num_warps=1, **UNFUSED,
    )  # fmt: skip

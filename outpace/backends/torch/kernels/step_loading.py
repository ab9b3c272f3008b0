"""The first kernel of a captured step: copies the step's words from the host, so no separate copy is needed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from outpace.backends.torch.execution.step import StepInputs, split

_BLOCK = 256


@triton.jit(do_not_specialize=["num_rows", "depth", "most"])
def _load_kernel(
    host_ptr, words_ptr, drafted_ptr, num_rows, depth, most, NUM_WORDS: tl.constexpr, NUM_TOKENS: tl.constexpr,
    ROWS_AT: tl.constexpr, BEGINS_AT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < NUM_WORDS
    word = tl.load(host_ptr + i, there, 0, volatile=True)  # the host changes it between replays
    is_drafted = (i < NUM_TOKENS) & (word < 0)
    row = tl.load(host_ptr + ROWS_AT + i, is_drafted, 0, volatile=True)
    place = i - 1 - tl.load(host_ptr + BEGINS_AT + row, is_drafted, 0, volatile=True)
    is_there = is_drafted & (place >= 0) & (place < depth)  # others are leftovers of an earlier step, in gaps
    token = tl.minimum(tl.load(drafted_ptr + place * num_rows + row, is_there, 0), most)
    tl.store(words_ptr + i, tl.where(is_drafted, token, word), there)


def load_step(host: Tensor, step: StepInputs, drafted: Tensor, most: int) -> None:
    """`graphs.load_step` on a GPU; `host` is pinned memory."""
    depth, num_rows = drafted.shape
    (_, num_tokens), _, (rows_at, _), (begins_at, _), *_ = split(step.shape)
    num_words = step.shape.num_words
    _load_kernel[(triton.cdiv(num_words, _BLOCK),)](
        host, step.words, drafted, num_rows, depth, most, num_words, num_tokens, rows_at, begins_at, _BLOCK
    )

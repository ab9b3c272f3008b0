"""`model/taps.TapStore.places` in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outpace.backends.torch.execution.step import StepInputs

_BLOCK = 128


@triton.jit(do_not_specialize=["num_tokens", "table_width", "before", "unused"])
def _places_kernel(
    positions_ptr, token_rows_ptr, begins_ptr, lengths_ptr, contexts_ptr, tables_ptr, out_ptr, num_tokens, table_width,
    before, unused, PAGE: tl.constexpr, HAS_TREES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = token < num_tokens
    position, row = tl.load(positions_ptr + token, there, -1), tl.load(token_rows_ptr + token, there, 0)
    slot = position
    if HAS_TREES:
        known = tl.load(contexts_ptr + row) - tl.load(lengths_ptr + row) - tl.load(begins_ptr + row)
        slot = tl.where(position >= 0, known + token, -1)
    slot -= before
    at = tl.maximum(slot, 0)
    page = tl.load(tables_ptr + row * table_width + at // PAGE, there, 0).to(tl.int64)
    tl.store(out_ptr + token, tl.where(slot >= 0, page * PAGE + at % PAGE, unused), there)


def places(step: StepInputs, before: int, page_tokens: int, unused: int) -> Tensor:
    """`unused`: the place of tokens that have none."""
    num_tokens = len(step.tokens)
    out = torch.empty(num_tokens, dtype=torch.int64, device=step.tokens.device)
    _places_kernel[(triton.cdiv(num_tokens, _BLOCK),)](
        step.positions, step.token_rows, step.begins, step.lengths, step.contexts, step.tables, out, num_tokens,
        step.shape.table_width, before, unused, page_tokens, step.branches is not None, _BLOCK, num_warps=4,
    )  # fmt: skip
    return out

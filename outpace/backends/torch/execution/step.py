"""The inputs of one forward pass, as tensors on the device.

Tokens lie row after row. A row's place in them is (begin, length). Between rows there may be gaps, so that a captured
graph of a fixed size can run shorter rows: a token in a gap has position -1, writes nothing to the cache, and its
results are ignored. All inputs are one buffer of integers, so a step is one small transfer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PADDING = -1
DRAFTED = -1  # stands for a token that only the device knows so far
ALIGNMENT = 32  # words; Triton recompiles a kernel for pointers with another alignment


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step's tensors, and bounds from which kernels choose their grids."""

    num_tokens: int
    num_rows: int
    num_outputs: int
    max_row_tokens: int  # no row has more new tokens
    table_width: int  # pages a row's table can name
    is_packed: bool = False  # no gaps between rows; unused places come last
    gives_peaks: bool = False  # not logits but the largest one of each rank: see `parallel/peaks.py`
    has_trees: bool = False  # some rows may have branches

    @property
    def num_words(self) -> int:
        return split(self)[-1][1]


@dataclass(frozen=True, slots=True)
class Branches:
    """Which tokens of its own row a token attends to, where rows have trees of draft tokens.

    A row's places in the cache from its root on are nodes: a node attends to the one at place root + i if bit i of its
    mask is set, and to all tokens before the root. A token's place in the row sets its place in the cache, and its
    depth sets its position. Rows without nodes have their root after their last token; the mask of other tokens is 0.
    """

    masks: Tensor  # int32 [num_tokens]
    roots: Tensor  # int32 [num_rows]


@dataclass(slots=True)
class StepInputs:
    shape: StepShape
    tokens: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens], PADDING in gaps
    token_rows: Tensor  # [num_tokens], the row each token belongs to
    begins: Tensor  # [num_rows], first token
    lengths: Tensor  # [num_rows], new tokens
    contexts: Tensor  # [num_rows], tokens in the cache, the new ones included
    outputs: Tensor  # [num_outputs], tokens whose logits are requested
    tables: Tensor  # [num_rows, table_width], pages in order
    words: Tensor  # all of the above
    branches: Branches | None = None  # None: every token attends to all tokens up to itself

    def slots(self) -> Tensor:
        """Where the tokens lie in their rows, PADDING in gaps: their positions, unless they are nodes of a tree."""
        if self.branches is None:
            return self.positions
        rows = self.token_rows.long()
        before = (self.contexts - self.lengths - self.begins)[rows]
        places = before + torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        return torch.where(self.positions >= 0, places, PADDING)


@dataclass(frozen=True, slots=True)
class Advance:
    """A step of one token per row that drawing turns into the next step, which feeds the drawn tokens.

    `left`, int32 [rows]: tokens that each row still has to draw, this one included; after the last it feeds nothing.
    """

    step: StepInputs
    left: Tensor | None = None


def views(words: Tensor, shape: StepShape) -> StepInputs:
    """The tensors of a step inside a buffer of num_words integers."""
    tokens, positions, token_rows, begins, lengths, contexts, outputs, tables, masks, roots = (
        words[begin:end] for begin, end in split(shape)
    )
    tables = tables.view(shape.num_rows, shape.table_width)
    branches = Branches(masks, roots) if shape.has_trees else None
    return StepInputs(
        shape, tokens, positions, token_rows, begins, lengths, contexts, outputs, tables, words, branches
    )  # fmt: skip


class HostStep:
    """The same buffer on the host, filled by the runner; pinned if a GPU reads it."""

    def __init__(self, shape: StepShape, *, pinned: bool, buffer: Tensor | None = None) -> None:
        """`buffer`: zeros to use, if they are part of a larger buffer."""
        self.shape = shape
        if buffer is None:
            buffer = torch.zeros(shape.num_words, dtype=torch.int32, pin_memory=pinned)
        self.buffer = buffer
        self.layout: object | None = None  # of the last fill: see `staging.py`
        words: NDArray[np.int32] = self.buffer.numpy()
        parts = [words[begin:end] for begin, end in split(shape)]
        self.tokens, self.positions, self.token_rows, self.begins, self.lengths, self.contexts, self.outputs = parts[:7]
        self.tables = parts[7].reshape(shape.num_rows, shape.table_width)
        self.masks, self.roots = parts[8:]


def split(shape: StepShape) -> list[tuple[int, int]]:
    """Begin and end of each part of a step's words, in the order of `StepInputs`."""
    t, r = shape.num_tokens, shape.num_rows
    of_trees = (t, r) if shape.has_trees else (0, 0)
    at, parts = 0, []
    for size in (t, t, t, r, r, r, shape.num_outputs, r * shape.table_width, *of_trees):
        parts.append((at, at + size))
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return parts

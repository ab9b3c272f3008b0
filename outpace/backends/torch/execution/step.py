"""What one forward pass is told about its rows, as tensors on the device.

Tokens lie row after row. A row's place in them is (begin, length); between rows there may be gaps, which is how a
captured graph of a fixed size serves rows of other lengths: a token in a gap has position -1, writes nothing to the
cache, and its results are never looked at. All of it is one buffer of integers, so a step is one small transfer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PADDING = -1
DRAFTED = -1  # in the place of a token that the device knows and the host does not yet
ALIGNMENT = 32  # words; Triton compiles a kernel anew for pointers that are aligned otherwise


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step's tensors, and bounds that kernels choose their grids by."""

    num_tokens: int
    num_rows: int
    num_outputs: int
    max_row_tokens: int  # no row has more new tokens
    table_width: int  # pages a row's table can name
    is_packed: bool = False  # rows lie without gaps, and all room that is left is behind them

    @property
    def num_words(self) -> int:
        return split(self)[-1][1]


@dataclass(slots=True)
class StepInputs:
    shape: StepShape
    tokens: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens], PADDING in gaps
    token_rows: Tensor  # [num_tokens], the row each token belongs to
    begins: Tensor  # [num_rows], first token
    lengths: Tensor  # [num_rows], new tokens
    contexts: Tensor  # [num_rows], tokens in the cache once the new ones are
    outputs: Tensor  # [num_outputs], tokens whose logits are wanted
    tables: Tensor  # [num_rows, table_width], pages in order
    words: Tensor  # all of the above
    visible: Tensor | None = None
    """Which new tokens of its row each token attends to, itself included: bool [num_tokens, max_row_tokens]; None is
    all up to itself. With it, a row's new tokens may be a tree: a token's place in the cache is its place in the
    row, its position is its depth. The reference computes that; the Triton kernels do not yet, and refuse."""


@dataclass(frozen=True, slots=True)
class Advance:
    """A step of one token a row that drawing leaves as the next one, which feeds what was drawn.

    With `left`, int32 [rows], a row has so many tokens to say, this one included; after the last it feeds nothing.
    """

    step: StepInputs
    left: Tensor | None = None


def views(words: Tensor, shape: StepShape) -> StepInputs:
    """The tensors of a step inside a buffer of num_words integers."""
    tokens, positions, token_rows, begins, lengths, contexts, outputs, tables = (
        words[begin:end] for begin, end in split(shape)
    )
    tables = tables.view(shape.num_rows, shape.table_width)
    return StepInputs(shape, tokens, positions, token_rows, begins, lengths, contexts, outputs, tables, words)


class HostStep:
    """The same buffer on the host, filled by the runner; pinned where a GPU will read it."""

    def __init__(self, shape: StepShape, *, pinned: bool, buffer: Tensor | None = None) -> None:
        """`buffer`: zeros to use, where they are part of a larger one."""
        self.shape = shape
        if buffer is None:
            buffer = torch.zeros(shape.num_words, dtype=torch.int32, pin_memory=pinned)
        self.buffer = buffer
        self.layout: object | None = None  # of what it was last filled with: see `staging.py`
        words: NDArray[np.int32] = self.buffer.numpy()
        parts = [words[begin:end] for begin, end in split(shape)]
        self.tokens, self.positions, self.token_rows, self.begins, self.lengths, self.contexts, self.outputs = parts[:7]
        self.tables = parts[7].reshape(shape.num_rows, shape.table_width)


def split(shape: StepShape) -> list[tuple[int, int]]:
    """Where the parts of a step's words begin and end: those of `StepInputs`, in order."""
    t, r = shape.num_tokens, shape.num_rows
    at, parts = 0, []
    for size in (t, t, t, r, r, r, shape.num_outputs, r * shape.table_width):
        parts.append((at, at + size))
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return parts

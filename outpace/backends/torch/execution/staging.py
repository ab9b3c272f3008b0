"""Writes a plan's rows into the buffer of a step: all rows at once, and only what has changed.

The layout depends only on the number of tokens per row. These numbers repeat from step to step, so a layout is computed
once, and written once into each buffer that uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from outpace.backends.torch.execution.step import PADDING, HostStep
from outpace.core import Row

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The places of the rows' tokens in a step."""

    begins: Ints  # [rows], first token
    lengths: Ints  # [rows]
    rows: Ints  # [tokens], the row each belongs to
    offsets: Ints  # [tokens], place in that row
    places: Ints | slice  # [tokens], place in the step
    outputs: Ints  # places of the tokens whose logits are requested


@lru_cache(maxsize=64)
def layout_of(counts: tuple[int, ...], num_logits: tuple[int, ...], width: int | None) -> Layout:
    """The layout of rows of `counts` tokens. Each row takes `width` places; None: no gaps between rows."""
    lengths, indexes = np.array(counts), np.arange(len(counts))
    before = lengths.cumsum() - lengths  # tokens of earlier rows
    begins = before if width is None else indexes * width
    rows = indexes.repeat(lengths)
    offsets = np.arange(len(rows)) - before[rows]
    places = begins[rows] + offsets
    outputs = places[offsets >= (lengths - np.array(num_logits))[rows]]
    has_gaps = places[-1] >= len(places)
    return Layout(begins, lengths, rows, offsets, places if has_gaps else slice(0, len(places)), outputs)


def _fill_with_trees(host: HostStep, rows: Sequence[Row], layout: Layout, tables: NDArray[np.int32]) -> None:
    for i, row in enumerate(rows):
        begin, count = int(layout.begins[i]), len(row.tokens)
        places = slice(begin, begin + count)
        host.positions[places] = np.arange(row.start, row.start + count)
        host.contexts[i] = host.roots[i] = row.start + count
        host.masks[places] = 0
        if row.tree is not None:
            nodes = slice(begin + count - len(row.tree), begin + count)
            host.roots[i] -= len(row.tree)
            host.positions[nodes] = host.roots[i] - 1 + np.array(row.tree.depths)
            host.masks[nodes] = row.tree.masks
        host.tables[i] = tables[row.seq]


def fill(host: HostStep, rows: Sequence[Row], tables: NDArray[np.int32]) -> None:
    """Write rows into a step, which may be larger than they need; `tables` holds the pages of every sequence."""
    tokens = list(chain.from_iterable([row.tokens for row in rows]))
    has_gaps = host.shape.num_tokens > len(tokens) and not host.shape.is_packed
    width = host.shape.max_row_tokens if has_gaps else None
    layout = layout_of(tuple([len(row.tokens) for row in rows]), tuple([row.num_logits for row in rows]), width)
    used = slice(0, len(rows))
    if host.layout is not layout:
        host.layout = layout
        host.positions.fill(PADDING)
        host.lengths.fill(0)
        host.token_rows[layout.places] = layout.rows
        host.begins[used], host.lengths[used] = layout.begins, layout.lengths
        host.outputs[: len(layout.outputs)] = layout.outputs
    host.tokens[layout.places] = tokens
    if host.shape.has_trees:
        _fill_with_trees(host, rows, layout, tables)
        return
    if len(rows) == 1:
        [row] = rows
        host.positions[layout.places] = layout.offsets + row.start
        host.contexts[0] = row.start + len(tokens)
        host.tables[0] = tables[row.seq]
        return
    starts = np.array([row.start for row in rows])
    host.positions[layout.places] = starts[layout.rows] + layout.offsets
    host.contexts[used] = starts + layout.lengths
    tables.take([row.seq for row in rows], axis=0, out=host.tables[used], mode="clip")  # in place, without checks

"""Drafts a tree of fixed shape with a draft head, on the device: a pass per level, without the host between them.

The first pass takes what the last step emitted, as a chain's does. Each further pass takes the nodes of one level that
have children, as tokens of one row with a mask. Their entries lie after the text's in the head's cache, in the order of
these nodes; the next draft overwrites them, because accepted tokens are taken again with their true hidden states.

A loop may also begin before the host knows the tokens it feeds: see `tree_following.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.backends.base import DraftedTokens, DraftTask
from outpace.backends.torch.execution import staging
from outpace.backends.torch.execution.capturing import captured
from outpace.backends.torch.execution.drafting import Run
from outpace.backends.torch.execution.following import UNUSED, Verified, follow
from outpace.backends.torch.execution.graphs import ROW_BUCKETS, Graphs
from outpace.backends.torch.execution.step import PADDING, Branches, HostStep, StepInputs, StepShape, views
from outpace.backends.torch.execution.tree_following import Move, TreeTensors, as_chain
from outpace.backends.torch.model.head import HeadModel
from outpace.backends.torch.sampling.children import first_tokens
from outpace.backends.torch.sampling.draws import NUM_FIELDS, DrawWords
from outpace.core import Row
from outpace.decoding.tree import ROOT, Tree


@dataclass(frozen=True, slots=True)
class _Level:
    """The nodes of a level that have children: the pass over them gives the nodes of the next level."""

    expanded: tuple[int, ...]
    parents: list[int]  # of each: its place among the nodes that the level before expanded
    num_children: int  # most, of a node
    nodes: slice  # their children; nodes are numbered level by level
    picked: list[int]  # of each child: its place among [expanded, num_children]


def levels_of(tree: Tree) -> list[_Level]:
    assert list(tree.depths) == sorted(tree.depths), "nodes are numbered level by level"
    found, before = list[_Level](), tuple[int, ...]()
    for depth in range(tree.depth):
        of_level = [node for node, mine in enumerate(tree.depths) if mine == depth] if depth else [ROOT]
        expanded = tuple(node for node in of_level if tree.children(node))
        count = max(len(tree.children(node)) for node in expanded)
        picked = {
            child: place * count + rank
            for place, node in enumerate(expanded)
            for rank, child in enumerate(tree.children(node))
        }
        nodes = sorted(picked)
        parents = [before.index(tree.parents[node]) for node in expanded] if depth else [0]
        found.append(_Level(expanded, parents, count, slice(nodes[0], nodes[-1] + 1), [picked[each] for each in nodes]))
        before = expanded
    return found


class _HostWords:
    """The first pass's words and those of the draws, in one buffer; and where the tokens arrive."""

    def __init__(self, first: StepShape, num_nodes: int, *, pinned: bool) -> None:
        rows = first.num_rows
        num_words = first.num_words + 2 * NUM_FIELDS * rows + 2 * rows
        self.buffer = torch.zeros(num_words, dtype=torch.int32, pin_memory=pinned)
        step, draws, lines = split_words(self.buffer, first)
        self.lines: NDArray[np.int32] = lines.numpy()  # first lines and counts of what it follows
        self.lines[1].fill(UNUSED)
        self.first = HostStep(first, pinned=pinned, buffer=step)
        self.first.positions.fill(PADDING)
        self.draws = DrawWords(rows, pinned=pinned, buffer=draws)
        self.drawn = torch.zeros((num_nodes, rows), dtype=torch.int32, pin_memory=pinned)
        self.arrived: Any = torch.cuda.Event() if pinned else None
        self.fed = torch.zeros((2, rows), dtype=torch.int32, pin_memory=pinned)
        self.fed_arrived: Any = torch.cuda.Event() if pinned else None


def split_words(words: Tensor, first: StepShape) -> tuple[Tensor, Tensor, Tensor]:
    """The words of the first pass, of the draws, and of the lines that a loop follows."""
    draws_at, lines_at = first.num_words, first.num_words + 2 * NUM_FIELDS * first.num_rows
    draws = words[draws_at:lines_at].view(torch.int64).view(NUM_FIELDS, -1)
    return words[:draws_at], draws, words[lines_at:].view(2, -1)


@dataclass(frozen=True, slots=True)
class TreeRun(Run):
    _host: _HostWords
    loop: TreeLoop

    def tokens(self) -> Tensor:
        """[nodes, rows], on the device."""
        return self.columns(self.loop.drawn)

    def fetch(self, tasks: Sequence[DraftTask]) -> list[DraftedTokens]:
        """The drafts of the tasks; waits for them."""
        if self._host.arrived is not None:
            self._host.arrived.synchronize()
        columns = self._host.drawn.numpy()[:, self.rows].T.tolist()
        return [DraftedTokens(tokens, [], tree=self.loop.tree) for tokens in columns]


class TreeLoop:
    """Drafts one tree per row. All of it is one captured graph."""

    kept: Tensor | None = None  # trees are verified by `match`, which needs no distributions

    def __init__(
        self, model: HeadModel, tree: Tree, num_rows: int, width: int, graphs: Graphs, *, samples: bool, captures: bool
    ) -> None:
        """`width`: tokens per row of the first pass. Without `samples`, all requests are greedy."""
        self.tree, self._model, self._samples = tree, model, samples
        device = model.device
        first = StepShape(num_rows * width, num_rows, num_rows, width, graphs.table_width)
        one_each = StepShape(num_rows, num_rows, num_rows, 1, 1)
        # Two, because the loop may run again before the host has read what it drew.
        self._hosts = [_HostWords(first, len(tree), pinned=device.type == "cuda") for _ in range(2)]
        self._words = self._hosts[0].buffer.to(device)
        step, self._draws, self._lines = split_words(self._words, first)
        self._first = views(step, first)
        self.drawn = torch.zeros((len(tree), num_rows), dtype=torch.int32, device=device)
        self._fed = torch.zeros((2, num_rows), dtype=torch.int32, device=device)
        self._after = views(torch.zeros(one_each.num_words, dtype=torch.int32, device=device), one_each)
        self._tensors = TreeTensors.of(tree, device)
        self._num_used = 0  # rows, of the latest fill
        self._levels = levels_of(tree)
        numbers = {node: i for i, node in enumerate(node for level in self._levels[1:] for node in level.expanded)}
        self._steps = [self._step_of(level, numbers, device) for level in self._levels[1:]]
        # On the device already, so that a graph can be captured.
        self._picked = [torch.tensor(level.picked, device=device) for level in self._levels]
        self._expanded = [torch.tensor(level.expanded, device=device) for level in self._levels[1:]]
        self._graph: torch.cuda.CUDAGraph | None = None
        if captures:
            self._graph, _ = captured(self._run, graphs.pool, device)

    def _step_of(self, level: _Level, numbers: dict[int, int], device: torch.device) -> tuple[StepInputs, Tensor, int]:
        """The inputs of a level's pass, as far as they are the same in every draft; the places of its nodes' parents;
        and how many entries the tree has with it. `numbers`: the order of entries."""
        rows, each = self._first.shape.num_rows, len(level.expanded)
        shape = StepShape(rows * each, rows, rows * each, each, self._first.shape.table_width, has_trees=True)
        masks = [sum(1 << numbers[node] for node in self.tree.path(node)) for node in level.expanded]
        everything = torch.arange(rows * each, dtype=torch.int32, device=device)
        step = StepInputs(
            shape,
            tokens=torch.zeros_like(everything),
            positions=torch.zeros_like(everything),
            token_rows=everything // each,
            begins=everything[::each].contiguous(),
            lengths=torch.zeros_like(self._first.lengths),
            contexts=torch.zeros_like(self._first.contexts),
            outputs=everything,
            tables=self._first.tables,
            words=everything,
            branches=Branches(torch.tensor(masks, dtype=torch.int32, device=device).repeat(rows), self._first.contexts),
        )
        return step, torch.tensor(level.parents, device=device), 1 + max(numbers[node] for node in level.expanded)

    def fill(self, tasks: Sequence[DraftTask], tables: NDArray[np.int32]) -> None:
        """Pages for fed and drafted tokens are reserved; `tables` holds the pages of every sequence."""
        self._hosts.reverse()  # the device may still read the other one
        host, self._num_used = self._hosts[0], len(tasks)
        rows, requests = [task.row for task in tasks], [task.request for task in tasks]
        host.lines[1].fill(UNUSED)
        staging.fill(host.first, rows, tables)
        host.draws.fill(slice(0, len(rows)), requests, [row.start + len(row.tokens) for row in rows])

    def fill_following(self, tasks: Sequence[DraftTask], tables: NDArray[np.int32], verified: Verified) -> None:
        """The same, where the device will know which tokens are fed: those of the path that `verified` accepts."""
        width = self._first.shape.max_row_tokens
        assert width == self.tree.depth + 1
        rows = [Row(task.row.seq, len(task.request.tokens), [0] * width, 1) for task in tasks]
        self.fill([replace(task, row=row) for task, row in zip(tasks, rows, strict=True)], tables)
        self._hosts[0].lines[:, : len(tasks)] = verified.first_lines, [self.tree.depth] * len(tasks)

    @torch.inference_mode()
    def launch(self, verified: Verified | None = None, move: Move | None = None) -> TreeRun:
        """Start the filled loop; after `fill_following`, behind the verification whose result it follows. `move` moves
        tokens in the target's cache."""
        host = self._hosts[0]
        self._words.copy_(host.buffer, non_blocking=True)
        if verified is not None and move is not None:
            first, used = self._first, self._num_used
            roots = first.positions.view(len(first.begins), -1)[:used, 0]
            verified = as_chain(self._tensors, verified, self._lines[0, :used], roots, first.tables[:used], move)
            follow(verified, self._lines, first, self._after, self._draws, self._fed, is_independent=False)
            host.fed.copy_(self._fed, non_blocking=True)
            if host.fed_arrived is not None:
                host.fed_arrived.record()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._run()
        host.drawn.copy_(self.drawn, non_blocking=True)
        if host.arrived is not None:
            host.arrived.record()
        return TreeRun(host, list(range(self._num_used)), self)

    @torch.inference_mode()
    def _run(self) -> None:
        model, columns, rows = self._model, self._model.weights.ids, self._first.shape.num_rows
        # Drafted tokens lie after these places.
        is_used, ends = self._first.lengths > 0, self._first.contexts
        logits, states = model.forward(self._first, model.fuse(self._first))
        for number, level in enumerate(self._levels):
            found = first_tokens(logits, columns, self._draws, number, level.num_children, samples=self._samples)
            self.drawn[level.nodes] = found.view(rows, -1)[:, self._picked[number]].T
            if number + 1 == len(self._levels):
                break
            step, parents, num_entries = self._steps[number]
            step.tokens.view(rows, -1).copy_(self.drawn[self._expanded[number]].T)
            step.positions.view(rows, -1).copy_(
                torch.where(is_used, ends + number, PADDING)[:, None].expand(rows, len(parents))
            )
            torch.mul(is_used, len(parents), out=step.lengths)
            torch.add(ends, num_entries, out=step.contexts)
            states = states.view(rows, -1, states.shape[-1])[:, parents].flatten(0, 1)
            logits, states = model.forward(step, states)


class TreeLoops:
    """Loops by rows, tokens fed first, and whether they sample; captured on first use."""

    def __init__(self, model: HeadModel, graphs: Graphs) -> None:
        """Captured loops use the memory of `graphs` and count there."""
        self._model, self._graphs = model, graphs
        self._loops: dict[tuple[Tree, int, int, bool], TreeLoop] = {}

    def is_prepared(self, tree: Tree, tasks: Sequence[DraftTask], width: int) -> bool:
        """Whether `find` needs no new capture; always true without graphs."""
        return self._graphs.pool is None or (tree, *self._kind(tasks, width)) in self._loops

    def find(self, tree: Tree, tasks: Sequence[DraftTask], width: int) -> TreeLoop:
        rows, _, samples = kind = self._kind(tasks, width)
        if self._graphs.pool is None or rows < len(tasks):
            return TreeLoop(self._model, tree, len(tasks), width, self._graphs, samples=samples, captures=False)
        key = (tree, *kind)
        if key not in self._loops:
            self._loops[key] = TreeLoop(self._model, tree, rows, width, self._graphs, samples=samples, captures=True)
            self._graphs.captures.num += 1
        return self._loops[key]

    @staticmethod
    def _kind(tasks: Sequence[DraftTask], width: int) -> tuple[int, int, bool]:
        """Rows, 0 if there are more than captured loops have; tokens fed first; whether they sample."""
        rows = next((size for size in ROW_BUCKETS if size >= len(tasks)), 0)
        return rows, width, any(not task.request.params.is_greedy for task in tasks)

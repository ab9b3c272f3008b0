"""Plays decoding over known answers, with drafts of many shapes: chains, static trees and dynamic ones."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.trees_drafts import NEVER, Ranks

MAX_DEPTH = 8
NODES = (1, 2, 3, 4, 5, 6, 7, 9, 11, 15, 23, 31, 47, 63)  # beside the token that the target emitted last
MAX_RANK = 16  # of a static tree's nodes among their siblings

Kind = Literal["chain", "static", "dynamic"]
Node = tuple[int, ...]  # the ranks on the path to it


@dataclass(frozen=True, slots=True)
class Answer:
    """What the head makes of one greedy answer."""

    category: str
    true_ranks: Ranks  # [entries, depth]
    tree_ranks: Mapping[int, Ranks]  # by width: [entries, depth, depth]
    engine_steps: int  # in which the engine decoded it, with chains of a fixed depth

    @property
    def num_entries(self) -> int:
        return len(self.true_ranks)


@dataclass(frozen=True, slots=True)
class Played:
    """One shape of drafts, played over all answers."""

    kind: Kind
    depth: int
    nodes: int
    width: int  # of a dynamic tree's beam
    rows: tuple[float, ...]  # that the head computes for a request, level by level
    tokens: NDArray[np.int64]  # by answer
    steps: NDArray[np.int64]

    @property
    def name(self) -> str:
        beam = f", width {self.width}" if self.kind == "dynamic" else ""
        return f"{self.kind}, depth {self.depth}" + (f", {self.nodes} nodes{beam}" if self.kind != "chain" else "")

    def rate(self, chosen: NDArray[np.int64] | slice = slice(None)) -> float:
        """Tokens a step over the chosen answers."""
        return float(self.tokens[chosen].sum() / self.steps[chosen].sum())


def num_steps(hits: NDArray[np.int64]) -> int:
    """Steps over an answer in which a draft from each entry has so many tokens accepted."""
    at = count = 0
    values = hits.tolist()
    while at < len(values):
        at += values[at] + 1
        count += 1
    return count


def play(
    answers: Sequence[Answer], kind: Kind, depth: int, nodes: int, width: int, rows: Sequence[float],
    hits: Sequence[NDArray[np.int64]],
) -> Played:  # fmt: skip
    """The tokens are those after an answer's first one, which comes with the prompt."""
    tokens = np.array([each.num_entries for each in answers])
    return Played(kind, depth, nodes, width, tuple(rows), tokens, np.array([num_steps(each) for each in hits]))


def leading(hit: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How many are true before the first false one, along the last axis."""
    counts: NDArray[np.int64] = np.cumprod(hit, axis=-1, dtype=np.int64).sum(-1)
    return counts


def chains(answers: Sequence[Answer]) -> Iterator[Played]:
    for depth in range(1, MAX_DEPTH + 1):
        hits = [leading(each.true_ranks[:, :depth] == 0) for each in answers]
        yield play(answers, "chain", depth, depth, 1, [1.0] * depth, hits)


def dynamic_trees(answers: Sequence[Answer]) -> Iterator[Played]:
    """The true node of a level is kept if fewer nodes than the budget are likelier; then its ancestors are, too."""
    for width in answers[0].tree_ranks:
        for depth in range(1, MAX_DEPTH + 1):
            for nodes in (n for n in NODES if depth <= n <= width + (depth - 1) * width**2):
                hits = [leading(each.tree_ranks[width][:, :depth, depth - 1] < nodes) for each in answers]
                rows = [1.0] + [float(width)] * (depth - 1)
                yield play(answers, "dynamic", depth, nodes, width, rows, hits)


def static_trees(answers: Sequence[Answer]) -> Iterator[Played]:
    halves = [answers[1::2] or answers, answers[::2]]  # what the tree of an even and of an odd answer is fitted to
    rates = [rank_rates(half) for half in halves]
    for depth in range(1, MAX_DEPTH + 1):
        for nodes in (n for n in NODES if n >= depth):
            trees = [likely_nodes(each, depth, nodes) for each in rates]
            hits = [num_followed(trees[i % 2], each.true_ranks) for i, each in enumerate(answers)]
            rows = np.mean([num_expanded(tree, depth) for tree in trees], axis=0).tolist()
            yield play(answers, "static", depth, nodes, 0, rows, hits)


def rank_rates(answers: Sequence[Answer]) -> NDArray[np.float64]:
    """[depth, MAX_RANK]: how often the true token has a rank, after true tokens that the head knows."""
    ranks = np.concatenate([each.true_ranks for each in answers])
    found = np.zeros((MAX_DEPTH, MAX_RANK))
    for depth in range(MAX_DEPTH):
        reached = ranks[:, depth] if depth == 0 else ranks[ranks[:, depth - 1] != NEVER, depth]
        found[depth] = np.bincount(np.minimum(reached, MAX_RANK), minlength=MAX_RANK + 1)[:MAX_RANK]
        found[depth] /= max(len(reached), 1)
    return found


def likely_nodes(rates: NDArray[np.float64], depth: int, count: int) -> set[Node]:
    """The nodes that are accepted most often, as if levels were independent; each after its parent and the
    sibling before it."""
    waiting: list[tuple[float, Node]] = [(-rates[0, 0], (0,))]
    found: set[Node] = set()
    while waiting and len(found) < count:
        chance, path = heapq.heappop(waiting)
        found.add(path)
        level, rank = len(path) - 1, path[-1]
        if rank + 1 < MAX_RANK and rates[level, rank] > 0:
            heapq.heappush(waiting, (chance / rates[level, rank] * rates[level, rank + 1], (*path[:-1], rank + 1)))
        if len(path) < depth:
            heapq.heappush(waiting, (chance * rates[level + 1, 0], (*path, 0)))
    return found


def num_expanded(tree: set[Node], depth: int) -> list[float]:
    """How many nodes of each level have children, from the token before the draft on."""
    inner = {path[:-1] for path in tree}
    return [float(sum(len(path) == level for path in inner)) for level in range(depth)]


def num_followed(tree: set[Node], true_ranks: Ranks) -> NDArray[np.int64]:
    """How far the true tokens of each entry lie in the tree."""
    longest = max(map(len, tree))
    paths = [tuple(row[:longest]) for row in true_ranks.tolist()]
    return np.array([next((n for n in range(longest) if path[: n + 1] not in tree), longest) for path in paths])

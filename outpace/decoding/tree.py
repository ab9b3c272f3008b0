"""The shape of a draft that guesses several tokens after a token: a step goes on where the first guess is wrong.

Nodes are numbered; a parent comes before its children, and siblings are in the order in which they were guessed. The
node before all others is the token after which the draft begins: it has the number -1. A chain is a tree, too.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from outpace.core import MeasuredAcceptance

ROOT = -1
MAX_NODES = 31  # a node's ancestors are bits of an int32
_USUAL_CHANCE = 0.6  # of a first guess, where nothing was measured


@dataclass(frozen=True)
class Tree:
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        assert all(ROOT <= parent < node for node, parent in enumerate(self.parents)), "a parent comes first"
        assert 0 < len(self.parents) <= MAX_NODES

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of each node: how many draft tokens lead to it, itself included."""
        return tuple(len(self.path(node)) for node in range(len(self)))

    @cached_property
    def depth(self) -> int:
        """Of the deepest node."""
        return max(self.depths)

    @cached_property
    def masks(self) -> tuple[int, ...]:
        """Of each node: bit i is set if node i is an ancestor, or the node itself."""
        return tuple(sum(1 << each for each in self.path(node)) for node in range(len(self)))

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes that lead to a node, itself included; none for the root."""
        return () if node == ROOT else (*self.path(self.parents[node]), node)

    def children(self, node: int) -> tuple[int, ...]:
        return tuple(child for child, parent in enumerate(self.parents) if parent == node)

    def continued(self, path: Sequence[int]) -> tuple[int, ...]:
        """A path from the root, continued by first guesses as far as the tree goes."""
        found = list(path)
        while children := self.children(found[-1] if found else ROOT):
            found.append(children[0])
        return tuple(found)


def likely_tree(chances: Sequence[float], num_nodes: int) -> Tree:
    """The nodes that are likeliest to be accepted, level by level, as deep as there are chances.

    `chances[i]` is the chance of the first guess of level i after a right one. Every further guess is taken to be
    right as often, where all before it were wrong; and what a node's siblings are is taken not to matter below it.
    """
    found: list[tuple[int, ...]] = []  # ranks on the path to each node
    waiting: list[tuple[float, tuple[int, ...]]] = [(-chances[0], (0,))]
    while len(found) < num_nodes:
        chance, ranks = heapq.heappop(waiting)
        found.append(ranks)
        level = len(ranks) - 1
        heapq.heappush(waiting, (chance * (1.0 - chances[level]), (*ranks[:-1], ranks[-1] + 1)))
        if len(ranks) < len(chances):
            heapq.heappush(waiting, (chance * chances[level + 1], (*ranks, 0)))
    found.sort(key=lambda ranks: (len(ranks), ranks))  # level by level
    numbers = {ranks: number for number, ranks in enumerate(found)} | {(): ROOT}
    return Tree(tuple(numbers[ranks[:-1]] for ranks in found))


def level_chances(tree: Tree, chances: Sequence[float]) -> list[float]:
    """The chance that a level has an accepted node if the one before has: by the same assumptions."""
    reached, of_levels = [0.0] * len(tree), [0.0] * tree.depth
    for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True)):
        rank, first = tree.children(parent).index(node), chances[depth - 1]
        reached[node] = (1.0 if parent == ROOT else reached[parent]) * first * (1.0 - first) ** rank
        of_levels[depth - 1] += reached[node]
    return [mine / before for mine, before in zip(of_levels, [1.0, *of_levels], strict=False)]


def usual_chances(measured: MeasuredAcceptance | None, depth: int) -> list[float]:
    """Of first guesses, level by level: the mean of greedy and sampled ones that a proposer measured."""
    if measured is None or not measured.greedy or not measured.sampled:
        return [_USUAL_CHANCE] * depth
    means = [sum(pair) / 2 for pair in zip(measured.greedy, measured.sampled, strict=False)]
    return [means[min(level, len(means) - 1)] for level in range(depth)]

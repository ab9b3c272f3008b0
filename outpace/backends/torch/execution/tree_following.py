"""`following.py` for trees: what the device needs to draft the next tree behind the verification of one.

The accepted path is found where the target's tokens are, moved in the cache, and given to the next draft as the tokens
of a chain, all of which were accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.backends.torch.execution.following import Verified
from outpace.backends.torch.execution.pages import PAGE_TOKENS
from outpace.decoding.tree import Tree


@dataclass(frozen=True, slots=True)
class TreeTensors:
    """A tree on the device, in int32 by node."""

    tree: Tree
    rows_before: Tensor  # of a case's rows, the one after each node's parent
    masks: Tensor  # the nodes that lead to each, itself included
    depths: Tensor

    @classmethod
    def of(cls, tree: Tree, device: torch.device) -> TreeTensors:
        of_parents, masks, depths = (
            torch.tensor(each, dtype=torch.int32, device=device) for each in (tree.parents, tree.masks, tree.depths)
        )
        return cls(tree, of_parents + 1, masks, depths)


@dataclass(frozen=True, slots=True)
class AcceptedPaths:
    drafted: Tensor  # int32 [depth, rows]: the tokens of the nodes that were accepted, and others after them
    found: Tensor  # int64 [rows, 3], as of a `RejectionPass`: how many were accepted, and the target's token after them
    moves: Tensor  # int64 [4, rows * depth]: see `Move`


# The pages and slots in them of tokens before and after: what `TorchRunner.move` takes.
Move = Callable[[Tensor, Tensor, Tensor, Tensor], None]


def accepted_paths(
    tensors: TreeTensors, verified: Verified, first_lines: Tensor, roots: Tensor, tables: Tensor
) -> AcceptedPaths:
    """What was accepted of `verified` trees, and where it lies in the cache and belongs there.

    By row, on the device: `first_lines` of the target's tokens, the places `roots` of the first nodes, and `tables`,
    the pages. Of the nodes after a path that ends early, none moves.
    """
    if roots.is_cuda:
        from outpace.backends.torch.kernels import following_trees

        return following_trees.accepted_paths(tensors, verified, first_lines, roots, tables)
    drafted, own, first_lines = verified.drafted.T[: len(roots)].long(), verified.own[0].long(), first_lines.long()
    is_right = drafted == own[first_lines[:, None] + tensors.rows_before]
    wrong = (~is_right << torch.arange(len(tensors.tree))).sum(1)
    on_path = (tensors.masks & wrong[:, None]) == 0  # siblings differ, so there is one path
    count = (on_path * tensors.depths).amax(1).long()
    levels = torch.arange(tensors.tree.depth)
    path = (on_path[:, None] & (tensors.depths == levels[:, None] + 1)).int().argmax(-1)
    last_row = torch.where(count > 0, path.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0] + 1, 0)
    found = torch.stack([count, own[first_lines + last_row], torch.ones_like(count)], 1)
    after = roots.long()[:, None] + levels
    before = torch.where(levels < count[:, None], roots.long()[:, None] + path, after)
    moves = [part.flatten() for each in (before, after) for part in
             (tables.gather(1, each // PAGE_TOKENS).long(), each % PAGE_TOKENS)]  # fmt: skip
    return AcceptedPaths(drafted.gather(1, path).T.int(), found, torch.stack(moves))


def as_chain(
    tensors: TreeTensors, verified: Verified, first_lines: Tensor, roots: Tensor, tables: Tensor, move: Move
) -> Verified:
    """Move the accepted paths of `verified` trees in the cache; returns them as chains that were verified."""
    paths = accepted_paths(tensors, verified, first_lines, roots, tables)
    move(*paths.moves)
    return replace(verified, drafted=paths.drafted, found=paths.found)

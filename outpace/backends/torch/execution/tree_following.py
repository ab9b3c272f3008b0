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
from outpace.decoding.tree import Tree


@dataclass(frozen=True, slots=True)
class TreeTensors:
    """A tree on the device."""

    tree: Tree
    rows_before: Tensor  # [nodes]: of a case's rows, the one after each node's parent
    is_ancestor: Tensor  # bool [nodes, nodes]: which nodes lead to each, itself included
    depths: Tensor  # [nodes]
    levels: Tensor  # [depth]: 1, 2, ...

    @classmethod
    def of(cls, tree: Tree, device: torch.device) -> TreeTensors:
        nodes = range(len(tree))
        return cls(
            tree,
            torch.tensor(tree.parents, device=device) + 1,
            torch.tensor([[bool(mask >> node & 1) for node in nodes] for mask in tree.masks], device=device),
            torch.tensor(tree.depths, device=device),
            torch.arange(1, tree.depth + 1, device=device),
        )

    def accepted(self, drafted: Tensor, own: Tensor, first_lines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """By row: the accepted node of each level [rows, depth], where there is one; how many there are; and the
        target's token after them. `drafted` [rows, nodes]; `own` [lines], with each row's lines from its first on."""
        is_right = drafted == own[first_lines[:, None] + self.rows_before]
        on_path = (is_right[:, None] | ~self.is_ancestor).all(-1)  # siblings differ, so there is one path
        count = (on_path * self.depths).amax(1)
        path = (on_path[:, None] & (self.depths == self.levels[:, None])).int().argmax(-1)
        last_row = torch.where(count > 0, path.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0] + 1, 0)
        return path, count, own[first_lines + last_row]


# Tables, and the places of tokens before and after, both [rows, tokens].
Move = Callable[[Tensor, Tensor, Tensor], None]


def as_chain(tensors: TreeTensors, verified: Verified, first_lines: Tensor, roots: Tensor, tables: Tensor, move: Move) \
        -> Verified:  # fmt: skip
    """Move the accepted paths of `verified` trees in the cache; returns them as chains that were verified.

    By row, on the device: `first_lines`, the places `roots` of the first nodes, and `tables`, the pages.
    """
    drafted, own = verified.drafted.T.long(), verified.own[0].long()
    path, count, last = tensors.accepted(drafted, own, first_lines.long())
    places = roots.long()[:, None] + tensors.levels - 1
    # What lies after the path stays where it is.
    move(tables, torch.where(tensors.levels <= count[:, None], roots.long()[:, None] + path, places), places)
    found = torch.stack([count, last, torch.ones_like(count)], 1)
    return replace(verified, drafted=drafted.gather(1, path).T.int().contiguous(), found=found)

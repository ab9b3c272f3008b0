"""What the device must find of verified trees, compared with what the host accepts of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from outpace.backends.torch.execution.following import Verified
from outpace.backends.torch.execution.pages import PAGE_TOKENS
from outpace.backends.torch.execution.tree_following import AcceptedPaths, TreeTensors
from outpace.decoding.acceptance import match_known_tree
from outpace.decoding.tree import ROOT, likely_tree

TREE = likely_tree([0.6] * 4, 15)
ROOTS = [40, 62, 7, 31]  # one of them before the end of a page


def check_accepted_paths(accepted_paths: Callable[..., AcceptedPaths], seed: int) -> None:
    random = np.random.default_rng(seed)
    num_rows, num_lines = len(ROOTS), 1 + len(TREE)
    drafted, own = np.zeros((num_rows, len(TREE)), np.int32), random.integers(0, 6, (2, num_rows * num_lines))
    for row in drafted:
        for node in (ROOT, *range(len(TREE))):
            row[list(TREE.children(node))] = random.permutation(8)[: len(TREE.children(node))]
    tables = torch.from_numpy(random.permutation(12).reshape(4, 3).astype(np.int32))
    lines = torch.arange(0, num_rows * num_lines, num_lines, dtype=torch.int32)
    roots = torch.tensor(ROOTS, dtype=torch.int32).repeat_interleave(2)[::2]  # with gaps, as in a step's words
    for rows in (range(num_rows), range(1)):  # one row has strides of its own
        count = len(rows)
        of_rows = torch.from_numpy(drafted[:count]).T
        verified = Verified([], [], of_rows, torch.from_numpy(own.astype(np.int32)), None, 8)
        trees = TreeTensors.of(TREE, torch.device("cpu"))
        paths = accepted_paths(trees, verified, lines[:count], roots[:count], tables[:count])
        pages, slots, to_pages, to_slots = paths.moves.view(4, count, TREE.depth).tolist()
        for i in rows:
            mine = own[0, i * num_lines : (i + 1) * num_lines].tolist()
            verdict = match_known_tree(drafted[i].tolist(), TREE, mine)
            places = [*verdict.path, *range(verdict.num_accepted, TREE.depth)]
            assert paths.found[i].tolist() == [verdict.num_accepted, verdict.tokens[-1], 1]
            assert paths.drafted[: verdict.num_accepted, i].tolist() == verdict.tokens[:-1]
            table = tables[i].tolist()
            for level, place in enumerate(places):
                before, after = ROOTS[i] + place, ROOTS[i] + level
                assert (pages[i][level], slots[i][level]) == (table[before // PAGE_TOKENS], before % PAGE_TOKENS)
                assert (to_pages[i][level], to_slots[i][level]) == (table[after // PAGE_TOKENS], after % PAGE_TOKENS)

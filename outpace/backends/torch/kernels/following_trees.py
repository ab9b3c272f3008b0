"""`execution/tree_following.accepted_paths` in one kernel: a program per row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from outpace.backends.torch.execution.pages import PAGE_TOKENS

if TYPE_CHECKING:
    from outpace.backends.torch.execution.following import Verified
    from outpace.backends.torch.execution.tree_following import AcceptedPaths, TreeTensors


@triton.jit(do_not_specialize=["drafted_stride", "row_stride", "root_stride", "table_stride"])
def _paths_kernel(
    own_ptr, drafted_ptr, lines_ptr, roots_ptr, tables_ptr, rows_before_ptr, masks_ptr, depths_ptr, chain_ptr,
    found_ptr, moves_ptr, drafted_stride, row_stride, root_stride, table_stride,
    NUM_NODES: tl.constexpr, NODES: tl.constexpr, DEPTH: tl.constexpr, LEVELS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    node, level = tl.arange(0, NODES), tl.arange(0, LEVELS)
    there = node < NUM_NODES
    own = own_ptr + tl.load(lines_ptr + row)
    drafted = drafted_ptr + row * row_stride
    token = tl.load(drafted + node * drafted_stride, there, -1)
    right = tl.load(own + tl.load(rows_before_ptr + node, there, 0), there, -1)
    wrong = tl.sum(tl.where(token != right, 1 << node, 0), axis=0)
    depth = tl.load(depths_ptr + node, there, 0)
    on_path = there & ((tl.load(masks_ptr + node, there, 0) & wrong) == 0)
    count = tl.max(tl.where(on_path, depth, 0), axis=0)
    of_level = on_path[None, :] & (depth[None, :] == level[:, None] + 1)
    path = tl.sum(tl.where(of_level, node[None, :], 0), axis=1)
    last_row = tl.max(tl.where(on_path & (depth == count), node + 1, 0), axis=0)
    tl.store(found_ptr + row * 3, count.to(tl.int64))
    tl.store(found_ptr + row * 3 + 1, tl.load(own + last_row).to(tl.int64))
    tl.store(found_ptr + row * 3 + 2, tl.full((), 1, tl.int64))
    is_level = level < DEPTH
    tl.store(chain_ptr + level * num_rows + row, tl.load(drafted + path * drafted_stride, is_level, 0), is_level)
    root = tl.load(roots_ptr + row * root_stride)
    after = root + level
    before = tl.where(level < count, root + path, after)
    table, of_kind = tables_ptr + row * table_stride, num_rows * DEPTH
    at = moves_ptr + row * DEPTH + level
    tl.store(at, tl.load(table + before // PAGE, is_level, 0).to(tl.int64), is_level)
    tl.store(at + of_kind, (before % PAGE).to(tl.int64), is_level)
    tl.store(at + 2 * of_kind, tl.load(table + after // PAGE, is_level, 0).to(tl.int64), is_level)
    tl.store(at + 3 * of_kind, (after % PAGE).to(tl.int64), is_level)


def accepted_paths(
    tensors: TreeTensors, verified: Verified, first_lines: Tensor, roots: Tensor, tables: Tensor
) -> AcceptedPaths:
    from outpace.backends.torch.execution.tree_following import AcceptedPaths

    num_rows, depth, device = len(roots), tensors.tree.depth, roots.device
    assert first_lines.stride(0) == 1 and tables.stride(1) == 1
    paths = AcceptedPaths(
        torch.empty((depth, num_rows), dtype=torch.int32, device=device),
        torch.empty((num_rows, 3), dtype=torch.int64, device=device),
        torch.empty((4, num_rows * depth), dtype=torch.int64, device=device),
    )
    _paths_kernel[(num_rows,)](
        verified.own, verified.drafted, first_lines, roots, tables, tensors.rows_before, tensors.masks, tensors.depths,
        paths.drafted, paths.found, paths.moves, *verified.drafted.stride(), roots.stride(0), tables.stride(0),
        len(tensors.tree), triton.next_power_of_2(len(tensors.tree)), depth, triton.next_power_of_2(depth),
        PAGE_TOKENS, num_warps=1,
    )  # fmt: skip
    return paths

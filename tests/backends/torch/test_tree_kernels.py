"""Compares what the Triton kernels do with trees with the torch functions, in Triton's interpreter, without a GPU."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")
pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot be interpreted")

import torch

from outpace.backends.torch.execution.step import PADDING, HostStep, StepInputs, StepShape, views
from outpace.backends.torch.kernels.base import LLAMA, Cache, Scores
from outpace.backends.torch.kernels.reference import ReferenceOps
from outpace.backends.torch.model.taps import TapStore
from outpace.backends.torch.sampling.children import first_tokens
from outpace.backends.torch.sampling.draws import DrawWords
from outpace.decoding.tree import ROOT, Tree, likely_tree
from tests.backends.torch.test_kernels import check, interpreter_works, normal, rounded_pages
from tests.backends.torch.tree_paths import check_accepted_paths
from tests.tiny_head import request_of

REFERENCE = ReferenceOps()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the subprocess that interprets Triton")
SMALL = Tree((ROOT, ROOT, 0, 0, 2))
LARGE = likely_tree([0.6] * 4, 15)


@pytest.mark.skipif(INTERPRETED, reason="already in the subprocess")
@pytest.mark.skipif(not interpreter_works(), reason="this NumPy is too new for Triton's interpreter")
def test_kernels_of_trees_equal_their_references_in_the_interpreter() -> None:
    """Triton chooses its interpreter at import, so these tests run in a separate process."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-x", "-W", "ignore::DeprecationWarning", __file__]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert found.returncode == 0, found.stdout[-4000:]
    assert " passed" in found.stdout


# Of a row: tokens in the cache, then the new ones that are no nodes; its tree, and how many of its nodes are cached.
TreeRow = tuple[int, int, Tree | None, int]
ROWS: dict[str, list[TreeRow]] = {
    "short": [(36, 1, SMALL, 0), (20, 1, None, 0), (9, 3, None, 0), (0, 2, SMALL, 0)],
    "as deep as a head's": [(40, 0, SMALL, 2), (33, 0, SMALL, 4), (7, 1, None, 0)],
    "as wide as may be": [(58, 1, LARGE, 0), (70, 1, LARGE, 0), (30, 1, None, 0)],
    "beside a prompt": [(20, 40, None, 0), (45, 1, SMALL, 0)],
}


def tree_step(rows: list[TreeRow], page_tokens: int, num_pages: int, *, gap: int) -> StepInputs:
    """On random pages, with unused tokens after each row."""
    lengths = [leads + (len(tree) - num_cached if tree is not None else 0) for _, leads, tree, num_cached in rows]
    contexts = [known + length for (known, *_), length in zip(rows, lengths, strict=True)]
    num_tokens, width = sum(lengths) + gap * len(rows), max(contexts) // page_tokens + 1
    shape = StepShape(num_tokens, len(rows), num_tokens, max(lengths), width, has_trees=True)
    host = HostStep(shape, pinned=False)
    host.positions.fill(PADDING)
    host.masks.fill(0b1011)  # leftovers in gaps
    free, at = random.sample(range(num_pages), num_pages), 0
    for i, (known, leads, tree, num_cached) in enumerate(rows):
        length, context = lengths[i], contexts[i]
        host.begins[i], host.lengths[i], host.contexts[i], host.roots[i] = at, length, context, context
        host.positions[at : at + length] = range(known, context)
        host.masks[at : at + length] = 0
        host.token_rows[at : at + length + gap] = i
        if tree is not None:
            root = host.roots[i] = known + leads - num_cached
            nodes = slice(at + leads, at + length)
            host.positions[nodes] = [root - 1 + depth for depth in tree.depths[num_cached:]]
            host.masks[nodes] = tree.masks[num_cached:]
        for j in range(-(-context // page_tokens)):
            host.tables[i, j] = free.pop()
        at += length + gap
    return views(host.buffer, host.shape)


@needs_interpreter
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("scores", [LLAMA, Scores(0.2, 3.0, 9), Scores(window=37)], ids=["full", "9", "37"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [(4, 2, 64), (9, 3, 16), (8, 1, 48)])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_attention(
    rows: list[TreeRow], num_heads: int, num_kv_heads: int, dim: int, scores: Scores, num_splits: int
) -> None:
    """Rotation, the write into the cache and attention: in one kernel for short rows, in two for others."""
    from outpace.backends.torch.kernels.attention import Tiling, attend
    from outpace.backends.torch.kernels.rotation import Rotation

    if scores.window is not None and any(num_cached for *_, num_cached in rows):
        pytest.skip("only heads attend to nodes of earlier passes, and they have no windows")
    random.seed(dim)
    torch.manual_seed(dim)
    step = tree_step(rows, 16, 24, gap=2)
    qkv = normal(step.shape.num_tokens, (num_heads + 2 * num_kv_heads) * dim)
    rope, q_norm, k_norm = normal(128, dim), normal(dim), normal(dim)
    keys, values = normal(24, num_kv_heads, 16, dim), normal(24, num_kv_heads, 16, dim)
    caches = [Cache(keys.clone(), values.clone()) for _ in range(2)]
    tiling = Tiling(num_splits, 32, num_warps=4, share=16)
    found = attend(qkv, caches[0], step, Rotation(rope, q_norm, k_norm, 1e-5), 4, tiling=tiling, scores=scores)
    expected = REFERENCE.attend(qkv, caches[1], step, rope, q_norm, k_norm, 1e-5, scores)
    real = step.positions >= 0
    check(found[real], expected[real])
    check(caches[0].keys, caches[1].keys)
    assert torch.equal(caches[0].values, caches[1].values)


@needs_interpreter
@pytest.mark.parametrize("rows", [ROWS["short"], ROWS["as wide as may be"]], ids=["short", "wide"])
def test_attention_over_a_cache_of_8_bits(rows: list[TreeRow]) -> None:
    from outpace.backends.torch.kernels.attention import Tiling, attend
    from outpace.backends.torch.kernels.rotation import Rotation

    random.seed(0)
    torch.manual_seed(0)
    step = tree_step(rows, 16, 12, gap=2) if len(rows) > 3 else tree_step(rows[1:], 16, 12, gap=0)
    qkv, rope, q_norm, k_norm = normal(step.shape.num_tokens, 8 * 64), normal(128, 64), normal(64), normal(64)
    found_pages = rounded_pages(2, 64, torch.int8)
    pages, tiling = deepcopy(found_pages), Tiling(2, 32, num_warps=4, share=16)
    found = attend(qkv, found_pages.caches[0], step, Rotation(rope, q_norm, k_norm, 1e-5), 4, tiling=tiling)
    expected = REFERENCE.attend(qkv, pages.caches[0], step, rope, q_norm, k_norm, 1e-5)
    assert found_pages.scales is not None and pages.scales is not None
    assert torch.allclose(found_pages.scales, pages.scales, rtol=1e-6)
    assert (found_pages.numbers != pages.numbers).float().mean() < 1e-4
    real = step.positions >= 0
    check(found[real], expected[real], most=1e-3)


@needs_interpreter
def test_a_mask_that_is_ignored_is_noticed() -> None:
    step = tree_step(ROWS["short"], 16, 24, gap=2)
    assert step.branches is not None
    qkv, rope = normal(step.shape.num_tokens, 8 * 64), normal(128, 64)
    keys, values = normal(24, 2, 16, 64), normal(24, 2, 16, 64)
    with_trees = REFERENCE.attend(qkv, Cache(keys.clone(), values.clone()), step, rope, None, None, 1e-5)
    step.branches.masks.zero_()
    without = REFERENCE.attend(qkv, Cache(keys, values), step, rope, None, None, 1e-5)
    assert (with_trees - without)[step.positions >= 0].norm() > 0.1 * without.norm()


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes masked lanes too
@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize(("num_columns", "count"), [(5, 5), (40, 3), (2500, 4)])
def test_first_tokens(num_columns: int, count: int, samples: bool) -> None:
    from outpace.backends.torch.kernels import children

    generator = torch.manual_seed(num_columns)
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 1.0, "seed": 3}, {"temperature": 1e-39, "seed": 3},
        {"temperature": 3.0, "seed": (1 << 64) - 1},
    ]  # fmt: skip
    words = DrawWords(4, pinned=False)
    words.fill(slice(0, 4), [request_of(3, **kind) for kind in kinds], [3, 9, 9, 200])
    columns = torch.randperm(3000, generator=generator)[:num_columns].sort().values
    logits = (8 * torch.randn(8, num_columns, generator=generator)).round()  # some are equal
    expected = first_tokens(logits, columns, words.buffer, 2, count, samples=samples)
    found = children.first_tokens(logits, columns, words.buffer, 2, count, samples=samples)
    assert torch.equal(found, expected)
    assert all(len(set(row)) == count for row in found.tolist())


@needs_interpreter
@pytest.mark.parametrize("seed", range(8))
def test_the_kernel_accepts_what_the_host_accepts(seed: int) -> None:
    from outpace.backends.torch.kernels.following_trees import accepted_paths

    check_accepted_paths(accepted_paths, seed)


@needs_interpreter
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("before", [0, 1])
def test_places_of_taps(rows: list[TreeRow], before: int) -> None:
    """Of steps with trees, and of others."""
    from outpace.backends.torch.kernels.tap_places import places

    branching = tree_step(rows, 16, 64, gap=2)
    taps = TapStore([1], 64, 16, 4, torch.zeros(1))
    for step in (branching, replace(branching, branches=None)):
        expected = taps.places(step, before)
        assert torch.equal(places(step, before, 16, 64 * 16), expected)

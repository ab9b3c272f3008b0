"""Compares the sampling kernels with the torch functions, in Triton's interpreter, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; the torch backend needs it")
pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot be interpreted")

import torch

from outpace.backends.torch.kernels import drawing, rejecting
from outpace.backends.torch.kernels.drawing import Rows, draw
from outpace.backends.torch.kernels.filters import NUM_CANDIDATES, candidates
from outpace.backends.torch.sampling import acceptance
from tests.backends.torch.test_device_acceptance import Batch as Drafted
from tests.backends.torch.test_device_sampling import FAMILIES, FEATURES, Batch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the subprocess that interprets Triton")


@pytest.mark.skipif(INTERPRETED, reason="already in the subprocess")
def test_kernels_equal_the_torch_functions_in_the_interpreter() -> None:
    """Triton chooses its interpreter at import, so these tests run in a separate process."""
    command = [sys.executable, "-m", "pytest", "-x", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert found.returncode == 0, found.stdout[-4000:]
    assert "passed" in found.stdout


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes time per program, not per number."""
    monkeypatch.setattr(drawing, "_COLUMNS", 512)


def rows_of(batch: Batch) -> Rows:
    _, params, seeds, positions = batch.on_device()
    return Rows(
        params.sharpness.double(), params.is_greedy.long(), params.top_k, params.top_p, params.min_p.double(),
        seeds, positions,
    )  # fmt: skip


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes masked lanes too
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("vocab", [5, 3001])
def test_drawing(family: str, vocab: int) -> None:
    batch = Batch(family, len(FEATURES), vocab, FEATURES, seed=vocab)
    expected = torch.tensor(batch.host_tokens())
    tokens, is_exact = draw(torch.from_numpy(batch.rows), rows_of(batch), samples=True, has_filters=True)
    assert torch.equal(tokens[is_exact != 0], expected[is_exact != 0].int())
    assert is_exact.all() or vocab > NUM_CANDIDATES


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("vocab", [300, 5001])
def test_drawing_without_filters(family: str, vocab: int) -> None:
    features = [{"temperature": 0.0}, {}, {"temperature": 0.6}, {"temperature": 2.0}, {"temperature": 1e-39}]
    batch = Batch(family, 2 * len(features), vocab, features, seed=vocab)
    logits, rows = torch.from_numpy(batch.rows), rows_of(batch)
    tokens, is_exact = draw(logits, rows, samples=True, has_filters=False)
    assert is_exact.all()
    assert tokens.tolist() == batch.host_tokens()
    assert torch.equal(draw(logits, rows, samples=False, has_filters=False)[0], logits.argmax(dim=-1).int())


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "features", [FEATURES, [{"temperature": 0.0}, {}, {"temperature": 2.0}]], ids=["filters", "none"]
)
@pytest.mark.parametrize("num_columns", [40, 2100])
def test_drawing_only_from_some_columns(features: list[dict[str, Any]], num_columns: int) -> None:
    """As from all of them, where the others have no probability."""
    batch = Batch("peaked_rows", 2 * len(features), 3001, features, seed=num_columns)
    columns = torch.randperm(3001, generator=torch.manual_seed(num_columns))[:num_columns].sort().values
    logits = torch.full(batch.rows.shape, -torch.inf)
    logits[:, columns] = torch.from_numpy(batch.rows)[:, columns]
    has_filters = features is FEATURES
    probs, some_probs = torch.zeros_like(logits), torch.zeros_like(logits)
    expected = draw(logits, rows_of(batch), samples=True, has_filters=has_filters, probs=probs)
    found = draw(logits, rows_of(batch), samples=True, has_filters=has_filters, probs=some_probs, columns=columns)
    assert torch.equal(found, expected) and torch.equal(some_probs, probs)
    assert set(found[0].tolist()) <= set(columns.tolist())
    greedy = draw(logits, rows_of(batch), samples=False, has_filters=False, columns=columns)
    assert torch.equal(greedy[0], logits.argmax(dim=-1).int())


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("closeness", [0.05, 1.0])
@pytest.mark.parametrize(("depth", "vocab"), [(1, 300), (3, 300), (4, 5001), (7, 2048)])
def test_verifying_by_block(depth: int, vocab: int, closeness: float) -> None:
    """Drafts lie at other places than their rows, and some rows of the target are not exact."""
    num_rows = 12
    batch = Drafted("block", num_rows, depth, vocab, closeness=closeness, seeded=False, seed=depth)
    drafts, target, draft = batch.device_drafts(), batch.target(), batch.draft()
    expected = acceptance.verify_block(drafts, draft, target)
    sources = torch.randperm(num_rows, generator=torch.manual_seed(depth))
    kept = torch.empty_like(draft)
    kept[sources] = draft
    exact = (torch.arange(len(target)) % 7 != 0).int()
    found = torch.full((num_rows, 3), -1)
    rejecting.verify_block(drafts, kept, sources, target, exact, found)
    assert found[:, 0].tolist() == expected.num_accepted.tolist()
    assert found[:, 1].tolist() == expected.final_token.tolist()
    assert found[:, 2].tolist() == (exact[drafts.row_of] != 0).all(dim=1).long().tolist()
    assert len(set(found[:, 0].tolist())) > 1 and 0 < int(found[:, 2].sum()) < num_rows


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_candidates_suffice_for_what_language_models_are_asked() -> None:
    usual: list[dict[str, Any]] = [{"temperature": 0.7}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}]
    batch = Batch("peaked_rows", 3 * len(usual), 49_152, usual, seed=0)
    _, is_exact = draw(torch.from_numpy(batch.rows), rows_of(batch), samples=True, has_filters=True)
    assert is_exact.all()


@needs_interpreter
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("vocab", [70, 5001])
def test_candidates_are_the_likeliest_tokens(family: str, vocab: int) -> None:
    logits = torch.from_numpy(FAMILIES[family](1, 12, vocab))
    for num_candidates in (1, 16, 64):
        values, ids = candidates(logits, num_candidates)
        assert torch.equal(values, logits.sort(dim=-1, descending=True).values[:, :num_candidates])
        assert torch.equal(logits.gather(1, ids.long()), values)
        assert all(len(set(row)) == num_candidates for row in ids.tolist())

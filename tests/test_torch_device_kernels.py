"""The sampling kernels against the torch functions, in Triton's interpreter: right, if not fast, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed; the torch backend needs it")
pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot be interpreted")

import torch

from outpace.backends.torch.device_sampling import draw
from tests.test_torch_device_sampling import FAMILIES, FEATURES, Batch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the subprocess that interprets Triton")


@pytest.mark.skipif(INTERPRETED, reason="already inside")
def test_kernels_equal_the_torch_functions_in_the_interpreter() -> None:
    """Whether Triton interprets is settled when it is imported, so these tests run in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-x", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout[-4000:]
    assert "passed" in found.stdout


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes masked lanes too
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("vocab", "num_candidates"), [(64 * 20, 16), (64 * 70, 64)])
def test_drawing(family: str, vocab: int, num_candidates: int) -> None:
    from outpace.backends.torch.kernels import sampling as kernels

    assert kernels.can_draw(vocab, num_candidates)
    batch = Batch(family, 2 * len(FEATURES), vocab, FEATURES, seed=vocab)
    expected = draw(*batch.on_device(), num_candidates)
    logits, params, seeds, positions = batch.on_device()
    apart = torch.stack([logits, logits + 1], dim=1)[:, 0]  # rows as they lie in the buffer of a draft loop
    for rows in (logits, apart):
        found = kernels.draw(rows, params, seeds, positions, num_candidates)
        assert torch.equal(found.is_exact, expected.is_exact)
        assert torch.equal(found.is_shaped_exactly, expected.is_shaped_exactly)
        assert torch.equal(found.tokens[found.is_exact], expected.tokens[found.is_exact])
        for name in ("top", "last_logit", "last_id"):
            assert torch.equal(getattr(found.distributions, name), getattr(expected.distributions, name))
        assert torch.allclose(found.distributions.norm, expected.distributions.norm, rtol=1e-6)
        assert batch.assert_agrees(found.tokens, found.is_exact) == 0


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes masked lanes too
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("vocab", [300, 5000])
def test_drawing_from_the_whole_vocabulary(family: str, vocab: int) -> None:
    from outpace.backends.torch.kernels.contest import draw_whole

    features = [{"temperature": 0.0}, {}, {"temperature": 0.6}, {"temperature": 2.0}]
    batch = Batch(family, 24, vocab, features, seed=vocab)
    logits, params, seeds, positions = batch.on_device()
    tokens = draw_whole(
        logits, params.inv_temperature.double(), params.is_greedy.long(), seeds, positions, samples=True
    )
    assert batch.assert_agrees(tokens, torch.ones(24, dtype=torch.bool)) <= 1
    greedy = draw_whole(logits, params.inv_temperature.double(), params.is_greedy, seeds, positions, samples=False)
    assert torch.equal(greedy, logits.argmax(dim=-1).int())


def test_what_the_kernels_cannot_draw_is_left_to_torch() -> None:
    from outpace.backends.torch.kernels.sampling import can_draw

    assert can_draw(128_256, 256)
    assert not can_draw(50_257, 256)  # not whole blocks
    assert not can_draw(64 * 256, 256)  # no more blocks than candidates
    assert not can_draw(128_256, 200)  # no power of two

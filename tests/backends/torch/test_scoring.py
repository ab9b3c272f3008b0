"""Scores computed on the device are the host's, with ties and infinities."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")

from outpace.backends.torch.sampling import scoring  # noqa: E402
from outpace.decoding.sampling import token_logprob  # noqa: E402


@pytest.mark.parametrize("most_numbers", [1, 5000, 1 << 22])
@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("vocab_size", [3, 300, 5000])
def test_scores_are_those_of_the_host(vocab_size, num_top, most_numbers, monkeypatch):
    monkeypatch.setattr(scoring, "_MOST_NUMBERS", most_numbers)
    rng = np.random.default_rng(vocab_size)
    logits = (rng.normal(size=(12, vocab_size)) * 4).astype(np.float32)
    logits[1] = logits[1].round()  # many are equal
    logits[2, ::2] = -np.inf
    logits[3] = np.where(rng.random(vocab_size) < 0.5, 0.0, -0.0)
    logits[4] = -np.abs(logits[4].round())
    tokens = rng.integers(0, vocab_size, size=12).tolist()
    found = scoring.score(torch.from_numpy(logits), tokens, num_top)
    for each, row, token in zip(found, logits, tokens, strict=True):
        expected = token_logprob(row, token, num_top)
        assert (each.token_id, each.rank) == (expected.token_id, expected.rank)
        assert [i for i, _ in each.top] == [i for i, _ in expected.top]
        np.testing.assert_allclose(each.logprob, expected.logprob, atol=1e-5)
        np.testing.assert_allclose([p for _, p in each.top], [p for _, p in expected.top], atol=1e-5)

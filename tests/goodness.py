"""Goodness of fit, for tests that estimate a distribution instead of computing it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Outcome = TypeVar("Outcome", bound=Hashable)

# Seeds are fixed, so a passing test keeps passing. Correct code fails with this probability for a new seed.
SMALLEST_P = 1e-4


def chi_square_p(counts: NDArray[Any], probabilities: NDArray[Any]) -> float:
    """The p-value of the counts. Cells with an expected count below 5 are merged."""
    expected = np.asarray(probabilities, dtype=np.float64)
    expected = expected * (counts.sum() / expected.sum())
    assert not counts[expected == 0].any(), "something happened that has probability zero"
    likeliest_last = np.argsort(expected)
    expected, observed = expected[likeliest_last], counts[likeliest_last].astype(np.float64)
    num_rare = int(np.searchsorted(expected, 5.0))
    if num_rare:
        while expected[:num_rare].sum() < 5:
            num_rare += 1
        expected = np.append(expected[num_rare:], expected[:num_rare].sum())
        observed = np.append(observed[num_rare:], observed[:num_rare].sum())
    return float(stats.chisquare(observed, expected).pvalue)


def fits(outcomes: Iterable[Outcome], law: Mapping[Outcome, float]) -> float:
    """`chi_square_p` of outcomes against a law of any hashable outcomes."""
    index = {outcome: i for i, outcome in enumerate(law)}
    counts = np.bincount([index[outcome] for outcome in outcomes], minlength=len(index))
    return chi_square_p(counts, np.array(list(law.values()), dtype=np.float64))

"""Statistics on synthetic data with known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from outpace.bench.statistics import (
    MIN_UNITS,
    Estimate,
    percentile,
    percentiles,
    ratio_of_rates,
    student_t_cdf,
    student_t_quantile,
)


def test_percentiles_interpolate_between_neighbours():
    values = [4.0, 1.0, 3.0, 2.0, 5.0]
    assert percentile(values, 50) == 3.0
    assert percentile(values, 90) == pytest.approx(4.6)
    assert percentiles(list(range(101))) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentile([7.0], 99) == 7.0
    assert math.isnan(percentile([], 50))


@pytest.mark.parametrize("degrees", [1, 2, 5, 30])
def test_students_distribution_is_the_textbook_one(degrees):
    assert student_t_cdf(1.5, degrees) == pytest.approx(stats.t.cdf(1.5, degrees), abs=1e-6)
    assert student_t_quantile(0.975, degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-5)


def test_a_ratio_weighs_units_by_their_size_not_each_alike():
    # Twice as fast on the long unit, half as fast on the short one: the sums decide.
    ratio = ratio_of_rates([90, 10], [45, 20], [90, 10], [90, 10])
    assert ratio.value == pytest.approx((100 / 65) / (100 / 100))


def test_noise_common_to_both_sides_of_a_unit_does_not_widen_the_interval():
    rng = np.random.default_rng(1)
    machine = rng.lognormal(0, 0.5, size=20)  # machine speed: changes a lot, but not within a unit
    tokens = [100.0] * 20
    ratio = ratio_of_rates(tokens, list(machine / 1.25), tokens, list(machine))
    assert ratio.value == pytest.approx(1.25)
    assert ratio.low == pytest.approx(1.25) and ratio.high == pytest.approx(1.25)


@pytest.mark.parametrize("num_units", [3, 4, 8, 24])
def test_intervals_cover_the_truth_about_as_often_as_they_say(num_units):
    rng = np.random.default_rng(num_units)
    covered = 0
    trials = 300
    for trial in range(trials):
        base = rng.lognormal(0, 0.3, size=num_units)
        ours = base / 1.1 * rng.lognormal(0, 0.1, size=num_units) / math.exp(0.1**2 / 2)
        tokens = [50.0] * num_units
        ratio = ratio_of_rates(tokens, list(ours), tokens, list(base), seed=trial)
        assert ratio.low is not None and ratio.high is not None
        covered += ratio.low <= 1.1 <= ratio.high
    assert 0.90 <= covered / trials <= 0.99


def test_too_few_units_give_a_value_without_an_interval():
    few = [1.0] * (MIN_UNITS - 1)
    ratio = ratio_of_rates(few, few, few, few)
    assert ratio.value == 1.0 and ratio.low is None and ratio.high is None
    assert "no interval" in str(ratio)
    assert str(Estimate(1.5, 1.4, 1.6)) == "1.500 (1.400 .. 1.600)"

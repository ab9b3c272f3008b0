"""The arithmetic that decides tokens: accurate, and with fixed bits.

Golden values fix the bits: a change to any of them can change the tokens of a seeded request.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outpace.decoding.numerics import SMALLEST_POWER, minus_log, powers_of_two, total


def test_powers_are_accurate_to_float32() -> None:
    x = np.linspace(SMALLEST_POWER + 0.6, 0, 1_000_003, dtype=np.float32)
    error = powers_of_two(x.copy()) / np.exp2(x.astype(np.float64)) - 1
    assert np.abs(error).max() < 2.5e-7


def test_the_largest_power_is_exactly_one_and_belongs_to_zero() -> None:
    x = np.linspace(-1, 0, 1_000_001, dtype=np.float32)
    powers = powers_of_two(x)
    assert powers[-1] == 1.0
    assert (powers[:-1] <= 1.0).all()


def test_tiny_powers_are_zero_and_no_other_is_subnormal() -> None:
    x = np.array([-np.inf, -1e30, SMALLEST_POWER - 1, SMALLEST_POWER, SMALLEST_POWER + 0.49], np.float32)
    assert (powers_of_two(x) == 0).all()
    x = np.linspace(SMALLEST_POWER - 1, SMALLEST_POWER + 1, 10_001, dtype=np.float32)
    powers = powers_of_two(x)
    assert powers[powers > 0].min() / 2**20 > np.finfo(np.float32).smallest_normal


def test_logarithms_are_accurate_to_float64_and_above_zero() -> None:
    near_one = 1.0 - np.arange(1, 1000) * 2.0**-53
    small = 2.0 ** -np.arange(1.0, 54.0)
    u = np.concatenate([np.random.default_rng(0).random(200_000) * (1 - 2**-53) + 2**-54, near_one, small])
    found = minus_log(u)
    assert (found > 0).all()
    assert np.allclose(found, -np.log(u), rtol=1e-15, atol=0)


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=300))
def test_a_total_is_the_sum(values: list[int]) -> None:
    assert total(np.array(values, np.float64)) == sum(values)
    assert total(np.array([Fraction(value, 7) for value in values], object)) == sum(Fraction(v, 7) for v in values)


def test_a_total_leaves_its_argument_alone() -> None:
    x = np.arange(10, dtype=np.float32)
    total(x)
    assert x.tolist() == list(range(10))


@pytest.mark.parametrize("size", [49_152, 151_936])
def test_a_total_rounds_little(size: int) -> None:
    x = np.random.default_rng(size).random(size).astype(np.float32)
    assert abs(float(total(x)) / x.astype(np.float64).sum() - 1) < 5e-7


def bits(x: NDArray[np.float32] | NDArray[np.float64]) -> list[str]:
    return [float(value).hex() for value in x]


def test_golden_values() -> None:
    """If this fails, a seeded request may emit other tokens than before."""
    x = np.array([0.0, -0.1, -0.5, -1.75, -31.3, -99.4], np.float32)
    assert bits(powers_of_two(x)) == GOLDEN_POWERS
    assert bits(minus_log(np.array([2.0**-53, 0.1, 0.5, 0.7, 1 - 2.0**-53]))) == GOLDEN_LOGS
    assert bits(np.array([total(np.float32(1) / np.arange(1, 1004, dtype=np.float32))])) == GOLDEN_TOTAL


GOLDEN_POWERS = [
    "0x1.0000000000000p+0",
    "0x1.ddb6800000000p-1",
    "0x1.6a09e40000000p-1",
    "0x1.306fe00000000p-2",
    "0x1.9fdf980000000p-32",
    "0x1.8405e60000000p-100",
]
GOLDEN_LOGS = [
    "0x1.25e4f7b2737fap+5",
    "0x1.26bb1bbb55515p+1",
    "0x1.62e42fefa39eep-1",
    "0x1.6d3c324e13f50p-2",
    "0x1.0000000000000p-53",
]
GOLDEN_TOTAL = ["0x1.df43020000000p+2"]

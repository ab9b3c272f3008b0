"""The noise: reproducible on every machine, uniform, and unrelated between addresses.

Statistical tests use fixed seeds. Golden values fix the noise: a change to any of them changes the tokens of
every seeded request, so it must never happen unnoticed.
"""

from __future__ import annotations

import random
from itertools import combinations, product

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from outpace.decoding.randomness import Purpose, child_seed, gumbels, key, uniform, uniforms, uniforms_at
from tests.goodness import SMALLEST_P

EDGES = [-1, 0, 1, 2, 151_935, 2**31, 2**53, 2**63 - 1]


def first_numbers(seed: int, purpose: Purpose, num_places: int) -> NDArray[np.float64]:
    """One number from each of many streams, as accepting and recovering use them."""
    return np.array([uniform(key(seed, purpose, place)) for place in range(num_places)])


def test_uniforms_equals_uniform_bit_by_bit() -> None:
    generator = random.Random(0)
    keys = [0, 2**64 - 1, *(generator.getrandbits(64) for _ in range(50))]
    indices = EDGES + [generator.randrange(2**63) for _ in range(50)]
    for k in keys:
        together = uniforms(k, np.array(indices, dtype=np.int64))
        assert together.tolist() == [uniform(k, index) for index in indices]


def test_many_addresses_at_once_give_the_same_bits() -> None:
    seeds = [0, 1, 2**63, 2**64 - 1]
    anchors, offsets = np.array([0, 7, 2**40, 3]), np.arange(5)
    found = uniforms_at(np.array(seeds, np.uint64)[:, None], Purpose.ACCEPT, anchors[:, None], offsets)
    expected = [
        [uniform(key(seed, Purpose.ACCEPT, anchor, offset)) for offset in range(5)]
        for seed, anchor in zip(seeds, anchors.tolist(), strict=True)
    ]
    assert found.tolist() == expected


def test_a_stream_is_splitmix64() -> None:
    """The reference implementation's first outputs for the state 1234567."""
    reference = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    for index, word in enumerate(reference):
        assert abs(uniform(1234567, index) - word / 2**64) < 2**-52


def test_numbers_lie_strictly_between_zero_and_one() -> None:
    numbers = uniforms(key(3, Purpose.TOKEN, 0), np.arange(1_000_000))
    assert 0 < numbers.min() < 1e-4
    assert 1 - 1e-4 < numbers.max() < 1
    assert np.isfinite(gumbels(key(3, Purpose.TOKEN, 0), np.arange(1_000_000))).all()


def key_whose_first_word_is(word: int) -> int:
    """SplitMix64 run backwards: every step of it is a bijection."""

    def undo_xor_shift(value: int, shift: int) -> int:
        original = value
        for _ in range(64 // shift):
            original = value ^ (original >> shift)
        return original

    word = undo_xor_shift(word, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    word = undo_xor_shift(word, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return (undo_xor_shift(word, 30) - 0x9E3779B97F4A7C15) % 2**64


def test_the_smallest_number_is_above_zero() -> None:
    k = key_whose_first_word_is(0)
    assert 0 < uniform(k) < 2**-52
    assert np.isfinite(gumbels(k, np.array([0]))).all()


def test_the_largest_number_is_below_one() -> None:
    k = key_whose_first_word_is(2**64 - 1)
    assert 1 - 2**-50 < uniform(k) < 1
    with np.errstate(divide="ignore"):
        assert np.isfinite(gumbels(k, np.array([0]))).all()


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**64 - 1])
def test_numbers_are_uniform_along_a_stream_and_across_places(seed: int) -> None:
    along = uniforms(key(seed, Purpose.TOKEN, 17), np.arange(100_000))
    across = first_numbers(seed, Purpose.ACCEPT, 20_000)
    for numbers in (along, across):
        assert stats.kstest(numbers, "uniform").pvalue > SMALLEST_P


def test_numbers_are_uniform_across_seeds_in_a_row() -> None:
    """Users choose seeds 0, 1, 2 and so on; each must give a different stream."""
    numbers = np.array([uniform(key(seed, Purpose.TOKEN, 5)) for seed in range(20_000)])
    assert stats.kstest(numbers, "uniform").pvalue > SMALLEST_P
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / np.sqrt(20_000)


def test_gumbel_noise_is_gumbel() -> None:
    noise = gumbels(key(9, Purpose.TAIL, 3), np.arange(100_000))
    assert stats.kstest(noise, "gumbel_r").pvalue > SMALLEST_P


def independent(a: NDArray[np.float64], b: NDArray[np.float64]) -> bool:
    """No correlation beyond chance, and pairs spread evenly over a 10 by 10 grid, which detects more than
    correlation.
    """
    if abs(np.corrcoef(a, b)[0, 1]) > 4.5 / np.sqrt(a.size):
        return False
    grid, _, _ = np.histogram2d(a, b, bins=10, range=[[0, 1], [0, 1]])
    return bool(stats.chisquare(grid.ravel()).pvalue > SMALLEST_P)


def test_purposes_at_one_place_are_independent() -> None:
    streams = [uniforms(key(7, purpose, 100), np.arange(20_000)) for purpose in Purpose]
    assert all(independent(a, b) for a, b in combinations(streams, 2))


def test_purposes_are_independent_across_places() -> None:
    """The first few numbers of many places, as a request uses them."""
    streams = [first_numbers(7, purpose, 10_000) for purpose in Purpose]
    assert all(independent(a, b) for a, b in combinations(streams, 2))


def test_neighbouring_places_offsets_and_seeds_are_independent() -> None:
    indices = np.arange(20_000)
    here = uniforms(key(7, Purpose.TOKEN, 100), indices)
    others = [
        key(7, Purpose.TOKEN, 101),
        key(8, Purpose.TOKEN, 100),
        key(7, Purpose.ACCEPT, 100, 0),
        key(7, Purpose.ACCEPT, 100, 1),
        key(7, Purpose.ACCEPT, 101, 0),
        child_seed(7, 1),
    ]
    assert all(independent(here, uniforms(other, indices)) for other in others)


def test_an_anchor_and_offset_are_not_confused_with_their_sum_or_their_order() -> None:
    """A later draft must get fresh noise at the same position."""
    places = list(product(range(60), range(60)))
    assert len({key(1, Purpose.ACCEPT, *place) for place in places}) == len(places)


def test_no_two_addresses_of_one_request_share_a_stream() -> None:
    for seed in range(20):
        assert len({key(seed, *address) for address in product(Purpose, range(200))}) == len(Purpose) * 200


def test_no_two_addresses_of_different_requests_share_a_stream() -> None:
    addresses = list(product(range(20), Purpose, range(200)))
    assert len({key(*address) for address in addresses}) == len(addresses)


def test_child_seeds_are_distinct_and_the_first_is_the_requests_own() -> None:
    parents = [0, 1, 2, 2**64 - 1]
    children = [child_seed(parent, index) for parent in parents for index in range(128)]
    assert len(set(children)) == len(children)
    assert all(0 <= child < 2**64 for child in children)
    assert [child_seed(parent, 0) for parent in parents] == parents


def test_golden_values() -> None:
    """These values fix the tokens of seeded requests. If this test fails, replays of earlier releases break."""
    assert key(0, Purpose.TOKEN, 0) == 0x581A20C31EC0384F
    assert key(42, Purpose.ACCEPT, 7, 3) == 0x7E8D5323365C0719
    assert key(2**64 - 1, Purpose.DRAFT, 1000, 63) == 0x9017AA95CA58AB5
    assert child_seed(42, 1) == 0xBA10837537CEC288
    assert uniform(key(0, Purpose.TOKEN, 0)) == pytest.approx(0.5057395439086031, abs=1e-15)
    assert uniform(key(42, Purpose.TAIL, 9), 151_935) == pytest.approx(0.5233521909033118, abs=1e-15)
    assert uniform(key(42, Purpose.TOKEN, 9), -1) == pytest.approx(0.8929895088616461, abs=1e-15)

"""From logits to a token: filters compared with slow, simple references, and draws with their distribution.

`Shaper` is compared with float64 code that follows the definitions one token at a time. Sets kept by a
single filter are compared exactly, from the same float32 probabilities; combinations within rounding.
`choose` is compared with its distribution by chi-square at fixed seeds, and with the exact agreement of
gumbel-coupled draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import log_softmax

from outpace.config import SamplingParams
from outpace.decoding.sampling import HEAD_RATIO, Shaper, choose, token_logprob
from tests.goodness import SMALLEST_P, chi_square_p

FloatRow = NDArray[np.float32]
SIZES = [5, 50, 500, 5000]


def shaper(prompt: Sequence[int] = (), stop_ids: frozenset[int] = frozenset(), **params: Any) -> Shaper:
    return Shaper(SamplingParams(**params), prompt, stop_ids)


def random_logits(seed: int, size: int, spread: float = 3.0) -> FloatRow:
    return (np.random.default_rng(seed).normal(size=size) * spread).astype(np.float32)


def by_likelihood(p: Sequence[float]) -> list[int]:
    """Token ids, likeliest first and the lower id first among equals."""
    return sorted(range(len(p)), key=lambda token: (-p[token], token))


def smallest_set_reaching(p: Sequence[float], top_p: float) -> list[int]:
    kept, mass = [], 0.0
    for token in by_likelihood(p):
        kept.append(token)
        mass += p[token]
        if mass >= top_p:
            break
    return kept


def kept_by(probs: FloatRow) -> set[int]:
    return set(np.flatnonzero(probs).tolist())


# --- single filters, exactly --------------------------------------------------------------------------------


def test_greedy_is_the_argmax_and_the_lowest_id_among_equals() -> None:
    logits = np.array([0, 3, 1, 3, 3], dtype=np.float32)
    greedy = shaper(temperature=0.0)
    assert greedy.greedy(logits, ()) == 1
    assert greedy.probs(logits, ()).tolist() == [0, 1, 0, 0, 0]


def test_greedy_sees_bias_penalties_and_masks() -> None:
    logits = np.array([0, 3, 2.9, 1], dtype=np.float32)
    assert shaper(temperature=0.0, logit_bias={3: 5.0}).greedy(logits, ()) == 3
    assert shaper(temperature=0.0, presence_penalty=0.5).greedy(logits, (1,)) == 2
    assert shaper(temperature=0.0, min_tokens=1, stop_ids=frozenset({1})).greedy(logits, ()) == 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("top_k", [1, 2, 3, 40])
def test_top_k_keeps_the_k_likeliest(size: int, top_k: int) -> None:
    for seed in range(10):
        logits = random_logits(seed, size)
        plain = shaper().probs(logits, ())
        kept = kept_by(shaper(top_k=top_k).probs(logits, ()))
        assert kept == set(by_likelihood(plain.tolist())[:top_k])


def test_top_k_keeps_exactly_k_among_equals_the_lower_ids() -> None:
    logits = np.array([1, 2, 1, 1, 2, 1, 0], dtype=np.float32)
    for top_k, kept in ((1, {1}), (2, {1, 4}), (3, {0, 1, 4}), (5, {0, 1, 2, 3, 4}), (6, {0, 1, 2, 3, 4, 5})):
        assert kept_by(shaper(top_k=top_k).probs(logits, ())) == kept
    assert kept_by(shaper(top_k=3).probs(np.zeros(100, dtype=np.float32), ())) == {0, 1, 2}


def test_top_k_counts_no_token_that_cannot_be_drawn() -> None:
    logits = np.array([-np.inf, 1, -np.inf, 0, -np.inf], dtype=np.float32)
    assert kept_by(shaper(top_k=4).probs(logits, ())) == {1, 3}


@pytest.mark.parametrize("top_k", [0, -1, 5, 6])
def test_top_k_of_nothing_or_of_everything_keeps_all(top_k: int) -> None:
    logits = random_logits(0, 5)
    assert shaper(top_k=top_k).probs(logits, ()).tolist() == shaper().probs(logits, ()).tolist()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.99, 0.9999])
def test_top_p_keeps_the_smallest_set_that_reaches_p(size: int, top_p: float) -> None:
    for seed in range(4):
        for spread in (0.1, 1.0, 5.0):
            logits = random_logits(seed, size, spread)
            plain = shaper().probs(logits, ()).tolist()
            kept = kept_by(shaper(top_p=top_p).probs(logits, ()))
            assert kept == set(smallest_set_reaching(plain, top_p))


def test_top_p_on_its_border_and_among_equals() -> None:
    even = np.zeros(4, dtype=np.float32)
    for top_p, num_kept in ((0.25, 1), (0.250001, 2), (0.5, 2), (0.75, 3), (0.7500001, 4), (0.999, 4)):
        assert kept_by(shaper(top_p=top_p).probs(even, ())) == set(range(num_kept))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("min_p", [0.001, 0.05, 0.5, 1.0])
def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest(size: int, min_p: float) -> None:
    for seed in range(5):
        plain = shaper().probs(random_logits(seed, size), ())
        kept = kept_by(shaper(min_p=min_p).probs(random_logits(seed, size), ()))
        assert kept == {t for t in range(size) if plain[t] >= plain.max() * np.float32(min_p)}


# --- everything together, within rounding -------------------------------------------------------------------


def reference_probs(
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: frozenset[int],
    logits: FloatRow,
) -> tuple[NDArray[np.float64], float]:
    """The definition in float64, and the smallest distance of a cumulated mass or ratio to its border."""
    x = [float(logit) for logit in logits]
    margin = 1.0
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in set(prompt) | set(output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, times in Counter(output).items():
        x[token] -= params.presence_penalty + params.frequency_penalty * times
    for token in stop_ids:
        if len(output) < params.min_tokens:
            x[token] = -np.inf
    for word in params.bad_words:
        ids = [int(token) for token in word]
        if output[len(output) - len(ids) + 1 :] == ids[:-1]:
            x[ids[-1]] = -np.inf
    if params.is_greedy:
        one_hot = np.zeros(len(x))
        one_hot[by_likelihood(x)[0]] = 1
        return one_hot, margin
    p = np.exp((np.array(x) - max(x)) / params.temperature)
    p /= p.sum()
    if params.top_k > 0:
        order = by_likelihood(p.tolist())
        if params.top_k < len(order):
            margin = min(margin, p[order[params.top_k - 1]] / max(p[order[params.top_k]], 1e-300) - 1)
        p[order[params.top_k :]] = 0
        p /= p.sum()
    if params.top_p < 1:
        kept = smallest_set_reaching(p.tolist(), params.top_p)
        masses = np.cumsum(p[kept])
        margin = min(margin, *np.abs(masses - params.top_p))
        p[np.setdiff1d(np.arange(p.size), kept)] = 0
    if params.min_p > 0:
        ratios = p / p.max()
        margin = min(margin, float(np.abs(ratios - params.min_p).min()))
        p[ratios < params.min_p] = 0
    return p / p.sum(), margin


PROMPT = [0, 1, 2, 2, 3]
OUTPUT = [4, 4, 1, 2, 4]
STOP_IDS = frozenset({0, 4})
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0, "presence_penalty": 1.0},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "repetition_bonus": {"repetition_penalty": 0.6},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -0.7},
    "logit_bias": {"logit_bias": {1: 4.0, 3: -100.0}},
    "min_tokens": {"min_tokens": 7},
    "bad_words": {"bad_words": [[3], [4, 4], [4, 4, 1, 2], [1, 0], [9, 9]]},
    "filters": {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "everything": {
        "temperature": 1.3,
        "top_k": 100,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {0: 2.0, 2: -1.5},
        "min_tokens": 7,
        "bad_words": [[2], [4, 4, 1], [4, 1]],
    },
}
each_feature = pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())


@each_feature
@pytest.mark.parametrize("size", SIZES)
def test_probs_follow_the_definition(features: dict[str, Any], size: int) -> None:
    num_compared = 0
    for seed in range(6):
        for num_emitted in (0, 2, 5):
            params = SamplingParams(**features)
            logits = random_logits(100 * seed + num_emitted, size)
            subject = Shaper(params, PROMPT, STOP_IDS)
            subject.advance(OUTPUT[:num_emitted])
            expected, margin = reference_probs(params, PROMPT, OUTPUT[:num_emitted], STOP_IDS, logits)
            if margin < 1e-6:  # float32 may fall on the other side of the border
                continue
            num_compared += 1
            probs = subject.probs(logits, ())
            assert probs.dtype == np.float32
            np.testing.assert_allclose(probs, expected, rtol=2e-5, atol=1e-9)
            # The probability of a token biased by -100 is too small for float32.
            assert kept_by(probs) >= set(np.flatnonzero(expected > 1e-37).tolist())
            assert kept_by(probs) <= set(np.flatnonzero(expected).tolist())
            if params.is_greedy:
                assert subject.greedy(logits, ()) == expected.argmax()
    assert num_compared >= 12


@each_feature
def test_a_prefix_counts_exactly_as_if_it_had_been_said(features: dict[str, Any]) -> None:
    """Needed to verify a draft in one pass: row i gives the same result as decoding one token at a time."""
    for seed, num_emitted in ((0, 0), (1, 1), (2, 3)):
        emitted, draft = OUTPUT[:num_emitted], [4, 3, 4, 1, 0, 2, 2]
        logits = random_logits(seed, 200)
        ahead = Shaper(SamplingParams(**features), PROMPT, STOP_IDS)
        one_by_one = Shaper(SamplingParams(**features), PROMPT, STOP_IDS)
        ahead.advance(emitted)
        one_by_one.advance(emitted)
        for i, token in enumerate(draft):
            assert ahead.probs(logits, draft[:i]).tolist() == one_by_one.probs(logits, ()).tolist()
            assert ahead.greedy(logits, draft[:i]) == one_by_one.greedy(logits, ())
            one_by_one.advance([token])


@pytest.mark.parametrize(
    "name", ["repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "bad_words", "everything"]
)
def test_the_prefix_matters_to_whatever_depends_on_earlier_tokens(name: str) -> None:
    subject = Shaper(SamplingParams(**FEATURES[name]), PROMPT, STOP_IDS)
    logits = random_logits(3, 200)
    assert subject.probs(logits, ()).tolist() != subject.probs(logits, [9] * 7).tolist()


def test_stop_tokens_become_possible_inside_a_draft_that_passes_min_tokens() -> None:
    subject = shaper(min_tokens=3, stop_ids=frozenset({1}))
    subject.advance([0])
    logits = np.zeros(3, dtype=np.float32)
    assert [subject.probs(logits, [0] * i)[1] > 0 for i in range(4)] == [False, False, True, True]


@each_feature
def test_logits_are_never_modified(features: dict[str, Any]) -> None:
    logits = random_logits(5, 300)
    logits.flags.writeable = False
    before = logits.copy()
    subject = Shaper(SamplingParams(**features), PROMPT, STOP_IDS)
    probs = subject.probs(logits, [1, 4])
    subject.greedy(logits, [1, 4])
    assert not np.shares_memory(probs, logits)
    assert np.array_equal(logits, before)


@each_feature
@pytest.mark.parametrize("size", [5, 500, 50_000])
def test_probs_sum_to_one(features: dict[str, Any], size: int) -> None:
    for spread in (0.01, 1.0, 20.0):
        subject = Shaper(SamplingParams(**features), PROMPT, STOP_IDS)
        probs = subject.probs(random_logits(1, size, spread), [4])
        assert abs(float(probs.sum(dtype=np.float64)) - 1) < 1e-6
        assert probs.min() >= 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("temperature", [1e-37, 1e-39, 1e-310])
def test_a_temperature_close_to_zero_is_close_to_greedy(temperature: float) -> None:
    logits = np.array([0, 20, 40, -5], dtype=np.float32)
    assert shaper(temperature=temperature).probs(logits, ()).tolist() == [0, 0, 1, 0]


# --- log-probabilities --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_token_logprob_is_the_log_softmax_of_the_raw_logits(size: int) -> None:
    for seed in range(5):
        logits = random_logits(seed, size)
        expected = log_softmax(logits.astype(np.float64))
        reported = token_logprob(logits, seed, num_top=5)
        assert reported.token_id == seed
        assert reported.logprob == pytest.approx(expected[seed], abs=1e-6)
        assert [token for token, _ in reported.top] == by_likelihood(logits.tolist())[:5]
        assert [value for _, value in reported.top] == pytest.approx(np.sort(expected)[::-1][:5].tolist())


def test_token_logprob_reports_as_many_alternatives_as_there_are() -> None:
    logits = np.array([1, 2, 2, 0], dtype=np.float32)
    assert token_logprob(logits, 0, num_top=0).top == []
    assert [token for token, _ in token_logprob(logits, 0, num_top=10).top] == [1, 2, 0, 3]


@pytest.mark.parametrize("size", [3, 1024, 1025, 4096, 49152])
@pytest.mark.parametrize("count", [1, 5, 100, 1024, 2000])
def test_alternatives_are_those_of_a_stable_sort(size: int, count: int) -> None:
    rng = np.random.default_rng(size + count)
    for levels in (5, 1000, 10**6):  # few levels: many ties
        logits = rng.integers(0, levels, size).astype(np.float32)
        logits[rng.integers(0, size, size // 3)] = -np.inf
        logits[0] = 1.0
        expected = np.argsort(-logits, kind="stable")[:count]
        assert [token for token, _ in token_logprob(logits, 0, num_top=count).top] == expected.tolist()


def test_token_logprob_leaves_the_logits_alone() -> None:
    logits = random_logits(0, 50)
    before = logits.copy()
    token_logprob(logits, 3, num_top=5)
    assert np.array_equal(logits, before)


# --- the draw -----------------------------------------------------------------------------------------------


def normal(weights: Any) -> FloatRow:
    exact = np.asarray(weights, dtype=np.float64)
    return np.asarray(exact / exact.sum(), dtype=np.float32)


DISTRIBUTIONS: dict[str, FloatRow] = {
    "peaked": normal([0, 0.9, 0.05, 0, 0.03, 0.0199, 0.0001]),
    "flat": normal(np.ones(1000)),
    "heavy_tail": normal([0.6, *[4e-4] * 1000]),  # each is below HEAD_RATIO; together they win 2 of 5 draws
    "steep": normal(0.5 ** np.arange(40)),  # most of its tokens are in the tail
}


def draws(probs: FloatRow, seed: int, num_draws: int) -> NDArray[np.int64]:
    return np.array([choose(probs, seed, position) for position in range(num_draws)])


@pytest.mark.parametrize("num_draws", [15_000, pytest.param(50_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_choose_draws_from_the_distribution_and_independently_at_every_position(name: str, num_draws: int) -> None:
    probs = DISTRIBUTIONS[name]
    tokens = draws(probs, seed=2026, num_draws=num_draws)
    assert chi_square_p(np.bincount(tokens, minlength=probs.size), probs) > SMALLEST_P

    # Groups of about equal probability: with single tokens, some cells of pairs would be nearly empty.
    group_of = np.minimum((np.cumsum(probs) - probs / 2) * 4, 3).astype(np.int64)
    mass = np.bincount(group_of, weights=probs, minlength=4)
    groups = group_of[tokens]
    for distance in (1, 2):
        pairs = np.bincount(groups[:-distance] * 4 + groups[distance:], minlength=16)
        assert chi_square_p(pairs, np.outer(mass, mass).ravel()) > SMALLEST_P


def test_the_tail_is_reached_where_a_test_says_so() -> None:
    for name in ("heavy_tail", "steep"):
        probs = DISTRIBUTIONS[name]
        in_tail = (probs > 0) & (probs < probs.max() * HEAD_RATIO)
        assert in_tail.sum() > 10
    tokens = draws(DISTRIBUTIONS["heavy_tail"], seed=0, num_draws=2000)
    assert 0.35 < np.mean(tokens > 0) < 0.45


def test_choose_is_independent_between_seeds() -> None:
    probs = normal([4, 3, 2, 1])
    one, other = draws(probs, 1, 10_000), draws(probs, 2, 10_000)
    pairs = np.bincount(one * 4 + other, minlength=16)
    assert chi_square_p(pairs, np.outer(probs, probs).ravel()) > SMALLEST_P


def test_choose_is_a_function_of_probabilities_seed_and_position() -> None:
    probs = DISTRIBUTIONS["heavy_tail"]
    calls = [(seed, position) for seed in (0, 7, 2**64 - 1) for position in range(50)]
    forwards = {call: choose(probs, *call) for call in calls}
    backwards = {call: choose(probs.copy(), *call) for call in reversed(calls)}
    assert forwards == backwards


def test_choose_never_says_a_token_of_probability_zero() -> None:
    certain = np.zeros(1000, dtype=np.float32)
    certain[123] = 1
    assert {choose(certain, 3, position) for position in range(500)} == {123}


def test_choose_golden_values() -> None:
    """These values fix the tokens of seeded requests. If this test fails, replays of earlier releases break."""
    choices = [1, 2, 0, 0, 2, 3, 2, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 1, 0, 1]
    assert draws(normal([4, 3, 2, 1]), 42, 20).tolist() == choices
    assert draws(normal([0.6, *[1e-4] * 4000]), 42, 8).tolist() == [0, 0, 0, 0, 0, 0, 1123, 0]


# --- draft and target on the same noise ---------------------------------------------------------------------


def agreement_of_gumbel_draws(p: FloatRow, q: FloatRow) -> float:
    """How often argmax(log p + g) and argmax(log q + g) are equal: both are x if no y beats x in either."""
    p64, q64 = p.astype(np.float64), q.astype(np.float64)
    rivals = np.maximum(p64[None, :] / p64[:, None], q64[None, :] / q64[:, None])
    return float((1 / rivals.sum(axis=1)).sum())


@pytest.mark.parametrize("closeness", [0.1, 1.0])
def test_draft_and_target_agree_as_often_as_gumbel_coupling_promises(closeness: float) -> None:
    num_draws = 10_000
    p = shaper().probs(random_logits(1, 30, 1.0), ())
    q = shaper().probs(random_logits(1, 30, 1.0) + random_logits(2, 30, closeness), ())
    assert min(p.min() / p.max(), q.min() / q.max()) > HEAD_RATIO  # no tail: the formula is exact
    rate = float(np.mean(draws(p, 5, num_draws) == draws(q, 5, num_draws)))
    expected = agreement_of_gumbel_draws(p, q)
    error = np.sqrt(expected * (1 - expected) / num_draws)
    gap = float(np.abs(p - q).sum()) / 2
    assert abs(rate - expected) < 4 * error
    assert (1 - gap) / (1 + gap) <= expected <= 1 - gap + 1e-6


def test_a_tail_leaves_the_coupling_within_its_bound() -> None:
    num_draws = 5_000
    logits = random_logits(3, 2000, 3.0)
    p = shaper().probs(logits, ())
    q = shaper().probs(logits + random_logits(4, 2000, 0.2), ())
    gap = float(np.abs(p - q).sum()) / 2
    assert (q < q.max() * HEAD_RATIO).sum() > 100
    rate = float(np.mean(draws(p, 5, num_draws) == draws(q, 5, num_draws)))
    assert rate >= (1 - gap) / (1 + gap) - 4 * np.sqrt(0.25 / num_draws)


def test_equal_distributions_always_agree() -> None:
    probs = DISTRIBUTIONS["heavy_tail"]
    assert np.array_equal(draws(probs, 1, 500), draws(probs.copy(), 1, 500))

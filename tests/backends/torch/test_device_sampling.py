"""Compares sampling on the device with the host, given the same noise: equal distributions and tokens, bit for bit.

Everything runs on the CPU; `benchmarks/gpu.py` repeats the comparison with the kernels on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch", reason="torch is not installed; the torch backend needs it")

import torch

from outpace.backends.torch.sampling.adjust import Adjustments, adjust
from outpace.backends.torch.sampling.filters import RowParams, choose, draw, greedy_tokens, probs
from outpace.backends.torch.sampling.noise import exponentials, keys, signed, uniforms
from outpace.backends.torch.sampling.numerics import total
from outpace.backends.torch.sampling.verifier import _adjustments
from outpace.config import SamplingParams
from outpace.core import Case, Draft, Request
from outpace.decoding.constraints import Constraints
from outpace.decoding.numerics import total as host_total
from outpace.decoding.randomness import Purpose
from outpace.decoding.randomness import exponentials as host_exponentials
from outpace.decoding.randomness import key as host_key
from outpace.decoding.randomness import uniform as host_uniform
from outpace.decoding.sampling import Shaper
from outpace.decoding.sampling import choose as host_choose
from outpace.structured import StructuredOutput
from tests.fakes import ByteTokenizer
from tests.goodness import SMALLEST_P, chi_square_p

FloatRows = NDArray[np.float32]

# --- noise ------------------------------------------------------------------------------------------------------


def test_noise_equals_the_hosts_bit_by_bit() -> None:
    generator = random.Random(0)
    seeds = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, *(generator.getrandbits(64) for _ in range(60))]
    places = [(generator.randrange(2**40), generator.randrange(64)) for _ in seeds]
    indices = [-1, 0, 1, 151_935, 2**53]
    seed = torch.tensor([signed(s) for s in seeds])
    anchor, offset = torch.tensor(places).unbind(1)
    for purpose in Purpose:
        device_keys = keys(seed, purpose, anchor, offset)
        host_keys = [host_key(s, purpose, *place) for s, place in zip(seeds, places, strict=True)]
        assert device_keys.tolist() == [signed(k) for k in host_keys]
        assert uniforms(device_keys).tolist() == [host_uniform(k) for k in host_keys]
        many = uniforms(device_keys[:, None], torch.tensor(indices))
        assert many.tolist() == [[host_uniform(k, i) for i in indices] for k in host_keys]
        assert uniforms(device_keys, -1).tolist() == many[:, 0].tolist()
        host_noise = [host_exponentials(k, np.array(indices)) for k in host_keys]
        assert np.array_equal(exponentials(device_keys[:, None], torch.tensor(indices)), host_noise)


def test_golden_values() -> None:
    """The same expected values as in tests/decoding/test_randomness.py."""

    def one(seed: int, purpose: Purpose, *place: int) -> torch.Tensor:
        return keys(torch.tensor(signed(seed)), purpose, *(torch.tensor(word) for word in place))

    assert int(one(0, Purpose.TOKEN, 0)) == signed(0x581A20C31EC0384F)
    assert int(one(42, Purpose.ACCEPT, 7, 3)) == signed(0x7E8D5323365C0719)
    assert int(one(2**64 - 1, Purpose.DRAFT, 1000, 63)) == signed(0x9017AA95CA58AB5)
    assert float(uniforms(one(0, Purpose.TOKEN, 0))) == pytest.approx(0.5057395439086031, abs=1e-15)
    assert float(uniforms(one(42, Purpose.TAIL, 9), 151_935)) == pytest.approx(0.5233521909033118, abs=1e-15)
    assert float(uniforms(one(42, Purpose.TOKEN, 9), -1)) == pytest.approx(0.8929895088616461, abs=1e-15)


# --- rows -------------------------------------------------------------------------------------------------------


def normal_rows(seed: int, num_rows: int, vocab: int) -> FloatRows:
    """Distributions from almost flat to almost certain."""
    generator = np.random.default_rng(seed)
    spread = generator.choice([0.01, 0.3, 1.0, 2.0, 4.0, 10.0], size=(num_rows, 1))
    return np.asarray(generator.normal(size=(num_rows, vocab)) * spread, dtype=np.float32)


def tied_rows(seed: int, num_rows: int, vocab: int) -> FloatRows:
    """Whole numbers: every filter border lies among equal logits."""
    rows: FloatRows = np.round(normal_rows(seed, num_rows, vocab))
    return rows


def masked_rows(seed: int, num_rows: int, vocab: int) -> FloatRows:
    """Masks that leave from one token to almost all."""
    generator = np.random.default_rng(seed)
    rows = normal_rows(seed, num_rows, vocab)
    for row in rows:
        num_left = int(generator.choice([1, 2, min(40, vocab), vocab // 2 + 1]))
        left = generator.choice(vocab, size=num_left, replace=False)
        masked = np.full(vocab, -np.inf, dtype=np.float32)
        masked[left] = row[left]
        row[:] = masked
    return rows


def peaked_rows(seed: int, num_rows: int, vocab: int) -> FloatRows:
    """Like a language model's: a few likely tokens and a long tail."""
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(num_rows, vocab)) * 1.5
    good = generator.integers(0, vocab, size=(num_rows, 20))
    np.put_along_axis(rows, good, generator.uniform(6, 14, size=good.shape), axis=1)
    return np.asarray(rows, dtype=np.float32)


def steep_rows(seed: int, num_rows: int, vocab: int) -> FloatRows:
    """A constant ratio from each token to the next: heads, tails and top-p borders of every size."""
    generator = np.random.default_rng(seed)
    steps = generator.choice([0.01, 0.1, 0.7, 3.0], size=(num_rows, 1))
    return np.stack([generator.permutation(row) for row in -steps * np.arange(vocab)]).astype(np.float32)


def flat_rows(seed: int, num_rows: int, vocab: int) -> FloatRows:
    return np.full((num_rows, vocab), 1.25 * seed, dtype=np.float32)


FAMILIES = {f.__name__: f for f in (normal_rows, tied_rows, masked_rows, peaked_rows, steep_rows, flat_rows)}
FEATURES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1e-39},
    {"temperature": 0.01},
    {"temperature": 0.6},
    {"temperature": 2.5},
    {"temperature": 100.0},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 255, "temperature": 1.7},
    {"top_k": 5000},
    {"top_p": 1e-6},
    {"top_p": 0.5},
    {"top_p": 0.95, "temperature": 0.8},
    {"top_p": 0.9999},
    {"min_p": 0.0005},
    {"min_p": 0.05, "temperature": 1.5},
    {"min_p": 1.0},
    {"top_k": 60, "top_p": 0.9, "min_p": 0.02, "temperature": 0.9},
]
each_family = pytest.mark.parametrize("family", FAMILIES)


def host_token(row: FloatRows, params: SamplingParams, seed: int, position: int) -> int:
    shaper = Shaper(params, (), frozenset())
    if params.is_greedy:
        return shaper.greedy(row, ())
    with np.errstate(over="ignore", divide="ignore"):
        return host_choose(shaper.probs(row, ()), seed, position)


class Batch:
    """Rows of one family, each with its own parameters, seed and position."""

    def __init__(self, family: str, num_rows: int, vocab: int, features: Sequence[dict[str, Any]], seed: int) -> None:
        generator = random.Random(f"{family} {vocab} {seed}")
        self.rows = FAMILIES[family](seed, num_rows, vocab)
        self.params = [SamplingParams(**features[i % len(features)]) for i in range(num_rows)]
        self.seeds = [generator.getrandbits(64) for _ in range(num_rows)]
        self.positions = [generator.randrange(100_000) for _ in range(num_rows)]

    def on_device(self) -> tuple[torch.Tensor, RowParams, torch.Tensor, torch.Tensor]:
        seeds = torch.tensor([signed(seed) for seed in self.seeds])
        return torch.from_numpy(self.rows), RowParams.of(self.params), seeds, torch.tensor(self.positions)

    def host_tokens(self) -> list[int]:
        rows = zip(self.rows, self.params, self.seeds, self.positions, strict=True)
        return [host_token(*row) for row in rows]


@each_family
@pytest.mark.parametrize("vocab", [5, 63, 64, 300, 5000])
def test_tokens_equal_the_hosts(family: str, vocab: int) -> None:
    for seed in range(2):
        batch = Batch(family, 20 * len(FEATURES), vocab, FEATURES, seed)
        assert draw(*batch.on_device()).tolist() == batch.host_tokens()


@each_family
@pytest.mark.parametrize("vocab", [49_152, 151_936, 50_257])
def test_tokens_equal_the_hosts_in_real_vocabularies(family: str, vocab: int) -> None:
    batch = Batch(family, len(FEATURES), vocab, FEATURES, seed=vocab)
    assert draw(*batch.on_device()).tolist() == batch.host_tokens()


@each_family
def test_distributions_equal_the_hosts_to_the_bit(family: str) -> None:
    batch = Batch(family, 4 * len(FEATURES), 700, FEATURES, seed=3)
    logits, params, _, _ = batch.on_device()
    found = probs(logits, params).numpy()
    for i, row in enumerate(batch.rows):
        with np.errstate(over="ignore"):
            expected = Shaper(batch.params[i], (), frozenset()).probs(row, ())
        assert np.array_equal(found[i], expected), f"row {i}, {batch.params[i]}"


@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 65, 127, 1000, 50_257])
def test_sums_equal_the_hosts_to_the_bit(size: int) -> None:
    rows = np.random.default_rng(size).lognormal(sigma=4, size=(20, size)).astype(np.float32)
    assert total(torch.from_numpy(rows)).tolist() == [float(host_total(row)) for row in rows]


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    batch = Batch("peaked_rows", 60, 5000, FEATURES, seed=2)
    logits, params, seeds, positions = batch.on_device()
    together = draw(logits, params, seeds, positions)
    for i in range(60):
        one = torch.tensor([i])
        assert draw(logits[one], params.rows(one), seeds[one], positions[one]) == together[i]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    for vocab in (100, 5000, 50_257):
        rows = np.zeros((4, vocab), dtype=np.float32)
        rows[1, [vocab - 1, vocab - 3]] = 1
        rows[2, [7, 70, vocab - 1]] = 1
        rows[3, :] = -np.inf
        rows[3, vocab - 1] = -5
        logits = torch.from_numpy(rows)
        greedy = RowParams.of([SamplingParams(temperature=0.0)] * 4)
        tokens = draw(logits, greedy, torch.zeros(4).long(), torch.zeros(4).long())
        assert tokens.tolist() == greedy_tokens(logits).tolist() == [0, vocab - 3, 7, vocab - 1]


def test_top_p_on_its_border_and_among_equals() -> None:
    even = torch.zeros(1, 4)
    for top_p, num_kept in ((0.25, 1), (0.250001, 2), (0.5, 2), (0.75, 3), (0.7500001, 4), (0.999, 4)):
        found = probs(even, RowParams.of([SamplingParams(top_p=top_p)]))
        assert found[0].nonzero()[:, 0].tolist() == list(range(num_kept))


# --- bias, penalties, masks -----------------------------------------------------------------------------------


def padded(lists: Sequence[Sequence[Any]], filler: Any, dtype: torch.dtype) -> torch.Tensor:
    width = max(map(len, lists))
    return torch.tensor([[*values, *[filler] * (width - len(values))] for values in lists], dtype=dtype).view(-1, width)


def test_bias_penalties_and_masks_equal_the_hosts_to_the_bit() -> None:
    generator = random.Random(5)
    vocab, num_rows = 50, 300
    rows = normal_rows(9, num_rows, vocab)
    expected, lists = [], []
    for row in rows:
        params = SamplingParams(
            logit_bias={generator.randrange(vocab): generator.uniform(-9, 9) for _ in range(generator.randrange(4))},
            repetition_penalty=generator.choice([1.0, 1.3, 0.7]),
            presence_penalty=generator.choice([0.0, 0.6, -1.1]),
            frequency_penalty=generator.choice([0.0, 0.37]),
            min_tokens=generator.choice([0, 4]),
            bad_words=generator.choice([[], [[1, 2], [2, 1], [7]], [[t, 3] for t in range(vocab // 3)]]),
        )
        prompt = [generator.randrange(vocab) for _ in range(generator.randrange(8))]
        output = [generator.randrange(vocab) for _ in range(generator.randrange(8))]
        prefix = [generator.randrange(vocab // 3) for _ in range(generator.randrange(6))]
        stops = frozenset(generator.sample(range(vocab), generator.randrange(3)))
        shaper = Shaper(params, prompt, stops)
        shaper.advance(output)
        expected.append(shaper.adjusted(row, prefix))
        seen = sorted({*output, *(prompt if params.repetition_penalty != 1.0 else [])})
        counts = [output.count(token) for token in seen]
        lists.append((params, seen, counts, prefix, sorted(stops), len(output), shaper.forbidden(prefix)))

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32)

    params_of = [entry[0] for entry in lists]
    adjustments = Adjustments(
        bias_ids=padded([list(p.logit_bias) for p in params_of], -1, torch.int64),
        bias=padded([list(p.logit_bias.values()) for p in params_of], 0.0, torch.float32),
        seen_ids=padded([entry[1] for entry in lists], -1, torch.int64),
        output_counts=padded([entry[2] for entry in lists], 0, torch.int64),
        prefix=padded([entry[3] for entry in lists], -1, torch.int64),
        repetition_penalty=column([p.repetition_penalty for p in params_of]),
        presence_penalty=column([p.presence_penalty for p in params_of]),
        frequency_penalty=column([p.frequency_penalty for p in params_of]),
        stop_ids=padded([entry[4] for entry in lists], -1, torch.int64),
        num_forbidden=torch.tensor([entry[0].min_tokens - entry[5] for entry in lists]),
        forbidden_ids=padded([entry[6] for entry in lists], -1, torch.int64),
    )
    before = rows.copy()
    assert np.array_equal(adjust(torch.from_numpy(rows), adjustments), np.stack(expected))
    assert np.array_equal(rows, before)


def test_masks_equal_the_hosts_to_the_bit() -> None:
    vocab, rows = 258, normal_rows(4, 6, 258)
    constraint = Constraints(ByteTokenizer(), vocab).compile(StructuredOutput(regex="(ab|[c-f]+|\u00e9)*x"))
    outputs = [b"", b"ab", b"abcc", "é".encode()[:1], b"abx", b"a"]
    params = SamplingParams(logit_bias={97: 5.0, 3: 100.0}, structured=StructuredOutput(regex="any"))
    cases, expected = [], []
    for i, output in enumerate(outputs):
        matcher = constraint.matcher(frozenset({256})) if i % 3 != 2 else None
        shaper = Shaper(params, (), frozenset({256}), matcher)
        prefix = [*output]
        expected.append(shaper.adjusted(rows[i], prefix))
        request = Request(i, params, [0], 1, shaper, cast(Any, None), 100)
        cases.append((Case(request, Draft(prefix, "any")), len(prefix)))
    adjusted = adjust(torch.from_numpy(rows), _adjustments(cases, torch.device("cpu"))).numpy()
    assert np.array_equal(adjusted, np.stack(expected))
    assert np.isinf(adjusted[0]).sum() > 200 and not np.isinf(adjusted[2]).any()


# --- distribution -----------------------------------------------------------------------------------------------


def draws(weights: Sequence[float], seed: int, num_draws: int, **features: Any) -> NDArray[np.int64]:
    logits, found = torch.tensor([weights], dtype=torch.float64).log().float(), list[torch.Tensor]()
    for positions in torch.arange(num_draws).split(1000):  # a step's arrays stay in the CPU's cache
        params, seeds = RowParams.of([SamplingParams(**features)] * len(positions)), torch.full_like(positions, seed)
        found.append(draw(logits.expand(len(positions), -1), params, seeds, positions))
    return np.asarray(torch.cat(found).numpy())


@pytest.mark.parametrize(
    "weights",
    [[0.9, 0.05, 0, 0.03, 0.0199, 0.0001], [1] * 300, [0.6, *[1e-4] * 1000], [0.5**i for i in range(40)]],
    ids=["peaked", "flat", "heavy_tail", "steep"],
)
def test_tokens_follow_the_distribution(weights: list[float]) -> None:
    tokens = draws(weights, 2026, 30_000)
    assert chi_square_p(np.bincount(tokens, minlength=len(weights)), np.array(weights)) > SMALLEST_P


def test_filtered_tokens_follow_the_filtered_distribution() -> None:
    tokens = draws([8, 4, 3, 2, 1, 1, 1], 7, 30_000, top_k=5, top_p=0.8)
    assert chi_square_p(np.bincount(tokens, minlength=7), np.array([8, 4, 3, 0, 0, 0, 0])) > SMALLEST_P


def test_choices_that_tests_of_the_host_pin() -> None:
    """tests/decoding/test_sampling.py has the same numbers: a seed gives the same tokens on every backend."""
    choices = [1, 2, 0, 0, 2, 3, 2, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 1, 0, 1]
    assert draws([4, 3, 2, 1], 42, 20).tolist() == choices
    assert draws([0.6, *[1e-4] * 4000], 42, 8).tolist() == [0, 0, 0, 0, 0, 0, 1123, 0]


# --- suitable for a graph ---------------------------------------------------------------------------------------


def test_nothing_looks_at_data_on_the_way() -> None:
    """Meta tensors have no data: a branch on a value, or a shape that depends on one, is an error."""
    rows, vocab = 6, 20_001
    params = RowParams.of([SamplingParams(top_p=0.9)] * rows, "meta")
    words = torch.empty(rows, dtype=torch.int64, device="meta")
    logits = torch.empty(rows, vocab, device="meta")
    assert draw(logits, params, words, words).shape == (rows,)
    assert choose(probs(logits, params), words, words).dtype == torch.int64

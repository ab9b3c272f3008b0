"""Sampling and acceptance in the native library, compared with the host reference: same bits, same verdicts.

Rows are edge cases: many ties, whole vocabularies at one probability, a single remaining token, masses that reach top-p
exactly, temperatures at which all tokens or only one remain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from outpace.backends.native.library import load_library
from outpace.backends.native.verifier import NativeVerifier
from outpace.config import SamplingParams, SpeculationParams
from outpace.core import Case, Draft, Request, Verdict
from outpace.decoding import sampling
from outpace.decoding.masks import Mask, Masking, mask_of
from outpace.decoding.randomness import Purpose, key, uniform
from outpace.decoding.verification import HostVerifier, draw_weighted
from outpace.errors import BackendError

FloatRow = NDArray[np.float32]

try:
    LIBRARY = load_library()
except BackendError as reason:
    pytest.skip(str(reason), allow_module_level=True)

PROMPT = (1, 5, 5, 2)
STOP_IDS = frozenset({0, 3})
REAL_SIZES = (49_152, 151_936)
HOST = HostVerifier()


class Verifiers:
    """One verifier per vocabulary size, made on first use; two threads, to test the shared work too."""

    def __init__(self) -> None:
        self._made: dict[int, NativeVerifier] = {}

    def __getitem__(self, vocab_size: int) -> NativeVerifier:
        if vocab_size not in self._made:
            self._made[vocab_size] = NativeVerifier(LIBRARY, vocab_size, threads=2)
        return self._made[vocab_size]

    def close(self) -> None:
        for verifier in self._made.values():
            verifier.close()


@pytest.fixture(scope="module")
def native() -> Iterator[Verifiers]:
    verifiers = Verifiers()
    yield verifiers
    verifiers.close()


def request_with(params: SamplingParams, seed: int, num_emitted: int = 0) -> Request:
    request = Request(
        id=seed,
        params=params,
        prompt=PROMPT,
        seed=seed,
        shaper=sampling.Shaper(params, PROMPT, STOP_IDS),
        writer=cast(Any, None),
        max_length=10_000,
    )
    emitted = [i % 7 for i in range(num_emitted)]
    request.tokens += emitted
    request.shaper.advance(emitted)
    return request


# --- rows -------------------------------------------------------------------------------------------------------


def awkward_rows(vocab_size: int, rng: np.random.Generator) -> dict[str, FloatRow]:
    """Logits that have broken samplers before."""
    normal = rng.normal(size=vocab_size).astype(np.float32)
    peaked = normal * np.float32(3)
    peaked[rng.integers(vocab_size, size=4)] += 12
    masked = np.where(rng.random(vocab_size) < 0.9, np.float32(-np.inf), peaked)
    masked[rng.integers(4, vocab_size)] = 1.0
    lonely = np.full(vocab_size, -np.inf, np.float32)
    lonely[rng.integers(4, vocab_size)] = -7.5
    two = np.full(vocab_size, -300, np.float32)
    two[rng.integers(vocab_size, size=2)] = 4.25
    return {
        "normal": normal,
        "peaked": peaked,
        "masked": masked,
        "lonely": lonely,
        "two": two,
        "flat": np.zeros(vocab_size, np.float32),
        "few values": np.round(peaked),
        "halves": np.round(peaked * 2) / np.float32(2),
        "neighbours": np.where(rng.random(vocab_size) < 0.5, np.float32(5), np.nextafter(np.float32(5), np.float32(6))),
        "huge": peaked * np.float32(1e6),
        "tiny": peaked * np.float32(1e-6),
        "steps of two": -np.float32(np.log(2)) * np.arange(vocab_size, dtype=np.float32),
        "negative zero": np.where(rng.random(vocab_size) < 0.5, np.float32(-0.0), np.float32(0.0)),
    }


SHAPINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8},
    {"temperature": 5.0},
    {"temperature": 100.0},
    {"temperature": 1e-3},
    {"temperature": 1e-40},
    {"temperature": 0.8, "top_k": 1},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 2.0, "top_k": 1000},
    {"temperature": 1.0, "top_k": 2**40},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.999},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.75},
    {"temperature": 1.0, "top_p": 1 - 2**-53},
    {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 3.0, "min_p": 1e-6},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "min_p": 1e-45},
    {"temperature": 1.2, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"temperature": 0.8, "logit_bias": {2: 5.0, 4: -100.0}, "min_tokens": 20, "top_p": 0.8},
    {"temperature": 0.0, "logit_bias": {2: 5.0}, "min_tokens": 20, "repetition_penalty": 1.1},
]


def name_of(shaping: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in shaping.items())


def assert_same_bits(found: FloatRow, expected: FloatRow) -> None:
    assert found.dtype == expected.dtype == np.float32
    differs = np.flatnonzero(found.view(np.uint32) != expected.view(np.uint32))
    assert differs.size == 0, (differs[:5], found[differs[:5]], expected[differs[:5]])


@pytest.mark.parametrize("shaping", SHAPINGS[1:], ids=name_of)
@pytest.mark.parametrize("vocab_size", [7, 8, 61, 64, 1003, *REAL_SIZES])
def test_probabilities_are_the_same_bits(native: Verifiers, vocab_size: int, shaping: dict[str, Any]) -> None:
    request = request_with(SamplingParams(**shaping | {"temperature": shaping["temperature"] or 1.0}), seed=1)
    for logits in awkward_rows(vocab_size, np.random.default_rng(vocab_size)).values():
        expected = request.shaper.probs(logits, ())
        assert_same_bits(native[vocab_size].probs(request, (), logits), expected)


@given(
    data=st.data(),
    vocab_size=st.integers(6, 200),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 1.9, 30.0]),
    top_k=st.integers(0, 30),
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 1.0, exclude_min=True)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)
@settings(max_examples=200, deadline=None)
def test_probabilities_are_the_same_bits_for_any_row(
    native: Verifiers, data: st.DataObject, vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    number = st.one_of(st.integers(-4, 4).map(float), st.floats(-50, 50, width=32), st.just(float("-inf")))
    logits = np.array(data.draw(st.lists(number, min_size=vocab_size, max_size=vocab_size)), np.float32)
    logits[data.draw(st.integers(0, vocab_size - 1))] = 1.5  # at least one token must remain
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    request = request_with(params, seed=3)
    assert_same_bits(native[vocab_size].probs(request, (), logits), request.shaper.probs(logits, ()))


# --- plain rows -------------------------------------------------------------------------------------------------


def both(native: Verifiers, cases: Sequence[Case], logits: FloatRow) -> list[Verdict]:
    expected = HOST.verify(cases, logits)
    assert native[logits.shape[1]].verify(cases, logits) == expected
    return expected


@pytest.mark.parametrize("shaping", SHAPINGS, ids=name_of)
@pytest.mark.parametrize("vocab_size", [7, 61, 1003, *REAL_SIZES])
def test_plain_rows_say_the_same_tokens(native: Verifiers, vocab_size: int, shaping: dict[str, Any]) -> None:
    """All edge-case rows in one batch, at several positions each."""
    logits = list(awkward_rows(vocab_size, np.random.default_rng(vocab_size + 1)).values())
    params = SamplingParams(**shaping)
    for seed in range(2 if vocab_size > 2000 else 20):
        cases = [Case(request_with(params, 31 * seed + i, num_emitted=i), None) for i in range(len(logits))]
        both(native, cases, np.stack(logits))


@pytest.mark.parametrize("shaping", SHAPINGS, ids=name_of)
def test_a_draft_model_draws_the_same_tokens(native: Verifiers, shaping: dict[str, Any]) -> None:
    """One token after the other, each counted as emitted."""
    request = request_with(SamplingParams(**shaping), seed=11, num_emitted=3)
    prefix: list[int] = []
    for logits in awkward_rows(300, np.random.default_rng(2)).values():
        token = HOST.own_token(request, prefix, logits)
        assert native[300].own_token(request, prefix, logits) == token
        assert_same_bits(native[300].probs(request, prefix, logits), HOST.probs(request, prefix, logits))
        prefix.append(token)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.6])
def test_very_many_draws_are_the_same(native: Verifiers, temperature: float) -> None:
    """Realistic rows, in which both the likely tokens and the tail win often enough to test both."""
    vocab_size, num_rows, num_rounds = 2000, 50, 100
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=temperature)
    from_tail = 0
    for round_ in range(num_rounds):
        logits = (rng.normal(size=(num_rows, vocab_size)) * 2).astype(np.float32)
        logits[:, :5] += 7
        cases = [Case(request_with(params, 1000 * round_ + i), None) for i in range(num_rows)]
        verdicts = both(native, cases, logits)
        from_tail += sum(verdict.tokens[0] >= 5 for verdict in verdicts)
    assert from_tail > 100


def test_seeds_and_positions_use_all_their_bits(native: Verifiers) -> None:
    logits = np.random.default_rng(5).normal(size=(1, 300)).astype(np.float32)
    tokens = set()
    for seed in (0, 1, 2**31, 2**32 + 1, 2**63, 2**64 - 1):
        request = request_with(SamplingParams(), seed, num_emitted=seed % 50)
        tokens.add(both(native, [Case(request, None)], logits)[0].tokens[0])
    assert len(tokens) > 3


def test_a_row_does_not_depend_on_its_batch(native: Verifiers) -> None:
    logits = (np.random.default_rng(6).normal(size=(24, 49_152)) * 3).astype(np.float32)
    cases = [Case(request_with(SamplingParams(**shaping), i), None) for i, shaping in enumerate(SHAPINGS[:24])]
    verifier = native[49_152]
    together = verifier.verify(cases, logits)
    assert together == [verifier.verify([case], logits[i : i + 1])[0] for i, case in enumerate(cases)]
    alone = NativeVerifier(LIBRARY, 49_152, threads=1)
    assert alone.verify(cases, logits) == together
    alone.close()


# --- drafts -----------------------------------------------------------------------------------------------------


def draft_for(request: Request, logits: FloatRow, depth: int, rng: np.random.Generator, *, neural: bool) -> Draft:
    """Draft tokens that are often right: from the target's rows with added noise."""
    draft = Draft([], "draft", [] if neural else None)
    for i in range(depth):
        noisy = logits[i] + rng.normal(scale=0.3, size=logits[i].shape).astype(np.float32)
        if request.params.is_greedy:
            draft.tokens.append(request.shaper.greedy(noisy, draft.tokens))
            continue
        probs = request.shaper.probs(noisy, draft.tokens)
        if draft.probs is None:
            draft.tokens.append(sampling.choose(probs, request.seed, len(request.tokens) + i))
        else:
            u = uniform(key(request.seed, Purpose.DRAFT, len(request.tokens), i))
            draft.tokens.append(draw_weighted(probs, u))
            draft.probs = [*draft.probs, probs]
    return draft


DRAFTED: list[tuple[str, dict[str, Any], bool]] = [
    ("greedy", {"temperature": 0.0}, False),
    ("seeded", {"temperature": 0.8, "seed": 5}, False),
    ("seeded, shaped", {"temperature": 0.9, "seed": 5, "top_p": 0.9, "min_tokens": 30, "presence_penalty": 0.7}, False),
    ("one-hot", {"temperature": 0.8, "top_k": 20}, False),
    ("block", {"temperature": 0.9}, True),
    ("block, shaped", {"temperature": 0.9, "top_k": 30, "min_p": 0.01, "repetition_penalty": 1.2}, True),
    ("block, peaked", {"temperature": 0.05}, True),
    ("rejection", {"temperature": 0.9, "acceptance": "rejection"}, True),
    ("rejection, shaped", {"temperature": 0.8, "acceptance": "rejection", "top_p": 0.8, "logit_bias": {3: 2.0}}, True),
]


def drafted_params(options: dict[str, Any]) -> SamplingParams:
    options = dict(options)
    speculation = SpeculationParams(acceptance=options.pop("acceptance", "exact"))
    return SamplingParams(speculation=speculation, **options)


@pytest.mark.parametrize(("vocab_size", "num_seeds"), [(9, 150), (300, 40), (49_152, 3), (151_936, 1)])
@pytest.mark.parametrize(("name", "options", "neural"), DRAFTED, ids=[name for name, _, _ in DRAFTED])
def test_drafts_get_the_same_verdicts(
    native: Verifiers, name: str, options: dict[str, Any], neural: bool, vocab_size: int, num_seeds: int
) -> None:
    rng = np.random.default_rng([vocab_size, len(name)])
    params = drafted_params(options)
    num_accepted = num_drafted = 0
    for seed in range(num_seeds):
        cases, rows = [], []
        for depth in (1, 4, 0, 7):
            logits = (rng.normal(size=(depth + 1, vocab_size)) * 2).astype(np.float32)
            logits[:, rng.integers(vocab_size)] += 6
            request = request_with(params, 13 * seed + depth, num_emitted=depth)
            draft = draft_for(request, logits, depth, rng, neural=neural) if depth else None
            cases.append(Case(request, draft))
            rows.append(logits)
        for verdict in both(native, cases, np.concatenate(rows)):
            num_accepted += verdict.num_accepted
            num_drafted += verdict.num_drafted
    assert num_accepted > 0
    if vocab_size <= 300:
        assert num_accepted < num_drafted


@pytest.mark.parametrize("acceptance", ["exact", "rejection"])
def test_a_draft_that_is_the_target_leaves_no_residual(native: Verifiers, acceptance: str) -> None:
    """Rounding makes target - draft exactly zero; the token is then drawn from the target."""
    rng = np.random.default_rng(8)
    params = drafted_params({"temperature": 1.0, "acceptance": acceptance})
    for seed in range(100):
        logits = rng.normal(size=(4, 20)).astype(np.float32)
        request = request_with(params, seed)
        draft = Draft([], "draft", [request.shaper.probs(logits[i], ()) for i in range(3)])
        draft.tokens = [int(rng.choice(20)) for _ in range(3)]
        both(native, [Case(request, draft)], logits)


def test_an_empty_draft_with_distributions_is_judged(native: Verifiers) -> None:
    logits = np.random.default_rng(9).normal(size=(2, 50)).astype(np.float32)
    for acceptance in ("exact", "rejection"):
        request = request_with(drafted_params({"acceptance": acceptance}), 4)
        both(native, [Case(request, Draft([], "draft", [])), Case(request, None)], logits)


def test_lossy_requests_share_a_step_with_others(native: Verifiers) -> None:
    rng = np.random.default_rng(10)
    lossy = SamplingParams(speculation=SpeculationParams(acceptance="threshold", threshold=0.01))
    typical = SamplingParams(speculation=SpeculationParams(acceptance="typical"))
    num_lenient = 0
    for seed in range(30):
        logits = (rng.normal(size=(10, 40)) * 2).astype(np.float32)
        draft = Draft([int(rng.integers(40)) for _ in range(2)], "ngram")
        cases = [
            Case(request_with(params, seed + i), draft if i < 3 else None)
            for i, params in enumerate([lossy, SamplingParams(), typical, SamplingParams(temperature=0.0)])
        ]
        num_lenient += sum(verdict.num_lenient for verdict in both(native, cases, logits))
    assert num_lenient > 0


def test_prompt_steps_have_nothing_to_verify(native: Verifiers) -> None:
    assert native[40].verify([], np.empty((0, 40), np.float32)) == []


# --- masks ------------------------------------------------------------------------------------------------------


class FixedMatcher:
    """A grammar with the same mask everywhere. Counts how often the mask is asked for."""

    def __init__(self, members: Sequence[int], num_tokens: int, *, tells_only: bool = True) -> None:
        self.members, self._mask, self.num_masks = {*members}, mask_of(members, num_tokens), 0
        self._tells_only = tells_only

    def mask(self, prefix: Sequence[int] = ()) -> Mask:
        self.num_masks += 1
        return self._mask

    def masked(self, logits: FloatRow, prefix: Sequence[int]) -> FloatRow:
        return Masking()(logits, self._mask)

    def only_token(self, prefix: Sequence[int] = ()) -> int | None:
        return next(iter(self.members)) if self._tells_only and len(self.members) == 1 else None

    def allows(self, token: int, prefix: Sequence[int] = ()) -> bool:
        return token in self.members


def constrained(request: Request, matcher: FixedMatcher) -> Request:
    request.matcher = request.shaper.matcher = cast(Any, matcher)
    request.shaper.may_adjust = True
    return request


def some_members(vocab_size: int, rng: np.random.Generator) -> list[list[int]]:
    kept = [*range(vocab_size)]
    return [
        [int(rng.integers(4, vocab_size))],
        sorted({int(i) for i in rng.integers(4, vocab_size, size=5)}),
        [*np.flatnonzero(rng.random(vocab_size) < 0.5).tolist(), vocab_size - 1],
        kept,
        kept[: vocab_size // 2 + 1],
    ]


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, where infinity meets infinity
@pytest.mark.parametrize("shaping", SHAPINGS, ids=name_of)
@pytest.mark.parametrize("vocab_size", [7, 64, 1003, 49_152])
def test_masks_are_read_as_numpy_applies_them(native: Verifiers, vocab_size: int, shaping: dict[str, Any]) -> None:
    rng = np.random.default_rng(vocab_size)
    rows = {name: row for name, row in awkward_rows(vocab_size, rng).items() if np.isfinite(row).all()}
    params = SamplingParams(**shaping)
    for seed, members in enumerate(some_members(vocab_size, rng)):
        matchers = [FixedMatcher(members, vocab_size, tells_only=tells_only) for tells_only in (True, False)]
        cases = [
            Case(constrained(request_with(params, 31 * seed + i, num_emitted=i), matchers[i % 2]), None)
            for i in range(len(rows))
        ]
        verdicts = both(native, cases, np.stack([*rows.values()]))
        assert {verdict.tokens[0] for verdict in verdicts} <= matchers[0].members
        request = cases[0].request
        for row in rows.values():
            own_token = native[vocab_size].own_token(request, [], row)
            assert own_token == HOST.own_token(request, [], row)
            assert_same_bits(native[vocab_size].probs(request, [], row), request.shaper.probs(row, []))


@pytest.mark.parametrize(("vocab_size", "num_seeds"), [(9, 100), (300, 40), (49_152, 2)])
@pytest.mark.parametrize(("name", "options", "neural"), DRAFTED, ids=[name for name, _, _ in DRAFTED])
def test_constrained_drafts_get_the_same_verdicts(
    native: Verifiers, name: str, options: dict[str, Any], neural: bool, vocab_size: int, num_seeds: int
) -> None:
    rng = np.random.default_rng([vocab_size, len(name)])
    num_accepted = 0
    for seed in range(num_seeds):
        cases, rows = [], []
        for depth in (1, 4, 0, 7):
            logits = (rng.normal(size=(depth + 1, vocab_size)) * 2).astype(np.float32)
            logits[:, rng.integers(vocab_size)] += 6
            members = some_members(vocab_size, rng)[(seed + depth) % 5]
            request = request_with(drafted_params(options), 13 * seed + depth, num_emitted=depth)
            constrained(request, FixedMatcher(members, vocab_size))
            draft = draft_for(request, logits, depth, rng, neural=neural) if depth else None
            cases.append(Case(request, draft))
            rows.append(logits)
        num_accepted += sum(verdict.num_accepted for verdict in both(native, cases, np.concatenate(rows)))
    assert num_accepted > 0


def test_a_mask_is_computed_only_where_it_changes_the_token(native: Verifiers) -> None:
    logits = np.full((1, 300), -5, np.float32)
    logits[0, [7, 8]] = 9, 8
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.6)):
        num_masks, num_tokens = 0, set[int]()
        for seed in range(50):
            matcher = FixedMatcher([5, 7, 8, 200], 300)
            verdicts = native[300].verify([Case(constrained(request_with(params, seed), matcher), None)], logits)
            num_masks += matcher.num_masks
            num_tokens.add(verdicts[0].tokens[0])
        assert num_masks <= 5
        assert num_tokens == ({7} if params.is_greedy else {7, 8})
        matcher = FixedMatcher([5, 8, 200], 300)  # without the likeliest
        both(native, [Case(constrained(request_with(params, 1), matcher), None)], logits)
        assert matcher.num_masks == 1


def test_a_pick_does_not_hold_where_the_likeliest_token_is_forbidden(native: Verifiers) -> None:
    """Without it, other tokens are likely enough to be drawn one by one, with noise of their own, not as a group."""
    probs = np.full(300, 0.0008, np.float32)
    probs[[7, 8]] = 1.0, 0.5
    logits = np.log(probs)[None]
    num_kept = 0
    for seed in range(200):
        request = request_with(SamplingParams(), seed)
        [free] = both(native, [Case(request, None)], logits)
        [masked] = both(native, [Case(constrained(request, FixedMatcher([*range(8, 300)], 300)), None)], logits)
        num_kept += free.tokens == masked.tokens == [8]
    assert num_kept > 20


def test_a_pick_out_of_the_group_of_unlikely_tokens_does_not_hold(native: Verifiers) -> None:
    """A mask that allows the pick may leave so little of its group that the group is no longer drawn."""
    probs = np.full(300, 0.0009, np.float32)
    probs[7] = 1.0
    logits = np.log(probs)[None]
    num_from_group = 0
    for seed in range(300):
        request = constrained(request_with(SamplingParams(), seed), FixedMatcher([*range(100)], 300))
        num_from_group += both(native, [Case(request, None)], logits)[0].tokens != [7]
    assert num_from_group > 5


def test_logits_are_not_read_where_one_token_is_allowed(native: Verifiers) -> None:
    logits = np.full((2, 300), np.nan, np.float32)
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.6, top_p=0.9)):
        matcher = FixedMatcher([200], 300)
        case = Case(constrained(request_with(params, 3), matcher), Draft([200], "grammar"))
        assert native[300].verify([case], logits) == [Verdict([200, 200], 1, 1)]
        assert matcher.num_masks == 0


def test_a_bad_word_is_not_emitted_even_where_the_grammar_allows_nothing_else(native: Verifiers) -> None:
    logits = np.zeros((1, 300), np.float32)
    params = SamplingParams(temperature=0.0, bad_words=((200,),))
    request = constrained(request_with(params, 3), FixedMatcher([200], 300))
    assert both(native, [Case(request, None)], logits)[0].tokens != [200]


def test_a_mask_for_a_smaller_vocabulary_is_refused(native: Verifiers) -> None:
    request = constrained(request_with(SamplingParams(), 1), FixedMatcher([1, 2], 40))
    with pytest.raises(ValueError, match="a mask of 64 tokens does not fit a vocabulary of 300"):
        native[300].verify([Case(request, None)], -np.arange(300, dtype=np.float32)[None])


# --- errors -----------------------------------------------------------------------------------------------------


def test_a_token_outside_the_vocabulary_is_refused(native: Verifiers) -> None:
    logits = np.zeros((2, 40), np.float32)
    request = request_with(SamplingParams(), 1)
    with pytest.raises(BackendError, match="token 40 is not in the vocabulary"):
        native[40].verify([Case(request, Draft([40], "ngram"))], logits)


def test_draft_probabilities_of_another_size_are_refused(native: Verifiers) -> None:
    logits = np.zeros((2, 40), np.float32)
    request = request_with(SamplingParams(), 1)
    with pytest.raises(ValueError, match="39 numbers"):
        native[40].verify([Case(request, Draft([1], "draft", [np.full(39, 1 / 39, np.float32)]))], logits)


def test_logits_and_distributions_that_do_not_fit_the_cases_are_refused(native: Verifiers) -> None:
    request = request_with(SamplingParams(), 1)
    with pytest.raises(ValueError, match="do not fit 2 rows of 40"):
        native[40].verify([Case(request, Draft([1], "ngram"))], np.zeros((1, 40), np.float32))
    with pytest.raises(ValueError, match="2 tokens came with 1"):
        draft = Draft([1, 2], "draft", [np.full(40, 1 / 40, np.float32)])
        native[40].verify([Case(request, draft)], np.zeros((3, 40), np.float32))


def test_a_closed_verifier_says_so() -> None:
    verifier = NativeVerifier(LIBRARY, 40, threads=1)
    verifier.close()
    with pytest.raises(BackendError, match="is closed"):
        verifier.verify([Case(request_with(SamplingParams(), 1), None)], np.zeros((1, 40), np.float32))


def test_rows_that_are_not_numbers_are_survived(native: Verifiers) -> None:
    """NaN logits have no right answer, but the result must be a valid token."""
    nan, inf = np.float32(np.nan), np.float32(np.inf)
    for value in (nan, inf, -inf):
        logits = np.full((1, 100), value, np.float32)
        for shaping in SHAPINGS:
            request = request_with(SamplingParams(**shaping), 1)
            verdict = native[100].verify([Case(request, None)], logits)[0]
            assert 0 <= verdict.tokens[0] < 100

"""The production path from float32 logits to verdicts, over whole generations of a toy model.

The exact tests prove the rules; these tests show that production uses those rules, with its own noise,
rounding, shaping and addressing, over several steps of changing depth. Unseeded requests are compared with the
target's joint distribution by chi-square at fixed seeds, and the same comparison must catch a draft that
misreports its distribution. Seeded and greedy requests must emit the same tokens for any draft.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from outpace.config import SamplingParams, SpeculationParams
from outpace.core import Case, Draft, Request, Verdict
from outpace.decoding.randomness import Purpose, key, uniform
from outpace.decoding.sampling import Shaper, choose
from outpace.decoding.tree import ROOT, likely_tree
from outpace.decoding.verification import Dice, draw_weighted, matches_own_tokens, verify
from tests.goodness import SMALLEST_P, fits

FloatRow = NDArray[np.float32]
Context = tuple[int, ...]
Drafter = Callable[[Request, int], Draft | None]

VOCAB = 5
PROMPT = (0, 3)
STOP_IDS = frozenset({4})


@cache
def target_logits(context: Context) -> FloatRow:
    """Arbitrary logits, different for every context."""
    return np.random.default_rng([1, *context]).normal(size=VOCAB).astype(np.float32) * np.float32(1.5)


@cache
def draft_logits(context: Context) -> FloatRow:
    return target_logits(context) + np.random.default_rng([2, *context]).normal(size=VOCAB).astype(np.float32)


def make_request(params: SamplingParams, seed: int) -> Request:
    return Request(
        id=seed,
        params=params,
        prompt=PROMPT,
        seed=seed,
        shaper=Shaper(params, PROMPT, STOP_IDS),
        writer=cast(Any, None),
        max_length=1000,
    )


# --- drafters ---------------------------------------------------------------------------------------------------


def no_draft(request: Request, depth: int) -> None:
    return None


def neural(request: Request, depth: int, *, drawn_at: float = 1.0) -> Draft:
    """Drafts like a draft model, with the engine's noise addresses. `drawn_at` is a temperature that the reported
    probs do not include.
    """
    draft = Draft([], "draft", None if matches_own_tokens(request.params) else [])
    anchor = len(request.tokens)
    for offset in range(depth):
        logits = draft_logits((*request.tokens, *draft.tokens))
        if request.params.is_greedy:
            draft.tokens.append(request.shaper.greedy(logits, draft.tokens))
            continue
        probs = request.shaper.probs(logits, draft.tokens)
        if draft.probs is None:
            draft.tokens.append(choose(probs, request.seed, anchor + offset))
        else:
            noise = uniform(key(request.seed, Purpose.DRAFT, anchor, offset))
            draft.probs = [*draft.probs, probs]
            draft.tokens.append(draw_weighted(probs ** np.float32(1 / drawn_at), noise))
    return draft


def dishonest(request: Request, depth: int) -> Draft:
    return neural(request, depth, drawn_at=0.8)


def one_hot(request: Request, depth: int) -> Draft:
    """A draft without a distribution: the draft model's likeliest tokens."""
    tokens: list[int] = []
    for _ in range(depth):
        tokens.append(int(draft_logits((*request.tokens, *tokens)).argmax()))
    return Draft(tokens, "suffix")


def branched(request: Request, depth: int) -> Draft:
    """A tree of one more guess at each level than it is deep."""
    tree = likely_tree([0.5] * depth, 2 * depth)
    tokens = [0] * len(tree)
    for node in (ROOT, *range(len(tree))):
        text = [tokens[each] for each in tree.path(node)]
        ranked = (-draft_logits((*request.tokens, *text))).argsort().tolist()
        for child, token in zip(tree.children(node), ranked, strict=False):
            tokens[child] = token
    return Draft(tokens, "head", tree=tree)


def junk(request: Request, depth: int) -> Draft:
    return Draft([(len(request.tokens) * 7 + i) % VOCAB for i in range(depth)], "ngram")


def perfect(request: Request, depth: int) -> Draft:
    """The target itself as draft, with its own noise."""
    tokens: list[int] = []
    for i in range(depth):
        logits = target_logits((*request.tokens, *tokens))
        if request.params.is_greedy:
            tokens.append(request.shaper.greedy(logits, tokens))
        else:
            probs = request.shaper.probs(logits, tokens)
            tokens.append(choose(probs, request.seed, len(request.tokens) + i))
    return Draft(tokens, "draft")


def alternating(request: Request, depth: int) -> Draft | None:
    """Proposers change from step to step, as a policy would change them."""
    drafters: list[Drafter] = [neural, one_hot, no_draft]
    return drafters[len(request.tokens) % 3](request, depth)


# --- generation -------------------------------------------------------------------------------------------------


def take_step(request: Request, draft: Draft | None) -> Verdict:
    case = Case(request, draft)
    rows = [target_logits((*request.tokens, *case.prefix(i))) for i in range(len(case.tokens) + 1)]
    verdict = verify(request, draft, np.stack(rows))
    request.tokens += verdict.tokens
    request.shaper.advance(verdict.tokens)
    request.spec.add(verdict, draft.proposer if draft is not None else "none")
    return verdict


def generate(
    params: SamplingParams, seed: int, drafter: Drafter, length: int, depths: Sequence[int] = (3, 2)
) -> tuple[Context, Request]:
    """The first `length` tokens; the depth of a step depends on where it begins."""
    request = make_request(params, seed)
    while request.num_output < length:
        take_step(request, drafter(request, depths[len(request.tokens) % len(depths)]))
    return tuple(request.tokens[len(PROMPT) :][:length]), request


def joint_law(params: SamplingParams, length: int) -> dict[Context, float]:
    """The joint distribution of plain decoding, from the same float32 distributions."""
    shaper = Shaper(params, PROMPT, STOP_IDS)
    law: dict[Context, float] = {(): 1.0}
    for _ in range(length):
        longer: dict[Context, float] = {}
        for tokens, probability in law.items():
            probs = shaper.probs(target_logits((*PROMPT, *tokens)), tokens)
            longer |= {(*tokens, t): probability * float(probs[t]) for t in np.flatnonzero(probs).tolist()}
        law = longer
    return law


def sampling(acceptance: Any = "exact", *, threshold: float | None = None, **params: Any) -> SamplingParams:
    speculation = SpeculationParams(acceptance=acceptance, threshold=threshold)
    return SamplingParams(speculation=speculation, **params)


# --- unseeded requests: the target's distribution -----------------------------------------------------------------

NUM_REQUESTS = 4000
LENGTH = 4
SHAPED: dict[str, Any] = {
    "temperature": 0.9,
    "top_k": 4,
    "top_p": 0.95,
    "presence_penalty": 0.8,
    "repetition_penalty": 1.2,
    "min_tokens": 2,
}


def p_of_fit(params: SamplingParams, drafter: Drafter) -> tuple[float, float]:
    """The fit of many generations to plain decoding's joint distribution, and the mean tokens per step."""
    outputs, num_steps, num_accepted = [], 0, 0
    for seed in range(NUM_REQUESTS):
        tokens, request = generate(params, 1_000_003 * seed + 17, drafter, LENGTH)
        outputs.append(tokens)
        num_steps += request.spec.steps
        num_accepted += request.spec.num_accepted
    return fits(outputs, joint_law(params, LENGTH)), (num_accepted + num_steps) / num_steps


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
@pytest.mark.parametrize("shaping", [{}, SHAPED], ids=["plain", "shaped"])
def test_neural_drafts_leave_the_targets_joint_law(acceptance: str, shaping: dict[str, Any]) -> None:
    p, tokens_per_step = p_of_fit(sampling(acceptance, **shaping), neural)
    assert p > SMALLEST_P
    assert tokens_per_step > 1.5  # else nothing was accepted and the test is empty


@pytest.mark.parametrize("drafter", [no_draft, one_hot, alternating, branched], ids=lambda drafter: drafter.__name__)
def test_other_drafts_leave_the_targets_joint_law(drafter: Drafter) -> None:
    p, _ = p_of_fit(sampling(), drafter)
    assert p > SMALLEST_P


def test_the_comparison_catches_a_draft_that_was_drawn_at_another_temperature() -> None:
    p, _ = p_of_fit(sampling("rejection"), dishonest)
    assert p < SMALLEST_P / 100


def test_exact_acceptance_of_a_neural_draft_is_block_verification() -> None:
    for seed in range(50):
        by_name = generate(sampling("block"), seed, neural, 8)[0]
        assert generate(sampling("exact"), seed, neural, 8)[0] == by_name


def test_a_single_drafted_token_meets_the_same_verdict_under_block_and_token_by_token() -> None:
    for seed in range(200):
        block = generate(sampling("block"), seed, neural, 6, depths=[1])[0]
        assert generate(sampling("rejection"), seed, neural, 6, depths=[1])[0] == block


def test_block_verification_accepts_more_than_rejection_in_production_too() -> None:
    def num_accepted(acceptance: str) -> int:
        params = sampling(acceptance)
        return sum(generate(params, seed, neural, 20, depths=[3])[1].spec.num_accepted for seed in range(150))

    assert num_accepted("block") > num_accepted("rejection")


def test_a_draft_may_be_empty() -> None:
    request = make_request(sampling(), 3)
    for draft in (None, Draft([], "draft"), Draft([], "draft", [])):
        verdict = take_step(request, draft)
        assert (len(verdict.tokens), verdict.num_drafted, verdict.num_accepted) == (1, 0, 0)


def test_a_token_the_target_forbids_is_never_said() -> None:
    params = sampling(min_tokens=6)
    for acceptance in ("block", "rejection"):
        for seed in range(300):
            tokens, _ = generate(sampling(acceptance, min_tokens=6), seed, neural, 6)
            assert not STOP_IDS.intersection(tokens)
    for drafter in (junk, one_hot):
        assert not any(STOP_IDS.intersection(generate(params, s, drafter, 6)[0]) for s in range(100))


# --- seeded and greedy requests: the same tokens ------------------------------------------------------------------

REPLAYED: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "filters": {"temperature": 1.4, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "min_tokens": {"min_tokens": 9, "logit_bias": {4: 3.0}},
    "shaped": SHAPED,
    "greedy": {"temperature": 0.0},
    "greedy_with_penalties": {"temperature": 0.0, "frequency_penalty": 0.6, "repetition_penalty": 1.3},
}
DRAFTERS: list[Drafter] = [neural, one_hot, junk, perfect, alternating, branched]


@pytest.mark.parametrize("shaping", REPLAYED.values(), ids=REPLAYED.keys())
@pytest.mark.parametrize("acceptance", ["exact", "rejection", "block"])
def test_a_seed_replays_whatever_is_drafted(shaping: dict[str, Any], acceptance: str) -> None:
    for seed in range(4):
        params = sampling(acceptance, seed=seed, **shaping)
        plain, _ = generate(params, seed, no_draft, 16)
        for drafter in DRAFTERS:
            for depths in ([1], [2, 3], [6]):
                assert generate(params, seed, drafter, 16, depths)[0] == plain


def test_seeds_say_different_things() -> None:
    outputs = {generate(sampling(seed=seed), seed, no_draft, 16)[0] for seed in range(30)}
    assert len(outputs) == 30


@pytest.mark.parametrize("shaping", [{}, {"frequency_penalty": 0.6}], ids=["plain", "penalties"])
def test_greedy_output_is_the_argmax_at_every_position(shaping: dict[str, Any]) -> None:
    params = sampling(temperature=0.0, **shaping)
    shaper = Shaper(params, PROMPT, STOP_IDS)
    expected: list[int] = []
    while len(expected) < 16:
        expected.append(shaper.greedy(target_logits((*PROMPT, *expected)), expected))
    for drafter in (no_draft, *DRAFTERS):
        assert generate(params, 0, drafter, 16)[0] == tuple(expected)


def test_a_perfect_draft_is_accepted_whole() -> None:
    for params in (sampling(seed=5), sampling(temperature=0.0), sampling(seed=5, **SHAPED)):
        _, request = generate(params, 5, perfect, 40, depths=[4])
        assert request.spec.num_accepted == request.spec.num_drafted == 4 * request.spec.steps


# --- lossy requests -----------------------------------------------------------------------------------------------

each_lossy = pytest.mark.parametrize("acceptance", ["typical", "threshold"])


def lossy(acceptance: str, **params: Any) -> SamplingParams:
    return sampling(acceptance, threshold=0.2 if acceptance == "threshold" else None, **params)


@each_lossy
def test_lossy_acceptance_is_exact_at_temperature_zero(acceptance: str) -> None:
    plain, _ = generate(sampling(temperature=0.0), 0, no_draft, 16)
    for drafter in DRAFTERS:
        tokens, request = generate(lossy(acceptance, temperature=0.0), 0, drafter, 16)
        assert tokens == plain
        assert request.spec.num_lenient == 0


@each_lossy
def test_lossy_acceptance_reports_what_it_took_leniently_and_differs_from_the_target(acceptance: str) -> None:
    num_lenient, num_different = Counter[bool](), Counter[bool]()
    for seed in range(40):
        plain, _ = generate(sampling(seed=seed), seed, no_draft, 16)
        tokens, request = generate(lossy(acceptance, seed=seed), seed, one_hot, 16)
        num_lenient[request.spec.num_lenient > 0] += 1
        num_different[tokens != plain] += 1
        assert request.spec.num_lenient > 0 or tokens == plain
        assert request.spec.num_lenient <= request.spec.num_accepted
    assert num_lenient[True] > 20
    assert num_different[True] > 20


@each_lossy
def test_lossy_acceptance_never_says_what_the_target_forbids(acceptance: str) -> None:
    for seed in range(50):
        tokens, _ = generate(lossy(acceptance, min_tokens=8, seed=seed), seed, junk, 8)
        assert not STOP_IDS.intersection(tokens)


def test_a_threshold_of_zero_still_respects_masks() -> None:
    for seed in range(20):
        params = sampling("threshold", threshold=0.0, min_tokens=8, seed=seed)
        assert not STOP_IDS.intersection(generate(params, seed, junk, 8)[0])


def test_a_threshold_of_one_is_exact() -> None:
    for seed in range(20):
        plain, _ = generate(sampling(seed=seed), seed, no_draft, 16)
        assert generate(sampling("threshold", threshold=1.0, seed=seed), seed, one_hot, 16)[0] == plain


# --- dice ---------------------------------------------------------------------------------------------------------


def test_draw_weighted_never_draws_weight_zero() -> None:
    weights = np.array([0, 0, 0.25, 0, 1e-30, 0.5, 0, 0], dtype=np.float32)
    edges = [0.0, 5e-324, 2.0**-54, 1 / 3 - 1e-16, 1 / 3, 1 / 3 + 1e-16, 1 - 2.0**-53, 1.0]
    for u in [*edges, *np.linspace(0, 1, 1001).tolist()]:
        assert weights[draw_weighted(weights, u)] > 0
    assert [draw_weighted(weights, u) for u in (0.0, 0.33, 0.34, 1.0)] == [2, 2, 5, 5]


def test_draw_weighted_draws_the_only_token_there_is() -> None:
    for token in (0, 3, 7):
        weights = np.zeros(8, dtype=np.float32)
        weights[token] = 1e-38
        assert {draw_weighted(weights, u) for u in (0.0, 2.0**-54, 0.5, 1 - 2.0**-53, 1.0)} == {token}


def test_draw_weighted_is_the_inverse_transform_of_weights_of_any_scale() -> None:
    weights = np.array([1, 0, 2, 5], dtype=np.float32)
    for scale in (1e-20, 1.0, 1e20):
        drawn = [draw_weighted(weights * np.float32(scale), (i + 0.5) / 8000) for i in range(8000)]
        assert np.bincount(drawn, minlength=4).tolist() == [1000, 0, 2000, 5000]


def test_draw_weighted_reaches_every_token_of_a_large_vocabulary_evenly() -> None:
    weights = np.full(50_000, 1 / 50_000, dtype=np.float32)
    drawn = [draw_weighted(weights, u) for u in (np.arange(500) + 0.5) / 500]
    assert np.abs(np.diff(drawn) - 100).max() <= 1


def test_dice_never_make_the_impossible_happen_and_always_the_certain() -> None:
    for anchor in range(500):
        dice = Dice(1, anchor)
        assert not dice.happens(0, 0.0)
        assert dice.happens(0, 1.0)
        assert dice.happens(0, np.inf)  # a ratio of probabilities may overflow before it is capped


def test_dice_are_fresh_wherever_a_draft_begins() -> None:
    """A position that is drafted again in a later draft must get a number unrelated to its earlier one."""
    weights = np.ones(4, dtype=np.float32)
    pairs = [(Dice(9, anchor).draw(2, weights), Dice(9, anchor + 1).draw(1, weights)) for anchor in range(4000)]
    assert fits(pairs, {(a, b): 1 / 16 for a in range(4) for b in range(4)}) > SMALLEST_P
    decisions = [(Dice(9, anchor).happens(2, 0.5), Dice(9, anchor + 1).happens(1, 0.5)) for anchor in range(4000)]
    assert fits(decisions, {(a, b): 0.25 for a in (False, True) for b in (False, True)}) > SMALLEST_P


# --- rounding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_a_draft_equal_to_the_target_but_for_rounding_is_accepted(acceptance: str) -> None:
    logits = np.zeros((4, 3), dtype=np.float32)
    for seed in range(200):
        request = make_request(sampling(acceptance), seed)
        probs = request.shaper.probs(logits[0], ())
        for nudge in (0, -1, 1):
            nudged = np.nextafter(probs, np.float32(probs[0] + nudge))
            verdict = verify(request, Draft([0, 1, 2], "draft", [nudged] * 3), logits)
            assert verdict.num_accepted == 3


def test_block_verification_divides_by_no_rounded_zero() -> None:
    """Draft and target almost certain of one token, with different tails: common in fluent text."""
    draft_probs = np.array([1, 2e-9, 1e-9], dtype=np.float32)
    logits = np.log(np.array([[1, 1e-9, 2e-9]] * 3, dtype=np.float32))
    request = make_request(sampling("block"), 0)
    with np.errstate(divide="raise", invalid="raise"):
        verdict = verify(request, Draft([0, 0], "draft", [draft_probs] * 2), logits)
    assert verdict.num_accepted == 2

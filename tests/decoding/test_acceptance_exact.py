"""The acceptance rules leave the target's distribution untouched: proven on small models, not estimated.

The production functions of `outpace.decoding.acceptance` run in exact fractions over every outcome of drafting and
verification. The tokens of a speculative step, continued by plain target draws, must have the target's joint
distribution, compared with `==`. The same check must reject a set of plausible wrong rules and wrong drafts,
which shows that it detects errors. The lossy rules' distance from the target is given as an exact number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from fractions import Fraction
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from outpace.core import Verdict
from outpace.decoding import acceptance
from outpace.decoding.acceptance import Chance, Distribution, TargetProbs
from outpace.speculation.policy.planner import Stop
from tests.enumeration import (
    Context,
    Drafted,
    Drafter,
    ExactDice,
    Law,
    Noise,
    Pair,
    Rule,
    completed,
    draw_draft,
    exact_law,
    expectation,
    heated,
    joint_law,
    one_hot,
    pairs,
    row,
    said,
    speculate,
    step_law,
    total_variation,
)
from tests.session_driver import SessionDriver, always, request_of


def match_with_fresh_noise(
    tokens: Sequence[int], draft_probs: Sequence[Distribution], target_probs: TargetProbs, chance: Chance
) -> Verdict:
    """`match` for an unseeded one-hot draft: the target's own token does not depend on the draft."""
    return acceptance.match(tokens, lambda i: chance.draw(i, target_probs(i)))


LOSSLESS: list[Rule] = [acceptance.reject, acceptance.verify_block, match_with_fresh_noise]
WITH_PROBS: list[Rule] = [acceptance.reject, acceptance.verify_block]
PAIRS = [*pairs(3), *pairs(2)]

# Different from the target at every token, in both directions, so that any mistake changes the distribution.
UNLIKE = Pair(
    "unlike",
    3,
    lambda context: row("1/2", "1/3", "1/6") if sum(context) % 2 == 0 else row("1/6", "1/6", "2/3"),
    lambda context: (
        row("1/6", "1/2", "1/3")
        if len(context) % 2 == 0
        else row("2/5", "2/5", "1/5")
        if context[-1] == 2
        else row("1/20", "4/5", "3/20")
    ),
)


def name_of(item: Any) -> str | None:
    return getattr(item, "__name__", None) or (str(item) if isinstance(item, Pair) else None)


def each(name: str, values: Sequence[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(name, values, ids=name_of)


def check_lossless(rule: Rule, pair: Pair, depth: int, drafter: Drafter = draw_draft) -> None:
    """One step, then plain decoding up to depth + 1 tokens, has the target's joint distribution."""
    law = said(step_law(rule, pair, depth, drafter=drafter))
    assert completed(law, pair.target, depth + 1) == joint_law(pair.target, depth + 1)


@each("rule", LOSSLESS)
@each("pair", PAIRS)
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_one_step_has_the_targets_joint_law(rule: Rule, pair: Pair, depth: int) -> None:
    check_lossless(rule, pair, depth)


# --- draft lengths ------------------------------------------------------------------------------------------


def unsure(context: Context, distribution: Distribution) -> bool:
    """Stop before drawing a token if the draft's distribution is flat."""
    return bool(max(distribution) < Fraction(1, 2))


def after_a_certain_token(context: Context, distribution: Distribution) -> bool:
    """Stop after certain drafted tokens, such as an end of sequence."""
    return bool(context) and context[-1] == 0


LENGTH_RULES = [
    partial(draw_draft, stop=unsure),
    partial(draw_draft, stop=after_a_certain_token),
]


@each("rule", LOSSLESS)
@each("pair", [*PAIRS, UNLIKE])
@pytest.mark.parametrize("drafter", LENGTH_RULES, ids=["unsure", "after_a_certain_token"])
def test_a_length_chosen_from_the_past_and_the_whole_distribution_stays_exact(
    rule: Rule, pair: Pair, drafter: Drafter
) -> None:
    check_lossless(rule, pair, 3, drafter)


@each("rule", LOSSLESS)
@each("pair", [*PAIRS, UNLIKE])
def test_stopping_after_an_unlikely_token_is_exact_if_the_token_stays_in_the_draft(rule: Rule, pair: Pair) -> None:
    """The counterpart of the mutant that drops the token: here every drawn token is verified."""

    def drafter(pair: Pair, context: Context, depth: int, noise: Noise) -> Drafted:
        def last_one_was_unlikely(so_far: Context, distribution: Distribution) -> bool:
            return len(so_far) > len(context) and bool(pair.draft(so_far[:-1])[so_far[-1]] < Fraction(2, 5))

        return draw_draft(pair, context, depth, noise, stop=last_one_was_unlikely)

    check_lossless(rule, pair, 3, drafter)


class PolicysStop:
    """The stop rule that the policy gives to a draft model; `cost` of a further token is a fraction of a step."""

    def __init__(self, cost: float) -> None:
        desk = SessionDriver({1: 1.0, 256: 1.0 + 255 * cost}, draft=always(sure=0.5), draft_seconds=0.01)
        who = request_of(length=2)
        [choice] = desk.decide([who])
        assert choice.ask is not None and isinstance(choice.ask.goes_on, Stop)
        self._goes_on = choice.ask.goes_on

    def fresh(self) -> Callable[[float], bool]:
        return copy(self._goes_on)  # the rule has state per draft

    def drafter(self, pair: Pair, context: Context, depth: int, noise: Noise) -> Drafted:
        """Calls the rule before each token, with the largest probability of its distribution."""
        goes_on = self.fresh()
        return draw_draft(pair, context, depth, noise, stop=lambda _, probs: not goes_on(float(max(probs))))

    def mutant(self, pair: Pair, context: Context, depth: int, noise: Noise) -> Drafted:
        """Calls the rule after each token, with that token's own probability, and drops a rejected token."""
        goes_on = self.fresh()
        tokens, probs = draw_draft(pair, context, depth, noise)
        for i, token in enumerate(tokens):
            if not goes_on(float(probs[i][token])):
                return tokens[:i], probs[:i]
        return tokens, probs

    def num_lengths(self) -> int:
        return len(exact_law(lambda noise: len(self.drafter(UNLIKE, (), 3, noise)[0])))


@pytest.fixture(scope="module")
def policys_stop() -> PolicysStop:
    """The stop rule with the first cost at which the drafted tokens decide the length of the draft."""
    rules = (PolicysStop(cost / 100) for cost in range(1, 25))
    return next(rule for rule in rules if rule.num_lengths() > 1)


@each("rule", LOSSLESS)
@each("pair", [*PAIRS, UNLIKE])
def test_the_policys_stop_rule_keeps_a_draft_exact(rule: Rule, pair: Pair, policys_stop: PolicysStop) -> None:
    check_lossless(rule, pair, 3, policys_stop.drafter)


@each("rule", WITH_PROBS)
def test_the_policys_stop_rule_asked_about_the_drawn_token_would_not_be_exact(
    rule: Rule, policys_stop: PolicysStop
) -> None:
    with pytest.raises(AssertionError):
        check_lossless(rule, UNLIKE, 3, policys_stop.mutant)


def test_the_length_rules_do_produce_different_lengths() -> None:
    for drafter in LENGTH_RULES:

        def length(noise: Noise, drafter: Drafter = drafter) -> int:
            return len(drafter(UNLIKE, (), 3, noise)[0])

        assert len(exact_law(length)) > 1


# --- several steps ------------------------------------------------------------------------------------------


def two_step_law(rule: Rule, pair: Pair, first_depth: int, second_depth: Callable[[int], int]) -> Law[Context]:
    """Two speculative steps in one enumeration, to detect any effect of the first on the second."""

    def steps(noise: Noise) -> Context:
        first = speculate(rule, pair, first_depth, noise)
        context = tuple(first.tokens)
        return context + tuple(speculate(rule, pair, second_depth(first.num_accepted), noise, context).tokens)

    return exact_law(steps)


@each("rule", LOSSLESS)
@each("pair", pairs(2))
def test_two_steps_in_a_row_stay_exact(rule: Rule, pair: Pair) -> None:
    law = two_step_law(rule, pair, 2, lambda num_accepted: 2)
    assert completed(law, pair.target, 5) == joint_law(pair.target, 5)


@each("rule", LOSSLESS)
@each("pair", pairs(3)[:4])
def test_a_depth_that_follows_the_last_verdict_stays_exact(rule: Rule, pair: Pair) -> None:
    """A policy may learn from acceptance: the next step's noise is independent of what it learned from."""
    law = two_step_law(rule, pair, 2, lambda num_accepted: num_accepted)
    assert completed(law, pair.target, 4) == joint_law(pair.target, 4)


def draft_by_position(pair: Pair, context: Context, depth: int, noise: Noise) -> Drafted:
    """Draft noise addressed only by position: a position that is drafted again gets the same number."""
    tokens: list[int] = []
    for _ in range(depth):
        position = len(context) + len(tokens)
        tokens.append(noise.draw(("draft", position), pair.draft((*context, *tokens))))
    return tokens, [pair.draft((*context, *tokens[:i])) for i in range(depth)]


class DiceByPosition(ExactDice):
    """Dice that ignore where the draft began: one number per position of the sequence."""

    def __init__(self, noise: Noise, anchor: int) -> None:
        super().__init__(noise)
        self._start = anchor

    def happens(self, offset: int, probability: Any) -> bool:
        return super().happens(self._start + offset, probability)

    def draw(self, offset: int, weights: Distribution) -> int:
        return super().draw(self._start + offset, weights)


def two_step_law_with_reuse(rule: Rule, pair: Pair, *, draft_noise: bool, dice: bool) -> Law[Context]:
    def steps(noise: Noise) -> Context:
        context: Context = ()
        for _ in range(2):
            drafter = draft_by_position if draft_noise else draw_draft
            tokens, probs = drafter(pair, context, 2, noise)
            chance = (DiceByPosition if dice else ExactDice)(noise, len(context))
            here = context

            def target_probs(i: int, here: Context = here, tokens: Sequence[int] = tokens) -> Distribution:
                return pair.target((*here, *tokens[:i]))

            context += tuple(rule(tokens, probs, target_probs, chance).tokens)
        return context

    law = exact_law(steps, may_reuse_noise=True)
    return completed(law, pair.target, 5)


REUSES = [{"draft_noise": True, "dice": False}, {"draft_noise": False, "dice": True}]


@pytest.mark.parametrize("reuse", REUSES, ids=["draft_noise", "dice"])
def test_block_verification_needs_noise_addressed_by_where_the_draft_begins(reuse: dict[str, bool]) -> None:
    """Later draft tokens and later trials decide where the accepted prefix ends. If a position is drafted again
    with the same number, that number is not independent: it already led to a rejection.
    """
    pair = pairs(2)[0]
    expected = joint_law(pair.target, 5)
    assert two_step_law_with_reuse(acceptance.verify_block, pair, draft_noise=False, dice=False) == expected
    assert two_step_law_with_reuse(acceptance.verify_block, pair, **reuse) != expected


@pytest.mark.parametrize("reuse", REUSES, ids=["draft_noise", "dice"])
def test_token_by_token_rejection_looks_at_no_noise_beyond_the_first_refusal(reuse: dict[str, bool]) -> None:
    pair = pairs(2)[0]
    assert two_step_law_with_reuse(acceptance.reject, pair, **reuse) == joint_law(pair.target, 5)


# --- the rules among themselves -----------------------------------------------------------------------------


@each("pair", PAIRS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_match_is_rejection_sampling_for_a_one_hot_draft(pair: Pair, depth: int) -> None:
    """The same distribution, also of the number of accepted tokens."""
    vocab = pair.vocab
    guessing = Pair("guess", vocab, pair.target, lambda context: one_hot(sum(context) % vocab, vocab))
    assert step_law(match_with_fresh_noise, guessing, depth) == step_law(acceptance.reject, guessing, depth)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_match_is_the_same_with_all_of_the_targets_tokens_at_hand(depth: int) -> None:
    for tokens in product(range(2), repeat=depth):
        for own in product(range(2), repeat=depth + 1):
            known = acceptance.match_known(tokens, list(own))
            assert known == acceptance.match(tokens, own.__getitem__)


@each("pair", PAIRS)
def test_a_block_of_one_token_is_rejection_sampling(pair: Pair) -> None:
    assert step_law(acceptance.verify_block, pair, 1) == step_law(acceptance.reject, pair, 1)


@each("pair", PAIRS)
def test_rejection_keeps_one_token_with_probability_one_minus_total_variation(pair: Pair) -> None:
    law = step_law(acceptance.reject, pair, 1)
    gap = total_variation(dict(enumerate(pair.target(()))), dict(enumerate(pair.draft(()))))
    assert expectation(law, lambda outcome: outcome[1]) == 1 - gap


def mean_accepted(rule: Rule, pair: Pair, depth: int) -> Fraction:
    return expectation(step_law(rule, pair, depth), lambda outcome: outcome[1])


def test_block_verification_accepts_at_least_as_much_as_token_by_token_rejection() -> None:
    gains = {}
    for pair in [*PAIRS, UNLIKE]:
        for depth in (1, 2, 3):
            gain = mean_accepted(acceptance.verify_block, pair, depth)
            gain -= mean_accepted(acceptance.reject, pair, depth)
            assert gain >= 0
            gains[str(pair), depth] = gain
    assert gains["free-3", 2] > 0
    assert gains["free-3", 3] > gains["free-3", 2]
    assert gains["perfect_draft-3", 3] == 0


def test_a_perfect_draft_is_accepted_whole() -> None:
    perfect = next(pair for pair in PAIRS if pair.name == "perfect_draft")
    for rule in WITH_PROBS:
        assert mean_accepted(rule, perfect, 3) == 3


# --- seeded replay ------------------------------------------------------------------------------------------


def replay(pair: Pair, depth: int, length: int, noise: Noise, *, draft: bool) -> Context:
    """Decode with one number per position; target and draft turn it into a token by inverse transform."""
    said_so_far: Context = ()
    while len(said_so_far) < length:
        context = said_so_far
        tokens: list[int] = []
        for i in range(depth if draft else 0):
            tokens.append(noise.draw(("token", len(context) + i), pair.draft((*context, *tokens))))

        def own_token(i: int, context: Context = context, tokens: Sequence[int] = tokens) -> int:
            return noise.draw(("token", len(context) + i), pair.target((*context, *tokens[:i])))

        said_so_far += tuple(acceptance.match(tokens, own_token).tokens)
    return said_so_far[:length]


@pytest.mark.parametrize(
    ("pair", "depth", "length"),
    [*((pair, depth, 3) for pair in pairs(3) for depth in (1, 2))]
    + [(pair, depth, 4) for pair in pairs(2) for depth in (1, 2, 3)],
    ids=str,
)
def test_for_every_noise_a_seeded_request_says_what_plain_decoding_says(pair: Pair, depth: int, length: int) -> None:

    def both(noise: Noise) -> tuple[Context, Context]:
        return replay(pair, depth, length, noise, draft=True), replay(pair, depth, length, noise, draft=False)

    law = exact_law(both, may_reuse_noise=True)
    assert all(speculative == plain for speculative, plain in law)
    assert {tokens: p for (tokens, _), p in law.items()} == joint_law(pair.target, length)


# --- wrong rules and wrong drafts, which the same check must reject -----------------------------------------


def keeps_the_refused_token(
    tokens: Sequence[int], draft_probs: Sequence[Distribution], target_probs: TargetProbs, chance: Chance
) -> Verdict:
    verdict = acceptance.reject(tokens, draft_probs, target_probs, chance)
    i = verdict.num_accepted
    if i == len(tokens):
        return verdict
    own = chance.draw(i + 1, target_probs(i + 1))
    return Verdict([*tokens[: i + 1], own], len(tokens), i + 1)


def reject_recovering_from(
    recovery: Callable[[Distribution, Distribution], Distribution],
) -> Rule:
    def rule(
        tokens: Sequence[int], draft_probs: Sequence[Distribution], target_probs: TargetProbs, chance: Chance
    ) -> Verdict:
        for i, token in enumerate(tokens):
            target, draft = target_probs(i), draft_probs[i]
            if not chance.happens(i, min(1, target[token] / draft[token])):
                return Verdict([*tokens[:i], chance.draw(i, recovery(target, draft))], len(tokens), i)
        return Verdict([*tokens, chance.draw(len(tokens), target_probs(len(tokens)))], len(tokens), len(tokens))

    return rule


def bonus_from_the_draft(
    tokens: Sequence[int], draft_probs: Sequence[Distribution], target_probs: TargetProbs, chance: Chance
) -> Verdict:
    n = len(tokens)
    return acceptance.reject(tokens, draft_probs, lambda i: target_probs(i) if i < n else draft_probs[-1], chance)


def block_with(
    *,
    kept_is_weight: bool = False,
    residual_weight_is_one: bool = False,
    uncapped_middle: bool = False,
    stops_at_first_refusal: bool = False,
    bonus_is_residual: bool = False,
) -> Rule:
    """Block verification: correct by default, with one optional mistake at a time."""

    def rule(
        tokens: Sequence[int], draft_probs: Sequence[Distribution], target_probs: TargetProbs, chance: Chance
    ) -> Verdict:
        n = len(tokens)
        weight: Any = Fraction(1)
        weights, num_accepted = [weight], 0
        for i, token in enumerate(tokens, start=1):
            weight = weight * target_probs(i - 1)[token] / draft_probs[i - 1][token]
            weight = weight if uncapped_middle and i < n else min(1, weight)
            weights.append(weight)
            capped = min(1, weight)
            if i == n or kept_is_weight:
                kept = capped
            else:
                mass = np.maximum(capped * target_probs(i) - draft_probs[i], 0).sum()
                kept = mass / (mass + 1 - capped) if mass > 0 else 0
            if chance.happens(i - 1, kept):
                num_accepted = i
            elif stops_at_first_refusal:
                break
        i = num_accepted
        left_over = target_probs(i)
        if i < n:
            scale = 1 if residual_weight_is_one else min(1, weights[i])
            left_over = np.maximum(scale * left_over - draft_probs[i], 0)
        elif bonus_is_residual and n:
            left_over = np.maximum(left_over - draft_probs[-1], 0)
        left_over = left_over if left_over.sum() > 0 else target_probs(i)
        return Verdict([*tokens[:i], chance.draw(i, left_over)], n, i)

    return rule


def match_whatever_is_possible(
    tokens: Sequence[int], draft_probs: Sequence[Distribution], target_probs: TargetProbs, chance: Chance
) -> Verdict:
    return acceptance.match(
        tokens,
        lambda i: chance.draw(i, target_probs(i)),
        lambda i, token: bool(target_probs(i)[token] > 0),
    )


WRONG_RULES: dict[str, Rule] = {
    "one token more than was accepted": keeps_the_refused_token,
    "recovery from the whole target": reject_recovering_from(lambda target, draft: target),
    "recovery from the draft": reject_recovering_from(lambda target, draft: draft),
    "recovery from the absolute difference": reject_recovering_from(lambda target, draft: abs(target - draft)),
    "bonus from the draft": bonus_from_the_draft,
    "block: weight taken for the trial's probability": block_with(kept_is_weight=True),
    "block: the single token's residual": block_with(residual_weight_is_one=True),
    "block: weight not capped at one": block_with(uncapped_middle=True),
    "block: first refusal ends it": block_with(stops_at_first_refusal=True),
    "block: bonus from a residual": block_with(bonus_is_residual=True),
    "match: whatever the target could have said": match_whatever_is_possible,
}


@pytest.mark.parametrize("rule", WRONG_RULES.values(), ids=WRONG_RULES.keys())
def test_the_check_refuses_a_wrong_rule(rule: Rule) -> None:
    with pytest.raises(AssertionError):
        check_lossless(rule, UNLIKE, 2)


@each("pair", [UNLIKE, *pairs(3)])
def test_the_wrong_block_rules_differ_from_the_right_one_by_their_mistake_alone(pair: Pair) -> None:
    assert step_law(block_with(), pair, 3) == step_law(acceptance.verify_block, pair, 3)


def drops_an_unlikely_token(pair: Pair, context: Context, depth: int, noise: Noise) -> Drafted:
    """Cuts the draft before the first token whose own draft probability is low: the draw itself decides."""
    tokens, probs = draw_draft(pair, context, depth, noise)
    for i, token in enumerate(tokens):
        if probs[i][token] < Fraction(2, 5):
            return tokens[:i], probs[:i]
    return tokens, probs


def reports_another_temperature(pair: Pair, context: Context, depth: int, noise: Noise) -> Drafted:
    tokens, probs = draw_draft(pair, context, depth, noise)
    return tokens, [heated(p) for p in probs]


def reports_the_unfiltered_distribution(pair: Pair, context: Context, depth: int, noise: Noise) -> Drafted:
    """Draws from the two likeliest tokens, as top-k would, and reports the distribution before the filter."""

    def filtered(so_far: Context) -> Distribution:
        kept = np.where(np.arange(pair.vocab) == np.argmin(pair.draft(so_far)), 0, pair.draft(so_far))
        return np.asarray(kept / kept.sum(), dtype=object)

    tokens, _ = draw_draft(Pair("filtered", pair.vocab, pair.target, filtered), context, depth, noise)
    return tokens, [pair.draft((*context, *tokens[:i])) for i in range(depth)]


@each("rule", WITH_PROBS)
@each("drafter", [drops_an_unlikely_token, reports_another_temperature, reports_the_unfiltered_distribution])
def test_the_check_refuses_a_dishonest_draft(rule: Rule, drafter: Drafter) -> None:
    check_lossless(rule, UNLIKE, 2)
    with pytest.raises(AssertionError):
        check_lossless(rule, UNLIKE, 2, drafter)


@each("drafter", [drops_an_unlikely_token, reports_another_temperature, reports_the_unfiltered_distribution])
def test_match_forgives_every_dishonest_draft(drafter: Drafter) -> None:
    """It never looks at draft_probs, and its own tokens do not depend on the draft."""
    check_lossless(match_with_fresh_noise, UNLIKE, 2, drafter)


# --- a draft model with another vocabulary: its distribution, restricted to the shared tokens ---------------

DRAFT_IDS = {0: 2, 1: 0}  # the draft's id of each shared token; the target's token 2 and the draft's token 1 are alone


def kept(probs: Distribution) -> Distribution:
    """The chances of the shared tokens, in the order of the target's ids."""
    return np.array([probs[DRAFT_IDS[token]] if token in DRAFT_IDS else Fraction(0) for token in range(3)], object)


def restricted(probs: Distribution) -> Distribution:
    return np.asarray(kept(probs) / kept(probs).sum(), dtype=object)


def draws_shared_tokens(pair: Pair, context: Context, depth: int, noise: Noise) -> Drafted:
    """`pair.draft` is over the draft's own ids; tokens are drawn and reported in the target's."""
    shared = Pair("shared", pair.vocab, pair.target, lambda so_far: restricted(pair.draft(so_far)))
    return draw_draft(shared, context, depth, noise)


def reports_what_was_not_restricted(pair: Pair, context: Context, depth: int, noise: Noise) -> Drafted:
    tokens, _ = draws_shared_tokens(pair, context, depth, noise)
    whole = [pair.draft((*context, *tokens[:i])) for i in range(depth)]
    return tokens, [row(probs[2], probs[0], probs[1]) for probs in whole]


def reports_what_was_not_renormalised(pair: Pair, context: Context, depth: int, noise: Noise) -> Drafted:
    tokens, _ = draws_shared_tokens(pair, context, depth, noise)
    whole = [pair.draft((*context, *tokens[:i])) for i in range(depth)]
    return tokens, [kept(probs) for probs in whole]


def mixes_up_the_shared_ids(pair: Pair, context: Context, depth: int, noise: Noise) -> Drafted:
    tokens, probs = draws_shared_tokens(pair, context, depth, noise)
    return tokens, [row(each[1], each[0], each[2]) for each in probs]


def takes_the_likeliest_shared_token_for_an_unshared_one(
    pair: Pair, context: Context, depth: int, noise: Noise
) -> Drafted:
    """Draws from the whole distribution, replaces a token that the target lacks, and reports the restricted one."""
    tokens: list[int] = []
    probs: list[Distribution] = []
    for offset in range(depth):
        whole = pair.draft((*context, *tokens))
        drawn = noise.draw(("draft", len(context), offset), whole)
        shared = restricted(whole)
        tokens.append({2: 0, 0: 1}.get(drawn, int(np.argmax(shared))))
        probs.append(shared)
    return tokens, probs


@each("rule", WITH_PROBS)
@each("pair", [UNLIKE, *pairs(3)[:1]])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_distribution_restricted_to_shared_tokens_stays_exact(rule: Rule, pair: Pair, depth: int) -> None:
    check_lossless(rule, pair, depth, draws_shared_tokens)


@each("rule", WITH_PROBS)
@each(
    "drafter",
    [
        reports_what_was_not_restricted,
        reports_what_was_not_renormalised,
        mixes_up_the_shared_ids,
        takes_the_likeliest_shared_token_for_an_unshared_one,
    ],
)
def test_the_check_refuses_a_wrong_restriction(rule: Rule, drafter: Drafter) -> None:
    with pytest.raises(AssertionError):
        check_lossless(rule, UNLIKE, 2, drafter)


# --- lossy rules, and by how much ---------------------------------------------------------------------------

LOSSY_PAIR = Pair("lossy", 3, lambda context: row("1/2", "3/10", "1/5"), lambda context: row("1/10", "3/10", "3/5"))


def lossy_distance(lenient: Callable[[TargetProbs], acceptance.Leniency], depth: int) -> Fraction:
    """Total variation between one lenient step, completed by plain decoding, and the target."""

    def rule(
        tokens: Sequence[int], draft_probs: Sequence[Distribution], target_probs: TargetProbs, chance: Chance
    ) -> Verdict:
        own_token = partial(_draw_at, chance, target_probs)
        return acceptance.match(tokens, own_token, lenient(target_probs))

    law = said(step_law(rule, LOSSY_PAIR, depth))
    target = LOSSY_PAIR.target
    return total_variation(completed(law, target, depth + 1), joint_law(target, depth + 1))


def _draw_at(chance: Chance, target_probs: TargetProbs, i: int) -> int:
    return chance.draw(i, target_probs(i))


def threshold_distance(threshold: Any, depth: int = 1) -> Fraction:
    return lossy_distance(lambda target: acceptance.threshold_leniency(target, threshold), depth)


def test_threshold_acceptance_is_off_the_target_by_an_exact_amount() -> None:
    """A drafted x is kept if target(x) >= threshold, else the target's own token is emitted. For one token the
    result is the draft's probability of the kept tokens, plus the rest of its mass spread as the target:

    threshold 1/2   keeps token 0: (1/10 + 9/20, 27/100, 18/100), 1/20 away from (1/2, 3/10, 1/5)
    threshold 3/10  keeps 0 and 1: (1/10 + 3/10, 3/10 + 18/100, 12/100), 9/50 away
    threshold 1/5   keeps all: the draft itself, 2/5 away
    """
    assert threshold_distance(Fraction(1, 2)) == Fraction(1, 20)
    assert threshold_distance(Fraction(3, 10)) == Fraction(9, 50)
    assert threshold_distance(Fraction(1, 5)) == Fraction(2, 5)


@pytest.mark.parametrize("depth", [1, 2])
def test_threshold_acceptance_is_further_off_the_lower_the_threshold(depth: int) -> None:
    distances = [threshold_distance(Fraction(t, 10), depth) for t in (10, 6, 5, 3, 2, 0)]
    assert distances[0] == distances[1] == 0  # no token is that likely, so leniency never applies
    assert all(a < b for a, b in pairwise(distances[1:5]))
    assert distances[4] == distances[5]


def test_threshold_one_is_the_exact_rule_even_where_the_target_is_certain() -> None:
    """A token of probability one is the target's own token anyway."""
    sure = Pair("sure", 3, lambda context: one_hot(1, 3) if context else row("1/2", "1/4", "1/4"), LOSSY_PAIR.draft)

    def rule(
        tokens: Sequence[int], draft_probs: Sequence[Distribution], target_probs: TargetProbs, chance: Chance
    ) -> Verdict:
        lenient = acceptance.threshold_leniency(target_probs, 1.0)
        return acceptance.match(tokens, partial(_draw_at, chance, target_probs), lenient)

    check_lossless(rule, sure, 2)


def test_typical_acceptance_is_off_the_target_by_an_exact_amount() -> None:
    """The target's entropy is 1.03 nats, exp(-entropy) is 0.357. With alpha 0.3 the bar is 0.107: every
    token passes and the draft itself is emitted, 2/5 away from the target. With alpha 0.7 the bar is 0.25:
    tokens 0 and 1 pass, 9/50 away. With alpha 1 the bar is 0.357 and token 0 alone passes, 1/20 away.
    """

    def distance(threshold: float, alpha: float) -> Fraction:
        return lossy_distance(lambda target: acceptance.typical_leniency(target, threshold, alpha), depth=1)

    assert distance(1.0, 0.3) == Fraction(2, 5)
    assert distance(1.0, 0.7) == Fraction(9, 50)
    assert distance(1.0, 1.0) == Fraction(1, 20)
    assert distance(0.09, 1.0) == Fraction(2, 5)  # the threshold limits the bar, and 0.09 lets all pass
    assert distance(0.25, 1.0) == Fraction(9, 50)


def test_lenient_acceptances_are_counted() -> None:
    verdict = acceptance.match([2, 0, 1], lambda i: [0, 0, 2, 1][i], lambda i, token: i == 0)
    assert verdict == Verdict([2, 0, 2], num_drafted=3, num_accepted=2, num_lenient=1)

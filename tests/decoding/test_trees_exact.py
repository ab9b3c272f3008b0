"""Trees of draft tokens leave the target's distribution untouched: proven on small models, not estimated.

`match_tree` runs in exact fractions over every outcome of the noise, which target and draft share as in the engine:
exponential races of three tokens (`RaceNoise`). Every noise must give the same tokens with trees and without, and
their joint distribution must be the target's. Wrong rules must fail the same check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

from outpace.core import Case, Draft, MeasuredAcceptance, Verdict
from outpace.decoding import acceptance
from outpace.decoding.acceptance import Distribution
from outpace.decoding.tree import ROOT, Tree, level_chances, likely_tree, usual_chances
from tests.enumeration import (
    Context,
    ExactDice,
    Model,
    Pair,
    RaceNoise,
    completed,
    draw_draft,
    heated,
    joint_law,
    pairs,
    race_law,
    row,
)

TREES = {
    "chain": Tree((ROOT, 0)),
    "two guesses": Tree((ROOT, ROOT)),
    "all tokens": Tree((ROOT, ROOT, ROOT)),
    "two and two": Tree((ROOT, ROOT, 0, 0)),
    "two, then one below each": Tree((ROOT, ROOT, 0, 1)),
}
PAIRS = [pair for pair in pairs(3) if pair.name in ("free", "both_masked", "perfect_draft")]
BRANCHED = Tree((ROOT, ROOT, 0, 0, 2))
Rule = Callable[[Sequence[int], Tree, Callable[[int], int]], Verdict]


def drafted(tree: Tree, draft: Model, context: Context, noise: RaceNoise) -> list[int]:
    """Children are the first of the race at their position; tokens without weight fill what is left."""
    tokens = [0] * len(tree)
    for node in (ROOT, *range(len(tree))):
        children = tree.children(node)
        if children:
            text = (*context, *(tokens[each] for each in tree.path(node)))
            best = noise.ranked(("token", len(text)), draft(text), len(children))
            found = [*best, *sorted(set(range(3)).difference(best))]
            for child, token in zip(children, found, strict=False):
                tokens[child] = token
    return tokens


def own_tokens(target: Model, context: Context, tokens: Sequence[int], tree: Tree, noise: RaceNoise) \
        -> Callable[[int], int]:  # fmt: skip
    def own_token(node: int) -> int:
        text = (*context, *(tokens[each] for each in tree.path(node)))
        return noise.ranked(("token", len(text)), target(text), 1)[0]

    return own_token


def said_with(rule: Rule, pair: Pair, tree: Tree, noise: RaceNoise, num_steps: int = 1) -> Context:
    said: Context = ()
    for _ in range(num_steps):
        tokens = drafted(tree, pair.draft, said, noise)
        said += tuple(rule(tokens, tree, own_tokens(pair.target, said, tokens, tree, noise)).tokens)
    return said


def said_plainly(pair: Pair, length: int, noise: RaceNoise) -> Context:
    said: Context = ()
    while len(said) < length:
        said += noise.ranked(("token", len(said)), pair.target(said), 1)
    return said


def check(rule: Rule, pair: Pair, tree: Tree, num_steps: int = 1) -> None:
    """Steps say what plain decoding says, and with plain draws after them they have the target's joint law."""

    def both(noise: RaceNoise) -> tuple[Context, Context]:
        said = said_with(rule, pair, tree, noise, num_steps)
        return said, said_plainly(pair, len(said), noise)

    law, longest = race_law(both), num_steps * (tree.depth + 1)
    assert all(with_trees == plain for with_trees, plain in law)
    said = {tokens: chance for (tokens, _), chance in law.items()}
    assert completed(said, pair.target, longest) == joint_law(pair.target, longest)


@pytest.mark.parametrize("weights", [row("1/2", "1/3", "1/6"), row("0", "2/5", "3/5"), row("0", "1", "0")], ids=str)
def test_the_first_of_a_race_is_drawn_in_proportion_to_its_weight(weights: Distribution) -> None:
    law = race_law(lambda noise: noise.ranked(("token", 0), weights, 1)[0])
    assert law == {token: weights[token] for token in range(3) if weights[token]}


def test_the_next_ones_are_drawn_without_replacement() -> None:
    weights = row("1/2", "1/3", "1/6")
    law = race_law(lambda noise: noise.ranked(("token", 0), weights, 2))
    assert law == {(a, b): weights[a] * weights[b] / (1 - weights[a]) for a in range(3) for b in range(3) if a != b}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_for_every_noise_trees_say_what_plain_decoding_says(pair: Pair, tree: Tree) -> None:
    check(acceptance.match_tree, pair, tree)


def test_two_steps_say_what_plain_decoding_says() -> None:
    """Noise that the first step has looked at beyond its end is used again in the second."""
    check(acceptance.match_tree, PAIRS[0], TREES["two guesses"], num_steps=2)


@pytest.mark.parametrize("name", ["two and two", "two, then one below each"])
def test_any_tree_of_any_draft_is_exact(name: str) -> None:
    """The target's own tokens do not depend on the draft: not on its temperature, and not on what it drafts."""
    pair = PAIRS[0]
    for draft in (lambda context: heated(pair.draft(context)), lambda context: row("0", "1/9", "8/9")):
        check(acceptance.match_tree, Pair("other", 3, pair.target, draft), TREES[name])


def test_a_chain_is_a_tree() -> None:
    def after(own: Sequence[int], node: int) -> int:
        return own[node + 1]

    for tokens in np.ndindex(3, 3):
        for own in np.ndindex(3, 3, 3):
            expected = acceptance.match(tokens, own.__getitem__)
            found = acceptance.match_tree(tokens, TREES["chain"], partial(after, own))
            assert (found.tokens, found.num_drafted, found.num_accepted) == (
                expected.tokens, expected.num_drafted, expected.num_accepted,
            )  # fmt: skip


def test_a_step_with_a_tree_and_one_by_block_verification_are_exact() -> None:
    """A request without a seed may have either. The noise of the tree's tokens was seen where they were accepted or
    refused, and the next step begins after that."""
    pair, tree = PAIRS[0], TREES["two guesses"]

    def steps(noise: RaceNoise) -> Context:
        tokens = drafted(tree, pair.draft, (), noise)
        said = tuple(acceptance.match_tree(tokens, tree, own_tokens(pair.target, (), tokens, tree, noise)).tokens)
        chain, probs = draw_draft(pair, said, 1, noise)
        dice = ExactDice(noise, anchor=len(said))
        verdict = acceptance.verify_block(chain, probs, lambda i: pair.target((*said, *chain[:i])), dice)
        return said + tuple(verdict.tokens)

    assert completed(race_law(steps), pair.target, 4) == joint_law(pair.target, 4)


def test_more_guesses_are_accepted_more_often() -> None:
    def rate(name: str) -> Fraction:
        pair, tree = PAIRS[0], TREES[name]

        def accepted(noise: RaceNoise) -> int:
            tokens = drafted(tree, pair.draft, (), noise)
            own = own_tokens(pair.target, (), tokens, tree, noise)
            return acceptance.match_tree(tokens, tree, own).num_accepted

        return sum((chance * count for count, chance in race_law(accepted).items()), start=Fraction(0))

    assert rate("chain") < min(rate("two, then one below each"), rate("two and two"))
    assert rate("all tokens") == 1


# --- wrong rules, which the same check must refuse ----------------------------------------------------------------


def takes_any_child(tokens: Sequence[int], tree: Tree, own_token: Callable[[int], int]) -> Verdict:
    """The first guess, whatever the target says."""
    child = tree.children(ROOT)[0]
    return Verdict([tokens[child], own_token(child)], len(tokens), 1, 0, tree, (child,))


def forgets_parents(tokens: Sequence[int], tree: Tree, own_token: Callable[[int], int]) -> Verdict:
    """Any later node with the right token goes on, also one of another branch."""
    path: list[int] = []
    while True:
        own = own_token(path[-1] if path else ROOT)
        node = next((each for each in range(path[-1] + 1 if path else 0, len(tree)) if tokens[each] == own), None)
        if node is None:
            return Verdict([*(tokens[each] for each in path), own], len(tokens), len(path), 0, tree, tuple(path))
        path.append(node)


def reads_the_next_row(tokens: Sequence[int], tree: Tree, own_token: Callable[[int], int]) -> Verdict:
    """The rows of the target's output are the nodes' own, not those before them."""
    return acceptance.match_tree(tokens, tree, lambda node: own_token(min(node + 1, len(tree) - 1)))


def ends_after_the_parent(tokens: Sequence[int], tree: Tree, own_token: Callable[[int], int]) -> Verdict:
    """The own token after the last accepted node is taken from the row before it."""
    verdict = acceptance.match_tree(tokens, tree, own_token)
    before = verdict.path[-2] if len(verdict.path) > 1 else ROOT
    return Verdict([*verdict.tokens[:-1], own_token(before)], len(tokens), verdict.num_accepted, 0, tree, verdict.path)


def keeps_a_refused_sibling(tokens: Sequence[int], tree: Tree, own_token: Callable[[int], int]) -> Verdict:
    """Where no child is right, the last one stands."""
    verdict = acceptance.match_tree(tokens, tree, own_token)
    children = tree.children(verdict.path[-1] if verdict.path else ROOT)
    if not children:
        return verdict
    kept = [*verdict.tokens[:-1], tokens[children[-1]]]
    return Verdict([*kept, own_token(children[-1])], len(tokens), len(kept), 0, tree, (*verdict.path, children[-1]))


WRONG: list[Rule] = [
    takes_any_child,
    forgets_parents,
    reads_the_next_row,
    ends_after_the_parent,
    keeps_a_refused_sibling,
]


@pytest.mark.parametrize("rule", WRONG, ids=lambda rule: rule.__name__)
def test_the_check_refuses_a_wrong_rule(rule: Rule) -> None:
    with pytest.raises(AssertionError):
        check(rule, PAIRS[0], TREES["two and two"])


def test_fresh_noise_for_what_is_refused_would_not_be_exact() -> None:
    """As rejection sampling draws: but here the refusal depends on which token the target's noise picks."""
    pair, tree = PAIRS[0], TREES["two guesses"]

    def step(noise: RaceNoise) -> Context:
        own = noise.ranked(("token", 0), pair.target(()), 1)
        return own if own[0] in drafted(tree, pair.draft, (), noise) else noise.ranked(("new", 0), pair.target(()), 1)

    assert race_law(step) != joint_law(pair.target, 1)


# --- shapes -------------------------------------------------------------------------------------------------------


def test_the_parts_of_a_tree() -> None:
    tree = BRANCHED
    assert tree.depths == (1, 1, 2, 2, 3)
    assert tree.masks == (0b1, 0b10, 0b101, 0b1001, 0b10101)
    assert tree.path(4) == (0, 2, 4) and tree.path(ROOT) == ()
    assert tree.children(ROOT) == (0, 1) and tree.children(1) == ()
    assert tree.continued(()) == (0, 2, 4) and tree.continued((1,)) == (1,) and tree.continued((0, 3)) == (0, 3)
    with pytest.raises(AssertionError):
        Tree((ROOT, 2, 0))


def test_rows_of_a_draft_know_what_precedes_them() -> None:
    draft = Draft([7, 8, 9, 6, 5], "head", tree=BRANCHED)
    case = Case(None, draft)  # type: ignore[arg-type]
    assert list(case.offsets) == [0, 1, 1, 2, 2, 3]
    assert [list(case.prefix(i)) for i in range(6)] == [[], [7], [8], [7, 9], [7, 6], [7, 9, 5]]
    assert (draft.depth, list(draft.parents)) == (3, [ROOT, ROOT, 0, 0, 2])
    chain = Draft([7, 8], "head")
    assert (chain.depth, list(chain.parents)) == (2, [ROOT, 0])
    verdict = acceptance.match_tree(
        draft.tokens, draft.tree or TREES["chain"], lambda node: {ROOT: 7, 0: 6}.get(node, 1)
    )
    assert (verdict.tokens, verdict.path, list(verdict.rows), verdict.depth) == ([7, 6, 1], (0, 3), [0, 1, 4], 3)


def test_the_likeliest_nodes_are_taken() -> None:
    assert likely_tree([0.9] * 4, 4) == Tree((ROOT, 0, 1, 2))  # a chain, where guesses are almost sure
    assert likely_tree([0.1] * 4, 4) == Tree((ROOT,) * 4)
    # .6, .36, .24 (second), .216, .144 (second below the first, and first below the second)
    assert likely_tree([0.6] * 3, 4) == Tree((ROOT, ROOT, 0, 2))
    tree = likely_tree([0.6] * 4, 15)
    assert len(tree) == 15 and tree.depth == 4


def test_the_chances_of_levels_are_those_of_their_nodes() -> None:
    tree = Tree((ROOT, ROOT, 0))
    assert level_chances(tree, [0.5, 0.4]) == pytest.approx([0.75, 0.5 * 0.4 / 0.75])
    assert level_chances(Tree((ROOT, 0)), [0.5, 0.4]) == pytest.approx([0.5, 0.4])
    assert usual_chances(MeasuredAcceptance((0.8, 0.6), (0.6, 0.4)), 3) == pytest.approx([0.7, 0.5, 0.5])
    assert usual_chances(None, 2) == [0.6, 0.6]

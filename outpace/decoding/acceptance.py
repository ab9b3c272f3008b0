"""Acceptance rules: which draft tokens are accepted, as pure functions of a draft, distributions and randomness.

Randomness comes through `Chance`, so the tests can run the production code in exact rational arithmetic over every
outcome. Distributions are arrays indexed by token; `target_probs(i)` is the target's distribution after the first i
draft tokens and may be computed on demand.

Every rule ends with one token from the target: "recovered" after a rejected draft token, "bonus" if none was rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outpace.core import Verdict
from outpace.decoding.numerics import total
from outpace.decoding.tree import ROOT, Tree

Distribution = NDArray[Any]  # float32 in service, exact fractions in tests
TargetProbs = Callable[[int], Distribution]
Leniency = Callable[[int, int], bool]


class Chance(Protocol):
    """Independent random decisions, addressed by offset in the draft."""

    def happens(self, offset: int, probability: Any) -> bool: ...

    def draw(self, offset: int, weights: Distribution) -> int:
        """A token with probability proportional to its weight."""
        ...


def match(tokens: Sequence[int], own_token: Callable[[int], int], lenient: Leniency | None = None) -> Verdict:
    """Accept draft tokens while they equal the target's own tokens.

    `own_token(i)` is the target's token after i draft tokens: its argmax when greedy, otherwise the token that the
    noise at that position picks. The output does not depend on the draft, so any draft is lossless and a seeded request
    replays. For a one-hot draft this has the same distribution as rejection sampling: the token is accepted with its
    target probability, and otherwise another one is drawn from the rest.

    `lenient(i, token)` makes it lossy: it may accept a token that differs from the target's own.
    """
    num_lenient = 0
    for i, token in enumerate(tokens):
        own = own_token(i)
        if own != token:
            if lenient is None or not lenient(i, token):
                return Verdict([*tokens[:i], own], len(tokens), i, num_lenient)
            num_lenient += 1
    return Verdict([*tokens, own_token(len(tokens))], len(tokens), len(tokens), num_lenient)


def match_known(tokens: Sequence[int], own_tokens: list[int]) -> Verdict:
    """`match` with all of the target's tokens computed: `own_tokens[i]` is its token after i draft tokens."""
    num_accepted = common_length(tokens, own_tokens)
    return Verdict(own_tokens[: num_accepted + 1], len(tokens), num_accepted)


def match_tree(tokens: Sequence[int], tree: Tree, own_token: Callable[[int], int]) -> Verdict:
    """`match` for a tree: from node to node, as long as a child equals the target's own token.

    `own_token(node)` is the target's token after the path to a node. It does not depend on the draft, so any tree is
    lossless. To be accepted often, children are the first tokens of the draft's distribution under the target's noise.
    """
    path: list[int] = []
    while True:
        node = path[-1] if path else ROOT
        own = own_token(node)
        child = next((each for each in tree.children(node) if tokens[each] == own), None)
        if child is None:
            return Verdict([*(tokens[each] for each in path), own], len(tokens), len(path), 0, tree, tuple(path))
        path.append(child)


def match_known_tree(tokens: Sequence[int], tree: Tree, own_tokens: Sequence[int]) -> Verdict:
    """`match_tree` with all of the target's tokens computed: before the draft, then after each node."""
    return match_tree(tokens, tree, lambda node: own_tokens[node + 1])


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of two token sequences."""
    length = 0
    for mine, theirs in zip(a, b, strict=False):
        if mine != theirs:
            break
        length += 1
    return length


def reject(
    tokens: Sequence[int], draft_probs: Sequence[Distribution], target_probs: TargetProbs, chance: Chance
) -> Verdict:
    """Rejection sampling, token by token (Leviathan et al. 2023, Chen et al. 2023).

    Token x is accepted with probability min(1, target/draft). The first rejected token is replaced by a draw from the
    positive part of target - draft, which is exactly the mass that acceptance leaves.
    """
    for i, token in enumerate(tokens):
        target, draft = target_probs(i), draft_probs[i]
        if not chance.happens(i, min(1, target.item(token) / draft.item(token))):
            recovered = chance.draw(i, _positive_part(target - draft, otherwise=target))
            return Verdict([*tokens[:i], recovered], len(tokens), i)
    bonus = chance.draw(len(tokens), target_probs(len(tokens)))
    return Verdict([*tokens, bonus], len(tokens), len(tokens))


def verify_block(
    tokens: Sequence[int], draft_probs: Sequence[Distribution], target_probs: TargetProbs, chance: Chance
) -> Verdict:
    """Block verification (Sun et al. 2025): verify whole prefixes and keep the longest accepted one.

    `weight` is the running product of target/draft over the prefix, capped at one at every token. A token that the
    target prefers can compensate for an earlier one that it does not. In expectation it never accepts fewer tokens than
    token-by-token rejection. Each prefix is tested separately; the last success wins.
    """
    n = len(tokens)
    weight: Any = 1
    num_accepted = 0
    residual = _block_residual(weight, target_probs(0), draft_probs[0]) if n else target_probs(0)
    for i, token in enumerate(tokens, start=1):
        weight = min(1, weight * target_probs(i - 1).item(token) / draft_probs[i - 1].item(token))
        if i == n:
            kept, left_over = weight, target_probs(n)
        else:
            left_over = _block_residual(weight, target_probs(i), draft_probs[i])
            mass = _mass(left_over)
            kept = mass / (mass + (1 - weight)) if mass > 0 else 0
        if chance.happens(i - 1, kept):
            num_accepted, residual = i, left_over
        if weight == 0:
            break
    own = chance.draw(num_accepted, _positive_part(residual, otherwise=target_probs(num_accepted)))
    return Verdict([*tokens[:num_accepted], own], n, num_accepted)


def _block_residual(weight: Any, target: Distribution, draft: Distribution) -> Distribution:
    residual: Distribution = np.maximum(weight * target - draft, 0)
    return residual


def _positive_part(weights: Distribution, otherwise: Distribution) -> Distribution:
    """Rounding can leave zero where exact arithmetic leaves almost zero; `otherwise` is the limit of that case."""
    positive = np.maximum(weights, 0)
    return positive if positive.any() else otherwise


def _mass(weights: Distribution) -> Any:
    """The sum as a Python number, so that probabilities are compared in double precision, not in the array's."""
    sum_ = total(weights)
    return sum_.item() if isinstance(sum_, np.generic) else sum_


def typical_leniency(target_probs: TargetProbs, posterior_threshold: float, posterior_alpha: float) -> Leniency:
    """Lossy: accept tokens with target probability above min(threshold, alpha * exp(-entropy))."""

    def lenient(i: int, token: int) -> bool:
        target = target_probs(i)
        positive = target[target > 0].astype(np.float64)
        entropy = -float((positive * np.log(positive)).sum())
        return bool(target[token] > min(posterior_threshold, posterior_alpha * np.exp(-entropy)))

    return lenient


def threshold_leniency(target_probs: TargetProbs, threshold: float) -> Leniency:
    """Lossy: accept tokens with at least this target probability; 1 is the exact rule."""

    def lenient(i: int, token: int) -> bool:
        probability = target_probs(i)[token]
        return bool(probability >= threshold and probability > 0)

    return lenient

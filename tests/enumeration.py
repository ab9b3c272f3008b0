"""Exact distributions ("laws") of random procedures, by enumerating every outcome in rational arithmetic.

`exact_law` runs a procedure once for every combination of its random decisions and adds up the probabilities. So a law
is compared with `==`, not estimated. As in the engine, random numbers are looked up by address. `Noise` stores each
number as the interval that earlier decisions left for it; a decision that splits the interval is a branch. A new
address is an independent number, and a repeated address gives the same number, as in production. Procedures that share
noise, on purpose or by mistake, therefore get their true law.

A model is a function from a context to a distribution of small fractions, different for every context.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import permutations
from numbers import Rational
from typing import Any, TypeVar

import numpy as np

from outpace.core import Verdict
from outpace.decoding.acceptance import Distribution

Context = tuple[int, ...]
Model = Callable[[Context], Distribution]
Address = tuple[Hashable, ...]
Outcome = TypeVar("Outcome", bound=Hashable)
Law = dict[Outcome, Fraction]


class Noise:
    """Uniform numbers on [0, 1) by address, on one path through the tree of decisions."""

    def __init__(self, path: Sequence[int] = ()) -> None:
        self.probability = Fraction(1)  # of everything decided so far
        self.untaken: list[tuple[int, ...]] = []  # other branches met after the end of the prescribed path
        self.asked_again: set[Address] = set()
        self._prescribed = path
        self._taken: list[int] = []
        self._intervals: dict[Address, tuple[Fraction, Fraction]] = {}

    def happens(self, address: Address, probability: Any) -> bool:
        """Whether the number lies below `probability`."""
        assert 0 <= probability <= 1, f"{probability} is no probability"
        return self._piece(address, [_exact(probability), Fraction(1)]) == 0

    def draw(self, address: Address, weights: Distribution) -> int:
        """The token that the number selects by inverse transform sampling of the weights."""
        total = _exact(weights.sum())
        ends, end = [], Fraction(0)
        for weight in weights:
            assert weight >= 0
            end += _exact(weight) / total
            ends.append(end)
        return self._piece(address, ends)

    def _piece(self, address: Address, ends: Sequence[Fraction]) -> int:
        """Which piece of [0, 1) the number lies in, pieces ending at `ends`; branches if several are possible."""
        if address in self._intervals:
            self.asked_again.add(address)
        low, high = self._intervals.get(address, (Fraction(0), Fraction(1)))
        open_pieces = []
        start = Fraction(0)
        for piece, end in enumerate(ends):
            left, right = max(low, start), min(high, end)
            if left < right:
                open_pieces.append((piece, left, right))
            start = end
        piece, left, right = open_pieces[self._branch(len(open_pieces))]
        self.probability *= (right - left) / (high - low)
        self._intervals[address] = (left, right)
        return piece

    def _branch(self, num_open: int) -> int:
        """Which of the possible outcomes this path takes; the others are left for other paths."""
        if num_open == 1:
            return 0
        branch, depth = 0, len(self._taken)
        if depth < len(self._prescribed):
            branch = self._prescribed[depth]
        else:
            self.untaken += [(*self._taken, other) for other in range(1, num_open)]
        self._taken.append(branch)
        return branch


Point = tuple[Fraction, Fraction, Fraction]
Polygon = list[Point]
_NONE, _ALL = Fraction(0), Fraction(1)
_TRIANGLE: Polygon = [(_ALL, _NONE, _NONE), (_NONE, _ALL, _NONE), (_NONE, _NONE, _ALL)]


class RaceNoise(Noise):
    """With the engine's own way of picking tokens, for three tokens: each has exponential noise at an address, and
    tokens are ranked by noise / weight, the least first. (The engine divides weights by noise.)

    Only the ratios of the three exponentials matter, and these are a uniform point of a triangle. Decisions cut the
    triangle by straight lines, so that every probability is a ratio of areas: an exact fraction.
    """

    def __init__(self, path: Sequence[int] = ()) -> None:
        super().__init__(path)
        self._left: dict[Address, Polygon] = {}  # of the triangle

    def ranked(self, address: Address, weights: Distribution, count: int) -> tuple[int, ...]:
        """The first `count` tokens of the race; fewer if fewer have a weight."""
        whole = self._left.get(address, _TRIANGLE)
        count = min(count, int(np.count_nonzero(weights)))
        found = list[tuple[tuple[int, ...], Polygon]]()
        for order in permutations(range(3), count):
            polygon = whole
            for place, token in enumerate(order):
                for other in set(range(3)).difference(order[: place + 1]):
                    polygon = _clipped(polygon, token, _exact(weights[other]), other, _exact(weights[token]))
            if _area(polygon) > 0:
                found.append((order, polygon))
        order, self._left[address] = found[self._branch(len(found))]
        self.probability *= _area(self._left[address]) / _area(whole)
        return order


def _clipped(polygon: Polygon, i: int, a: Fraction, j: int, b: Fraction) -> Polygon:
    """The part of a convex polygon in which a * x[i] <= b * x[j]."""
    found: Polygon = []
    for here, there in zip(polygon, [*polygon[1:], *polygon[:1]], strict=True):
        mine, next_ = (b * point[j] - a * point[i] for point in (here, there))
        if mine >= 0:
            found.append(here)
        if (mine > 0 > next_) or (mine < 0 < next_):
            share = mine / (mine - next_)
            x, y, z = (u + share * (v - u) for u, v in zip(here, there, strict=True))
            found.append((x, y, z))
    return found


def _area(polygon: Polygon) -> Fraction:
    """Times a constant."""
    pairs_ = zip(polygon, [*polygon[1:], *polygon[:1]], strict=True)
    return abs(sum((p[0] * q[1] - p[1] * q[0] for p, q in pairs_), start=Fraction(0)))


def _exact(value: Any) -> Fraction:
    # A float in a rule would make every exact comparison below meaningless.
    if not isinstance(value, Rational):
        raise TypeError(f"{value!r} is a {type(value).__name__}, not an exact number")
    return Fraction(value)


class ExactDice:
    """`outpace.decoding.verification.Dice` over exact noise, with the same addresses."""

    def __init__(self, noise: Noise, anchor: int = 0) -> None:
        self._noise = noise
        self._anchor = anchor

    def happens(self, offset: int, probability: Any) -> bool:
        return self._noise.happens(("accept", self._anchor, offset), probability)

    def draw(self, offset: int, weights: Distribution) -> int:
        return self._noise.draw(("recover", self._anchor, offset), weights)


def exact_law(procedure: Callable[[Noise], Outcome], *, may_reuse_noise: bool = False) -> Law[Outcome]:
    """The law of what a procedure returns. By default no number may be used twice: a rule that did so would lose the
    independence that `Chance` promises, since noise is looked up by address.
    """

    def once(path: Sequence[int]) -> tuple[Outcome, Noise]:
        noise = Noise(path)
        outcome = procedure(noise)
        assert may_reuse_noise or not noise.asked_again, f"asked twice: {noise.asked_again}"
        return outcome, noise

    return _law(once)


def race_law(procedure: Callable[[RaceNoise], Outcome]) -> Law[Outcome]:
    """The same with `RaceNoise`, which target and draft share."""

    def once(path: Sequence[int]) -> tuple[Outcome, Noise]:
        noise = RaceNoise(path)
        return procedure(noise), noise

    return _law(once)


def _law(once: Callable[[Sequence[int]], tuple[Outcome, Noise]]) -> Law[Outcome]:
    """`once` runs the procedure on one path."""
    law: Law[Outcome] = {}
    paths: list[tuple[int, ...]] = [()]
    while paths:
        outcome, noise = once(paths.pop())
        law[outcome] = law.get(outcome, Fraction(0)) + noise.probability
        paths += noise.untaken
    assert sum(law.values()) == 1
    return law


def expectation(law: Law[Outcome], value: Callable[[Outcome], int]) -> Fraction:
    return sum((probability * value(outcome) for outcome, probability in law.items()), start=Fraction(0))


def total_variation(law: Law[Outcome], other: Law[Outcome]) -> Fraction:
    """Half the L1 distance: the largest difference in probability that any event can have."""
    gaps = (abs(law.get(o, Fraction(0)) - other.get(o, Fraction(0))) for o in law.keys() | other.keys())
    return sum(gaps, start=Fraction(0)) / 2


def joint_law(model: Model, length: int, context: Context = ()) -> Law[Context]:
    """The law of the next `length` tokens, sampled from the model alone."""
    return completed({(): Fraction(1)}, model, length, context)


def completed(law: Law[Context], model: Model, length: int, context: Context = ()) -> Law[Context]:
    """A law of token sequences, each continued by plain draws from the model up to `length` tokens."""
    full: Law[Context] = {}
    for tokens, probability in law.items():
        if len(tokens) >= length:
            longer = {tokens[:length]: probability}
        else:
            after = model(context + tokens)
            one_more = {(*tokens, t): probability * after[t] for t in np.flatnonzero(after).tolist()}
            longer = completed(one_more, model, length, context)
        for sequence, share in longer.items():
            full[sequence] = full.get(sequence, Fraction(0)) + share
    return full


def row(*probabilities: Fraction | int | str) -> Distribution:
    """A distribution, such as row("1/2", "1/3", "1/6")."""
    exact = np.array([Fraction(p) for p in probabilities], dtype=object)
    assert exact.sum() == 1
    return exact


def one_hot(token: int, vocab: int) -> Distribution:
    return row(*(int(t == token) for t in range(vocab)))


def heated(probs: Distribution) -> Distribution:
    """The distribution at temperature 1/2: its squares, normalised."""
    squares = probs * probs
    return np.asarray(squares / squares.sum(), dtype=object)


def seeded_model(name: str, vocab: int, *, masked: bool = False) -> Model:
    """Arbitrary small fractions, different for every context; `masked` forbids some tokens in most contexts."""

    @cache
    def model(context: Context) -> Distribution:
        generator = random.Random(f"{name} {context}")
        weights = [generator.randint(1, 7) for _ in range(vocab)]
        if masked:
            for token in generator.sample(range(vocab), generator.randint(0, vocab - 1)):
                weights[token] = 0
        return row(*(Fraction(w, sum(weights)) for w in weights))

    return model


@dataclass(frozen=True)
class Pair:
    """A target and a draft over one vocabulary."""

    name: str
    vocab: int
    target: Model
    draft: Model

    def __str__(self) -> str:
        return f"{self.name}-{self.vocab}"


def pairs(vocab: int) -> list[Pair]:
    """Target and draft with equal, unequal and disjoint supports; a perfect and a one-hot draft."""
    target, masked_target = seeded_model("target", vocab), seeded_model("target", vocab, masked=True)
    draft, masked_draft = seeded_model("draft", vocab), seeded_model("draft", vocab, masked=True)
    other_draft = seeded_model("other", vocab, masked=True)
    return [
        Pair("free", vocab, target, draft),
        Pair("target_masked", vocab, masked_target, draft),
        Pair("draft_masked", vocab, target, masked_draft),
        Pair("both_masked", vocab, masked_target, masked_draft),
        Pair("both_masked_again", vocab, masked_target, other_draft),
        Pair("perfect_draft", vocab, masked_target, masked_target),
        Pair("one_hot_draft", vocab, target, lambda context: one_hot(len(context) % vocab, vocab)),
    ]


# A drafter returns tokens and, for each, the distribution it claims to have drawn it from.
Drafted = tuple[list[int], list[Distribution]]
Drafter = Callable[[Pair, Context, int, Noise], Drafted]
Rule = Callable[..., Verdict]
# Whether to stop drafting, given the context with the draft so far and the draft's next distribution.
Stop = Callable[[Context, Distribution], bool]


def draw_draft(pair: Pair, context: Context, depth: int, noise: Noise, *, stop: Stop | None = None) -> Drafted:
    """A draft of up to `depth` tokens, drawn from `probs`. Its noise has the address (start, offset)."""
    tokens: list[int] = []
    probs: list[Distribution] = []
    for offset in range(depth):
        so_far = (*context, *tokens)
        distribution = pair.draft(so_far)
        if stop is not None and stop(so_far, distribution):
            break
        tokens.append(noise.draw(("draft", len(context), offset), distribution))
        probs.append(distribution)
    return tokens, probs


def speculate(
    rule: Rule, pair: Pair, depth: int, noise: Noise, context: Context = (), drafter: Drafter = draw_draft
) -> Verdict:
    """One speculative step after `context`."""
    tokens, probs = drafter(pair, context, depth, noise)
    return rule(tokens, probs, lambda i: pair.target((*context, *tokens[:i])), ExactDice(noise, anchor=len(context)))


def step_law(
    rule: Rule, pair: Pair, depth: int, context: Context = (), drafter: Drafter = draw_draft
) -> Law[tuple[Context, int]]:
    """The law of the tokens that one speculative step emits, and of how many it accepted."""

    def step(noise: Noise) -> tuple[Context, int]:
        verdict = speculate(rule, pair, depth, noise, context, drafter)
        return tuple(verdict.tokens), verdict.num_accepted

    return exact_law(step)


def said(law: Law[tuple[Context, int]]) -> Law[Context]:
    """The law of the emitted tokens alone."""
    tokens_law: Law[Context] = {}
    for (tokens, _), probability in law.items():
        tokens_law[tokens] = tokens_law.get(tokens, Fraction(0)) + probability
    return tokens_law

"""Drafts for requests with a grammar: cut without a bias, and joined with forced text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest

from outpace.core import Draft, Request
from outpace.decoding.acceptance import Distribution
from outpace.decoding.constraints import Constraints
from outpace.decoding.masks import without_forbidden
from outpace.decoding.matcher import Matcher
from outpace.models.special_tokens import SpecialTokens
from outpace.speculation import joining
from outpace.speculation.costs.timing import DraftTiming
from outpace.speculation.proposers.base import DraftAsk, NoDraft
from outpace.speculation.proposers.grammar import GrammarProposer
from outpace.speculation.proposers.ngram import NgramProposer
from outpace.speculation.proposers.suffix import SuffixProposer
from outpace.structured import StructuredOutput
from tests.decoding.test_acceptance_exact import LOSSLESS, UNLIKE, WITH_PROBS, each
from tests.enumeration import (
    Context,
    Drafted,
    Model,
    Noise,
    Pair,
    Rule,
    completed,
    draw_draft,
    exact_law,
    joint_law,
    pairs,
    said,
    step_law,
)
from tests.fakes import EOS, ByteTokenizer
from tests.requests_helper import make_request


class Letters(ByteTokenizer):
    """Three tokens: a, b and c."""

    vocab_size = 3
    end_ids = frozenset[int]()
    specials = SpecialTokens([])

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def token_bytes(self, token: int) -> bytes:
        return b"abc"[token : token + 1]


def matcher_after(context: Sequence[int]) -> Matcher:
    matcher = grammar()()
    matcher.advance(context)
    return matcher


@cache
def grammar() -> Callable[[], Matcher]:
    lark = 'start: a | b | c\na: "a" (b | c)\nb: "b" (a | b | c)\nc: "c" a'
    compiled = Constraints(Letters(), 3).compile(StructuredOutput(grammar=lark))
    return lambda: compiled.matcher(frozenset())


def constrained(model: Model) -> Model:
    """The model's distribution over the tokens that the grammar allows."""

    @cache
    def target(context: Context) -> Distribution:
        return joining.restricted(model(context), matcher_after(context).mask())

    return target


Cut = Callable[[Matcher, Draft], Draft]


def drafter_with(cut: Cut) -> Callable[[Pair, Context, int, Noise], Drafted]:
    """Draws a draft without the grammar, as a head does, and cuts it."""

    def drafter(pair: Pair, context: Context, depth: int, noise: Noise) -> Drafted:
        tokens, probs = draw_draft(pair, context, depth, noise)
        draft = cut(matcher_after(context), Draft(tokens, "any", probs))
        assert draft.probs is not None
        return draft.tokens, list(draft.probs)

    return drafter


def check_lossless(rule: Rule, pair: Pair, depth: int, cut: Cut = joining.cut) -> None:
    target = constrained(pair.target)
    law = said(step_law(rule, Pair(pair.name, 3, target, pair.draft), depth, drafter=drafter_with(cut)))
    assert completed(law, target, depth + 1) == joint_law(target, depth + 1)


@each("rule", LOSSLESS)
@each("pair", [*pairs(3), UNLIKE])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_cut_draft_leaves_the_constrained_law_untouched(rule: Rule, pair: Pair, depth: int):
    check_lossless(rule, pair, depth)


def test_the_grammar_of_these_tests_cuts_drafts_and_restricts_distributions():
    lengths = exact_law(lambda noise: len(drafter_with(joining.cut)(UNLIKE, (), 3, noise)[0]))
    assert len(lengths) > 2
    target = constrained(UNLIKE.target)
    assert any((target(context) == 0).any() for context in ((0,), (2,)))


def unrestricted(matcher: Matcher, draft: Draft) -> Draft:
    kept = joining.cut(matcher, draft)
    assert draft.probs is not None
    return Draft(kept.tokens, kept.proposer, draft.probs[: len(kept.tokens)])


def not_normalised(matcher: Matcher, draft: Draft) -> Draft:
    kept, probs = joining.cut(matcher, draft), draft.probs
    assert probs is not None
    masks = [matcher.mask(draft.tokens[:i]) for i in range(len(kept.tokens))]
    zeroed = [without_forbidden(probs[i], mask) for i, mask in enumerate(masks)]
    return Draft(kept.tokens, kept.proposer, zeroed)


def by_own_probability(matcher: Matcher, draft: Draft) -> Draft:
    """Also cuts before an allowed token that the draft thought unlikely."""
    kept = joining.cut(matcher, draft)
    assert kept.probs is not None
    likely = [row[token] > Fraction(1, 3) for row, token in zip(kept.probs, kept.tokens, strict=True)]
    length = next((i for i, is_likely in enumerate(likely) if not is_likely), len(likely))
    return Draft(kept.tokens[:length], kept.proposer, kept.probs[:length])


@each("rule", WITH_PROBS)
@pytest.mark.parametrize("mutant", [unrestricted, not_normalised, by_own_probability])
def test_the_same_check_finds_wrong_cuts(rule: Rule, mutant: Cut):
    with pytest.raises(AssertionError):
        check_lossless(rule, UNLIKE, 2, mutant)


def test_a_distribution_that_was_masked_already_is_not_changed():
    mask = matcher_after([0]).mask()
    inside = np.array([0.0, 0.3, 0.7], np.float32)
    assert joining.restricted(inside, mask) is inside
    outside = np.array([0.5, 0.125, 0.375], np.float32)
    assert joining.restricted(outside, mask).tolist() == [0.0, 0.25, 0.75]
    assert outside.tolist() == [0.5, 0.125, 0.375], "a head uses the memory again"


BYTES = Constraints(ByteTokenizer(), 258)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kind": {"type": "string"}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


def request_with(structured: StructuredOutput, prompt: bytes, output: bytes = b"") -> Request:
    request = make_request([*prompt], [*output])
    request.matcher = BYTES.compile(structured).matcher(frozenset({EOS}))
    request.matcher.advance([*output])
    return request


class Scripted(NoDraft):
    """Continues one text: drafts what follows the end of the request and the prefix in it."""

    name = "scripted"

    def __init__(self, text: bytes, begin: int) -> None:
        self._text, self._begin = text, begin
        self.asked: list[list[int]] = []

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        self.asked += [list(ask.prefix) for ask in asks]
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: DraftAsk) -> Draft:
        at = self._begin + len(ask.prefix)
        tokens = [*self._text[at : at + ask.depth]]
        return Draft(tokens, self.name, confidence=[0.5] * len(tokens))


def joined(proposer: Any, request: Request, depth: int) -> Draft:
    [draft] = joining.propose(proposer, [DraftAsk(request, depth)])
    assert len(draft.tokens) == len(draft.confidence) <= depth and draft.proposer == proposer.name
    return draft


def test_forced_text_comes_before_between_and_after_what_is_looked_up():
    text = b'{"name": "ab", "kind": "c"}'
    request = request_with(StructuredOutput(json_schema=SCHEMA), b"x")
    draft = joined(Scripted(text, 0), request, 30)
    assert bytes(draft.tokens) == text
    sure = dict(zip(range(30), draft.confidence, strict=False))
    assert all(sure[i] == 1.0 for i in range(9)), "only one token is allowed there"
    assert [sure[text.index(letter)] for letter in (b'ab"', b'b"')] == [0.5, 0.5]
    assert all(sure[i] == 1.0 for i in range(text.index(b', "kind'), text.index(b'"c')))


def test_a_looked_up_draft_ends_before_its_first_forbidden_token_and_forced_text_follows():
    structured = StructuredOutput(regex="a[bc]!!!|q")
    draft = joined(Scripted(b"abxyz", 0), request_with(structured, b"x"), 8)
    assert bytes(draft.tokens) == b"ab!!!"
    draft = joined(Scripted(b"axyz", 0), request_with(structured, b"x"), 8)
    assert bytes(draft.tokens) == b"a"


def test_a_draft_ends_with_the_grammar():
    draft = joined(Scripted(b"abab", 0), request_with(StructuredOutput(regex="(ab|cd)"), b"x"), 8)
    assert bytes(draft.tokens) == b"ab"


def test_depth_limits_a_joined_draft():
    request = request_with(StructuredOutput(json_schema=SCHEMA), b"x")
    assert bytes(joined(GrammarProposer(), request, 4).tokens) == b'{"na'
    assert bytes(joined(Scripted(b"x" * 50, 0), request, 12).tokens) == b'{"name": "xx'


def test_the_grammar_alone_drafts_forced_text_and_nothing_without_a_grammar():
    proposer = GrammarProposer()
    request = request_with(StructuredOutput(json_schema=SCHEMA), b"x", b'{"na')
    assert bytes(joined(proposer, request, 20).tokens) == b'me": "'
    free = make_request([1, 2, 3])
    assert proposer.serves(request) and not proposer.serves(free)
    assert proposer.propose([DraftAsk(free, 4)]) == [Draft([], "grammar")]


def test_a_model_drafts_only_where_no_text_is_forced():
    model = Scripted(b"abxd", 0)
    model.is_lookup = False
    requests = [request_with(StructuredOutput(regex=regex), b"x") for regex in ("forced", "(ab|q)[cd]+", "no: .*")]
    drafts = joining.propose(model, [DraftAsk(request, 4) for request in [*requests, make_request([1])]])
    assert [bytes(draft.tokens) for draft in drafts] == [b"forc", b"ab", b"no: ", b"abxd"]
    assert len(model.asked) == 2 and {draft.proposer for draft in drafts} == {"scripted"}
    assert drafts[0].confidence == [1.0] * 4 and drafts[1].confidence == [0.5] * 3
    model.timing = DraftTiming()
    joining.propose(model, [DraftAsk(requests[0], 4)])
    assert model.timing is None, "no cost is learned from an earlier call"


def test_requests_without_a_grammar_are_drafted_together_and_unchanged():
    proposer = Scripted(b"hello", 0)
    requests = [make_request([1]), request_with(StructuredOutput(regex="hel?p"), b"x"), make_request([2])]
    drafts = joining.propose(proposer, [DraftAsk(request, 4) for request in requests])
    assert [bytes(draft.tokens) for draft in drafts] == [b"hell", b"help", b"hell"]


@pytest.mark.parametrize("make", [lambda: NgramProposer(2, 4), lambda: SuffixProposer(1000)], ids=["ngram", "suffix"])
def test_a_lookup_after_a_prefix_drafts_what_followed_it_and_keeps_no_trace(make: Callable[[], Any]):
    proposer, text = make(), [*range(10, 40), 5, 6, 7, 12]
    request = make_request(text)
    [draft] = proposer.propose([DraftAsk(request, 5, prefix=[20, 21, 22])])
    assert draft.tokens == [23, 24, 25, 26, 27]
    [draft] = proposer.propose([DraftAsk(request, 3, prefix=[13, 14])])
    assert draft.tokens == [15, 16, 17], "the text and the prefix together are matched"
    [draft] = proposer.propose([DraftAsk(request, 3, prefix=[50, 51])])
    assert draft.tokens == []
    request.tokens = [*text, 13, 14]
    [unused] = make().propose([DraftAsk(make_request(request.tokens), 4)])
    assert proposer.propose([DraftAsk(request, 4)]) == [unused]

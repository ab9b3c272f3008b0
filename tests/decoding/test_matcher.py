"""A matcher answers from the emitted tokens and the prefix alone, whatever it was asked before."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from outpace.decoding.constraints import Constraint, Constraints
from outpace.decoding.masks import allows, num_members
from outpace.decoding.matcher import Ending, Matcher
from outpace.structured import StructuredOutput
from tests.fakes import BOS, EOS, ByteTokenizer
from tests.piece_tokenizer import PieceTokenizer

BYTES = Constraints(ByteTokenizer(), 258)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 3, "maximum": 140},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue", None, True]}, "maxItems": 4},
        "inner": {"$ref": "#/$defs/inner"},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
    "$defs": {"inner": {"type": "object", "properties": {"inner": {"$ref": "#/$defs/inner"}, "é": {"type": "number"}}}},
}
STRUCTURES = {
    "schema": StructuredOutput(json_schema=SCHEMA),
    "json_object": StructuredOutput(json_object=True),
    "regex": StructuredOutput(regex=r"(ab|abc|a[0-9]{2,4})*(x|name: [a-z]+)"),
    "choice": StructuredOutput(choice=["red", "redder", "green, blue", "é"]),
    "grammar": StructuredOutput(grammar='start: sum\nsum: sum "+" atom | atom\natom: /[0-9]+/ | "(" sum ")"'),
}


def matcher_of(regex: str, stop_ids: frozenset[int] = frozenset({EOS})) -> Matcher:
    return BYTES.compile(StructuredOutput(regex=regex)).matcher(stop_ids)


def allowed(matcher: Matcher, prefix: Sequence[int] = ()) -> list[int]:
    logits = matcher.masked(np.zeros(258, np.float32), prefix)
    found = np.flatnonzero(np.isfinite(logits)).tolist()
    assert num_members(matcher.mask(prefix)) == len(found)
    return found


def test_the_mask_follows_emitted_tokens_and_prefix():
    matcher = matcher_of("ab[cd]?")
    assert allowed(matcher) == [*b"a"]
    assert allowed(matcher, [*b"ab"]) == [*b"cd", EOS]
    assert allowed(matcher, [*b"a"]) == [*b"b"], "back inside the draft"
    matcher.advance([*b"ab"])
    assert allowed(matcher) == [*b"cd", EOS]


def test_every_stop_token_is_allowed_exactly_where_the_grammar_may_end():
    matcher = matcher_of("ab?", frozenset({EOS, BOS, ord("z")}))
    assert allowed(matcher) == [*b"a"]
    assert allowed(matcher, [*b"a"]) == [*b"bz", EOS, BOS]
    assert allowed(matcher, [*b"ab"]) == [*b"z", EOS, BOS]


def test_no_token_is_forbidden_where_none_can_be_emitted():
    matcher = matcher_of("ab?")
    assert len(allowed(matcher, [*b"ax"])) == 258, "after a forbidden token"
    assert len(allowed(matcher, [*b"a", EOS])) == 258, "after the end"


@pytest.mark.parametrize(
    ("draft", "count"),
    [(b"abc", 3), (b"abx", 2), (b"x", 0), (b"", 0), (b"abca", 3), ([*b"ab", EOS], 3), ([*b"abc", EOS], 3), ([EOS], 0)],
)
def test_a_draft_is_allowed_up_to_its_first_forbidden_token_and_not_past_the_end(draft: Sequence[int], count: int):
    assert matcher_of("ab[cd]?").count_allowed([*draft]) == count


@pytest.mark.parametrize(
    ("tokens", "ending"),
    [
        (b"abc", Ending(3, "stop")),
        (b"ab", None),
        ([*b"ab", EOS], None),  # the stop token ends it
        ([*b"abc", EOS], Ending(3, "stop")),
        (b"ax", Ending(1, "length")),  # never emitted
    ],
)
def test_the_end_of_the_grammar_is_found_without_a_stop_token(tokens: Sequence[int], ending: Ending | None):
    assert matcher_of("ab[cd]?").ending([*tokens]) == ending


def test_forced_text_is_the_longest_that_must_follow():
    matcher = BYTES.compile(StructuredOutput(json_schema=SCHEMA)).matcher(frozenset({EOS}))
    assert bytes(matcher.forced().tokens) == b'{"name": "'
    assert bytes(matcher.forced([*b'{"na']).tokens) == b'me": "'
    assert matcher.forced([*b'{"name": "']).tokens == []
    assert matcher_of("a").forced([*b"a"]).tokens == []


def answers(matcher: Matcher, prefix: Sequence[int]) -> tuple[object, ...]:
    return matcher.mask(prefix).tobytes(), matcher.forced(prefix), matcher.ending(prefix), matcher.count_allowed(prefix)


def likely_draft(matcher: Matcher, rng: random.Random, vocab_size: int) -> list[int]:
    """Up to eight tokens, most of them allowed, some arbitrary, and some of the grammar's forced text."""
    draft: list[int] = []
    while len(draft) < rng.randrange(9):
        logits = matcher.masked(np.zeros(vocab_size, np.float32), draft)
        choices = np.flatnonzero(np.isfinite(logits)).tolist()
        likely = matcher.forced(draft).tokens if rng.random() < 0.3 else []
        draft += likely or [rng.choice(choices) if rng.random() < 0.9 else rng.randrange(vocab_size)]
    return draft


def assert_only_tokens_are_those_of_masks(matcher: Matcher, fresh: Matcher, prefix: Sequence[int]) -> None:
    only, mask = matcher.only_token(prefix), fresh.mask(prefix)
    assert only is None or (num_members(mask) == 1 and allows(mask, only))


def walk(
    constraints: Constraints, structured: StructuredOutput, rng: random.Random, vocab_size: int, steps: int
) -> int:
    """Draft, accept a part, ask again at random places; compare with a fresh matcher. Returns the number of steps."""
    constraint, stop_ids = constraints.compile(structured), frozenset({EOS})
    matcher, emitted = constraint.matcher(stop_ids), list[int]()
    for step in range(steps):
        draft = likely_draft(matcher, rng, vocab_size)
        for _ in range(rng.randrange(3)):
            answers(matcher, draft[: rng.randrange(len(draft) + 1)])
        fresh = constraint.matcher(stop_ids)
        fresh.advance(emitted)
        num_accepted = rng.randrange(matcher.count_allowed(draft) + 1)
        assert answers(matcher, draft[:num_accepted]) == answers(fresh, draft[:num_accepted])
        forced = matcher.forced()
        for i, token in enumerate(forced.tokens[: forced.num_certain]):
            mask = matcher.mask(forced.tokens[:i])
            assert allows(mask, token) and num_members(mask) == 1
        assert_only_tokens_are_those_of_masks(matcher, fresh, draft[:num_accepted])
        assert forced.tokens == [] or matcher.count_allowed(forced.tokens) == len(forced.tokens)
        token = rng.choice([*draft[num_accepted : num_accepted + 1], rng.randrange(vocab_size)])
        prefix = draft[:num_accepted]
        assert matcher.allows(token, prefix) == allows(fresh.mask(prefix), token)
        ending = matcher.ending(draft[:num_accepted])
        if ending is not None or EOS in draft[:num_accepted]:
            return step + 1
        matcher.advance(draft[:num_accepted])
        emitted += draft[:num_accepted]
    return steps


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), PieceTokenizer()], ids=["bytes", "pieces"])
def test_a_matcher_equals_a_fresh_one_after_any_history(name: str, tokenizer: ByteTokenizer):
    constraints = Constraints(tokenizer, tokenizer.vocab_size)
    num_steps = 0
    for seed in range(10_000):
        rng = random.Random(f"{name} {seed}")
        num_steps += walk(constraints, STRUCTURES[name], rng, tokenizer.vocab_size, 40)
        if num_steps >= 1000:
            break
    assert num_steps >= 1000


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), PieceTokenizer()], ids=["bytes", "pieces"])
def test_plain_decoding_along_forced_text_equals_fresh_matchers(name: str, tokenizer: ByteTokenizer):
    """As the engine does without drafts: one token, its ending, advance."""
    constraint = Constraints(tokenizer, tokenizer.vocab_size).compile(STRUCTURES[name])
    num_forced = 0
    for seed in range(30):
        rng, matcher, emitted = random.Random(f"{name} {seed}"), constraint.matcher(frozenset({EOS})), list[int]()
        while len(emitted) < 40:
            fresh = matcher_after(constraint, emitted)
            only, mask = matcher.only_token(), fresh.mask()
            if only is not None:
                assert num_members(mask) == 1 and allows(mask, only)
                num_forced += 1
            choices = [token for token in range(tokenizer.vocab_size) if allows(mask, token)]
            token = only if only is not None else rng.choice(choices)
            assert matcher.allows(token)
            ending = matcher.ending([token])
            assert ending == fresh.ending([token])
            if ending is not None or token == EOS:
                break
            matcher.advance([token])
            emitted.append(token)
            if rng.random() < 0.1:
                assert answers(matcher, []) == answers(matcher_after(constraint, emitted), [])
    assert num_forced > 10 or name == "grammar"  # that one forces nothing


def matcher_after(constraint: Constraint, emitted: Sequence[int]) -> Matcher:
    fresh = constraint.matcher(frozenset({EOS}))
    fresh.advance(emitted)
    return fresh


def test_a_forced_run_is_asked_for_once():
    matcher = BYTES.compile(StructuredOutput(regex="start: [ab]")).matcher(frozenset({EOS}))
    assert matcher.only_token() == ord("s")
    matcher._parser = None  # type: ignore[assignment]
    for token in b"start:":
        assert matcher.only_token() == token
        assert matcher.allows(token) and not matcher.allows(ord("x"))
        assert matcher.ending([token]) is None
        matcher.advance([token])
    assert matcher.only_token() == ord(" ")


class Failing:
    """A parser that fails in the mask after certain text, as one that exceeds its limits does."""

    def __init__(self, inner: object, text: bytes) -> None:
        self._inner, self._text, self._seen, self._is_dead = inner, text, list[int](), False

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def deep_copy(self) -> Failing:
        assert not self._seen
        return Failing(self._inner.deep_copy(), self._text)  # type: ignore[attr-defined]

    def try_consume_tokens(self, tokens: list[int]) -> int:
        count: int = self._inner.try_consume_tokens(tokens)  # type: ignore[attr-defined]
        self._seen += tokens[:count]
        return count

    def rollback(self, num_tokens: int) -> bool:
        assert not self._is_dead
        del self._seen[len(self._seen) - num_tokens :]
        return bool(self._inner.rollback(num_tokens))  # type: ignore[attr-defined]

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        self._is_dead |= bytes(self._seen) == self._text
        self._inner.unsafe_compute_mask_ptr(address, size)  # type: ignore[attr-defined]

    def is_error(self) -> bool:
        return self._is_dead


def failing_matcher(regex: str, text: bytes) -> Matcher:
    constraint = BYTES.compile(StructuredOutput(regex=regex))
    return Matcher(Failing(constraint.template, text), 258, frozenset({EOS}), BYTES.tokenize)  # type: ignore[arg-type]


def test_a_parser_that_fails_ends_the_request_there_as_incomplete():
    matcher = failing_matcher("[ab]{4}", b"ab")
    assert allowed(matcher, [*b"a"]) == [*b"ab"]
    assert len(allowed(matcher, [*b"ab"])) == 258
    assert matcher.ending([*b"abb"]) == Ending(2, "length")
    assert matcher.count_allowed([*b"abb"]) == 2
    assert allowed(matcher, [*b"aa"]) == [*b"ab"], "other drafts are not concerned"
    matcher.advance([*b"a"])
    assert matcher.ending([*b"b"]) == Ending(1, "length")
    matcher.advance([*b"a"])
    assert allowed(matcher) == [*b"ab"]
    assert matcher.ending([*b"ba"]) == Ending(2, "stop")


class Refusing:
    """A parser that fails as soon as it is told so, as one that exceeds a limit while it consumes tokens."""

    def __init__(self, inner: object) -> None:
        self._inner, self.is_failing = inner, False

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def deep_copy(self) -> Refusing:
        return Refusing(self._inner.deep_copy())  # type: ignore[attr-defined]

    def try_consume_tokens(self, tokens: list[int]) -> int:
        return 0 if self.is_failing else self._inner.try_consume_tokens(tokens)  # type: ignore[attr-defined]

    def is_error(self) -> bool:
        return self.is_failing


def test_a_parser_that_fails_after_a_forced_run_ends_the_request_as_incomplete():
    template = Refusing(BYTES.compile(StructuredOutput(regex="start: [ab]")).template)
    matcher = Matcher(template, 258, frozenset({EOS}), BYTES.tokenize)  # type: ignore[arg-type]
    assert matcher.only_token() == ord("s")
    matcher.advance([*b"start:"])
    matcher._parser.is_failing = True  # type: ignore[attr-defined]
    assert matcher.ending([ord(" ")]) == Ending(0, "length")
    assert len(allowed(matcher)) == 258


def test_a_grammar_without_a_way_on_ends_as_incomplete():
    grammar = StructuredOutput(grammar='start: "a" more | "b"\nmore: more "c"')
    matcher = BYTES.compile(grammar).matcher(frozenset({EOS}))
    matcher.mask([*b"a"])
    ending = matcher.ending([*b"a"])
    assert allowed(matcher) == [*b"b"] or ending == Ending(1, "length")


def test_a_vocabulary_without_an_end_token_ends_with_the_grammar():
    class Endless(ByteTokenizer):
        vocab_size = 256
        end_ids = frozenset[int]()
        specials = type(ByteTokenizer.specials)([])

    matcher = Constraints(Endless(), 256).compile(StructuredOutput(regex="ab?")).matcher(frozenset())
    assert matcher.ending([*b"ab"]) == Ending(2, "stop")
    logits = matcher.masked(np.zeros(256, np.float32), [*b"a"])
    assert np.flatnonzero(np.isfinite(logits)).tolist() == [*b"b"]

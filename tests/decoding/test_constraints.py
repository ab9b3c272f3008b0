"""Descriptions of structured output: what is compiled, what is refused, and within which bounds."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llguidance import LLParserLimits

from outpace.decoding import constraints as module
from outpace.decoding.constraints import Constraints
from outpace.decoding.exact_tokenizer import ExactTokenizer
from outpace.errors import UsageError
from outpace.structured import StructuredOutput
from tests.fakes import BOS, EOS, ByteTokenizer
from tests.piece_tokenizer import PieceTokenizer

BYTES = Constraints(ByteTokenizer(), 258)


def accepts(constraints: Constraints, structured: StructuredOutput, text: bytes) -> bool:
    """Whether a request may emit exactly this text."""
    matcher = constraints.compile(structured).matcher(frozenset())
    if matcher.count_allowed([*text]) < len(text):
        return False
    return matcher.ending([*text]) is not None or matcher.count_allowed([*text, EOS]) == len(text) + 1


@pytest.mark.parametrize(
    ("given", "good", "bad"),
    [
        ({"json_schema": {"type": "integer"}}, b"-12", b"1.5"),
        ({"json_schema": True}, b'{"a": [1, null]}', b"{"),
        ({"json_schema": {"enum": ["a b", 3]}}, b'"a b"', b"4"),
        ({"json_object": True}, b'{"a": {"b": [1, 2]}}', b"[1]"),
        ({"regex": "[a-c]+/d"}, b"abc/d", b"abd"),
        ({"choice": ["a", "ab", 'é"\\/\n.*']}, b"ab", b"ac"),
        ({"choice": ["a", "ab", 'é"\\/\n.*']}, 'é"\\/\n.*'.encode(), 'é"\\/\n..'.encode()),
        ({"grammar": 'start: "<" start ">" | "x"'}, b"<<x>>", b"<<x>"),
    ],
)
def test_a_description_allows_what_it_describes(given: dict[str, Any], good: bytes, bad: bytes):
    assert accepts(BYTES, StructuredOutput(**given), good)
    assert not accepts(BYTES, StructuredOutput(**given), bad)


def test_json_has_one_spelling_unless_the_schema_asks_for_free_space():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert accepts(BYTES, StructuredOutput(json_schema=schema), b'{"a": 1}')
    assert not accepts(BYTES, StructuredOutput(json_schema=schema), b'{"a":1}')
    schema["x-guidance"] = {"whitespace_flexible": True, "key_separator": ":", "item_separator": ","}
    assert accepts(BYTES, StructuredOutput(json_schema=schema), b'{ "a":\n1}')


def test_control_tokens_are_never_text_and_can_be_named():
    anything = BYTES.compile(StructuredOutput(regex="(?s:.*)")).matcher(frozenset())
    assert anything.count_allowed([BOS]) == 0
    named = BYTES.compile(StructuredOutput(grammar='start: "x" <s> "y"')).matcher(frozenset())
    assert named.count_allowed([*b"x", BOS, *b"y"]) == 3
    assert named.count_allowed([*b"x<s>y"]) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"json_schema": {"type": "foo"}}, "json_schema cannot be used: Invalid type: foo"),
        ({"json_schema": {"not": {}}}, "json_schema cannot be used"),
        ({"json_schema": {"minimum": 5, "maximum": 3, "type": "integer"}}, "Unsatisfiable"),
        ({"json_schema": {"$ref": "#"}}, "nothing satisfies"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "json_schema cannot be used"),
        ({"json_schema": {"const": "\ud800"}}, "json_schema cannot be used"),
        ({"regex": "["}, "regex cannot be used: unclosed character class"),
        ({"regex": "(?=a)a"}, "look-around"),
        ({"regex": "\ud800"}, "regex cannot be used"),
        ({"choice": ["a", "\ud800"]}, "choice cannot be used"),
        ({"grammar": "start: other"}, "unknown name"),
        ({"grammar": 'other: "a"'}, "no start rule"),
        ({"grammar": "start: start"}, "nothing satisfies"),
        ({"grammar": 'start: ""'}, "only empty output"),
    ],
)
def test_what_is_invalid_unsupported_or_unsatisfiable_is_refused_in_one_sentence(given: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message) as refused:
        BYTES.compile(StructuredOutput(**given))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_a_description_whose_masks_take_too_long_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_limits", lambda: LLParserLimits(step_max_items=3, verbose_errors=False))
    schema = {"anyOf": [{"const": value} for value in ("ab", "ac", [1], {"a": 2}, 5)]}
    with pytest.raises(UsageError, match="too complex; simplify it"):
        Constraints(ByteTokenizer(), 258).compile(StructuredOutput(json_schema=schema))


def chain_of_refs(length: int) -> str:
    links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    return json.dumps({"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "integer"}}})


def chain_of_rules(length: int) -> str:
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(length)) + f'\nr{length}: "a"'


@pytest.mark.parametrize(
    "given", [{"json_schema": chain_of_refs(3500)}, {"grammar": chain_of_rules(8000)}], ids=["references", "rules"]
)
def test_a_long_chain_does_not_overflow_the_stack(given: dict[str, Any]):
    assert accepts(BYTES, StructuredOutput(**given), b"1" if "json_schema" in given else b"a")


@pytest.mark.parametrize(
    "given",
    [
        {"json_schema": {"enum": [f"value {i}" for i in range(20_000)]}},
        {"regex": "a" * 200_000},
        {"choice": ["a" * 100_000, "b" * 100_000]},
    ],
)
def test_a_description_has_a_limited_size(given: dict[str, Any]):
    with pytest.raises(UsageError, match="at most 131072 are allowed; shorten it"):
        BYTES.compile(StructuredOutput(**given))


def test_equal_descriptions_are_compiled_once_and_the_least_recently_used_are_dropped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "KEPT_CHARS", 12)
    constraints = Constraints(ByteTokenizer(), 258)
    first = constraints.compile(StructuredOutput(regex="aaaa"))
    second = constraints.compile(StructuredOutput(regex="bbbb"))
    assert constraints.compile(StructuredOutput(regex="aaaa")) is first
    constraints.compile(StructuredOutput(regex="cccccc"))
    assert constraints.compile(StructuredOutput(regex="aaaa")) is first
    assert constraints.compile(StructuredOutput(regex="bbbb")) is not second


def test_threads_may_compile_at_once():
    constraints = Constraints(PieceTokenizer(), PieceTokenizer.vocab_size)
    regexes = [f"x{i % 7}+" for i in range(100)]
    with ThreadPoolExecutor(8) as pool:
        compiled = list(pool.map(lambda regex: constraints.compile(StructuredOutput(regex=regex)), regexes))
    for regex, constraint in zip(regexes, compiled, strict=True):
        assert constraint.matcher(frozenset()).forced().tokens == [*regex[:2].encode()]


class SpacedTokenizer(PieceTokenizer):
    """It writes a space before a text, as tokenizers of SentencePiece do."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return super().encode(" " + text, add_special=add_special, parse_special=parse_special)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), PieceTokenizer(), SpacedTokenizer()])
@pytest.mark.parametrize("text", [b'{"name": "', b"abcd", b"", "é".encode(), b"\xc3", b"\xff\xfe", b"x" * 300])
def test_forced_text_is_spelled_by_tokens_of_exactly_its_bytes(tokenizer: ByteTokenizer, text: bytes):
    tokens = ExactTokenizer(tokenizer)(text)
    assert b"".join(map(tokenizer.token_bytes, tokens)) == text


def test_forced_text_is_split_as_the_tokenizer_splits_it():
    tokenizer = PieceTokenizer()
    assert ExactTokenizer(SpacedTokenizer())(b"name") == tokenizer.encode("name", add_special=False)


@pytest.mark.parametrize(
    ("before", "after"), [(b"", b"\xc3"), (b"\xa9", b""), (b"\x98\x80", b"\xf0\x9f\x98"), (b"\xa9", b"\xe5\xad")]
)
def test_parts_of_characters_leave_the_rest_as_the_tokenizer_splits_it(before: bytes, after: bytes):
    class Spelling(PieceTokenizer):
        """It has longer tokens, and uses none."""

        pieces = ByteTokenizer.pieces

    tokens = ExactTokenizer(Spelling())(before + b"name green" + after)
    assert b"".join(map(Spelling().token_bytes, tokens)) == before + b"name green" + after
    assert tokens[len(before) :][:10] == [*b"name green"]


@pytest.mark.parametrize("longest", [1, 2, 4, 7, 12, 20, 40])
def test_groups_of_tokens_change_no_mask(longest: int, monkeypatch: pytest.MonkeyPatch):
    """At every place of strings with `maxLength`, where groups fit less and less."""
    structured = StructuredOutput(json_schema={"type": "array", "items": {"type": "string", "maxLength": longest}})
    made = []
    for groups in (module._TOKEN_GROUPS, []):
        monkeypatch.setattr(module, "_TOKEN_GROUPS", groups)
        made.append(Constraints(PieceTokenizer(), PieceTokenizer.vocab_size).compile(structured))
    grouped, plain = (constraint.matcher(frozenset({EOS})) for constraint in made)
    num_places = 0
    for token in PieceTokenizer().encode(json.dumps(["greenblue" * 9], ensure_ascii=False), add_special=False):
        assert grouped.mask().tobytes() == plain.mask().tobytes()
        num_places += 1
        if not plain.allows(token):
            break
        grouped.advance([token])
        plain.advance([token])
    assert num_places > longest / 9


class LongTokenizer(ByteTokenizer):
    """Two tokens more, of 1,024 and 1,025 bytes."""

    vocab_size = 260

    def token_bytes(self, token: int) -> bytes:
        return b"x" * (1024 + token - 258) if token >= 258 else super().token_bytes(token)


def test_a_token_that_is_too_long_for_the_parser_is_never_allowed():
    """llguidance panics on a vocabulary with tokens of more than 1,024 bytes; a fuzzed GGUF had one."""
    matcher = Constraints(LongTokenizer(), 260).compile(StructuredOutput(regex="x*y")).matcher(frozenset())
    assert matcher.count_allowed([258, ord("y")]) == 2
    assert matcher.count_allowed([259]) == 0

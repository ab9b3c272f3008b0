"""Where special tokens are found in a text; tests/models/test_gguf_tokenizer.py compares it with llama.cpp."""

from __future__ import annotations

import pytest

from outpace.models.special_tokens import SpecialToken, SpecialTokens


def specials(*texts: str, **strips: bool) -> SpecialTokens:
    return SpecialTokens(SpecialToken(i, text, is_control=False, **strips) for i, text in enumerate(texts))


def found(tokens: SpecialTokens, text: str) -> list[str]:
    return [text[place.start : place.end] for place in tokens.places(text)]


@pytest.mark.parametrize(
    ("texts", "text", "expected"),
    [
        (["<a>", "<b>"], "x<a><b>y<a>", ["<a>", "<b>", "<a>"]),
        (["ab", "bcd"], "abcd", ["bcd"]),  # the longest, though it begins later
        (["ab", "bcd", "a"], "abcd", ["a", "bcd"]),  # what is left of it
        (["aa", "aaaaa"], "a" * 13, ["aaaaa", "aaaaa", "aa"]),
        (["<", "<think>"], "<think><thin", ["<think>", "<"]),
        (["x"], "", []),
        ([], "x", []),
    ],
)
def test_the_longest_comes_first_then_the_leftmost(texts, text, expected):
    assert found(specials(*texts), text) == expected


def test_white_space_belongs_to_a_token_that_strips_it():
    assert found(specials("<a>", strips_left=True), "x \n<a> y") == [" \n<a>"]
    assert found(specials("<a>", strips_right=True), "<a> \n <a> y") == ["<a> \n ", "<a> "]
    assert found(specials("<a>", " ", strips_right=True), "<a> b ") == ["<a> ", " "]


def test_every_start_is_reported_also_inside_another_token():
    assert list(specials("aba", "b").starts("ababa")) == [0, 1, 2, 3]


def test_tokens_of_equal_length_that_can_overlap_have_no_clear_order():
    assert specials("<a>", "<b>", "<bc>").has_clear_order
    assert specials("\n\n", "\n\n\n").has_clear_order
    assert not specials("ab", "bc").has_clear_order


def test_the_work_grows_with_the_text_and_not_with_its_square():
    class Counted(SpecialTokens):
        looks = 0

        def _longest_at(self, *arguments):
            self.looks += 1
            return super()._longest_at(*arguments)

    counts = []
    for n in (500, 2000):
        tokens = Counted(SpecialToken(i, "\n" * i, is_control=False) for i in range(1, 32))
        assert tokens.places("\n" * n)
        counts.append(tokens.looks)
    assert counts[1] < 5 * counts[0]


def test_a_token_whose_text_is_no_utf8_is_ordered_by_its_bytes():
    odd = b"<\xd5>".decode(errors="surrogateescape")
    tokens = specials("ab", odd, "<ab>")
    assert [token.text for token in tokens.tokens] == ["<ab>", odd, "ab"] and tokens.has_clear_order

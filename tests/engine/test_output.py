"""OutputWriter shows whole characters, never a stop string, and the same text for any grouping into steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.config import SamplingParams
from outpace.core import FinishReason, Segment
from outpace.engine.output import OutputWriter
from tests.fakes import BOS, EOS, ByteTokenizer


class PieceTokenizer(ByteTokenizer):
    """Tokens of several bytes, as real vocabularies have them."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._texts = list(pieces)

    def token_bytes(self, token: int) -> bytes:
        return self._texts[token]


def writer(*stop: str, min_tokens: int = 0, stop_ids: frozenset[int] = frozenset({EOS})) -> OutputWriter:
    return OutputWriter(ByteTokenizer(), SamplingParams(stop=stop, min_tokens=min_tokens), stop_ids)


def feed(
    out: OutputWriter, tokens: Sequence[int], *, drafted_by: str | None = None, room: int = 1000
) -> tuple[list[str], FinishReason | None]:
    """Add tokens until the end; returns the text that each one shows, and the finish reason."""
    shown = []
    for i, token in enumerate(tokens, start=1):
        reason = out.add(token, drafted_by=drafted_by, room_left=room - i)
        shown.append("".join(segment.text for segment in out.take()))
        if reason:
            return shown, reason
    return shown, None


# ---- characters


def test_a_character_appears_with_its_last_byte():
    assert feed(writer(), list("aé€😀".encode())) == (["a", "", "é", "", "", "€", "", "", "", "😀"], None)


def test_a_character_cut_off_by_the_end_becomes_one_replacement_character():
    out = writer()
    assert feed(out, [*b"ok", *"😀".encode()[:3]]) == (["o", "k", "", "", ""], None)
    out.finish()
    assert [s.text for s in out.take()] == ["\ufffd"]
    assert out.text == "ok\ufffd"


def test_a_character_cut_off_by_another_is_replaced_and_the_other_kept():
    assert feed(writer(), [*"€".encode()[:2], ord("x")]) == (["", "", "\ufffdx"], None)


def test_bytes_that_begin_no_character_are_replaced_at_once():
    assert feed(writer(), [0xFF, 0x80, ord("a")]) == (["\ufffd", "\ufffd", "a"], None)


def test_control_tokens_add_no_text_and_do_not_break_a_character():
    first, second = "é".encode()
    assert feed(writer(), [first, BOS, second]) == (["", "", "é"], None)


def test_finishing_twice_shows_the_rest_once():
    out = writer("xy")
    feed(out, b"ax")
    out.finish()
    out.finish()
    assert [s.text for s in out.take()] == ["x"]
    assert out.take() == []
    assert out.text == "ax"


# ---- stop strings


def test_text_before_a_stop_string_is_kept_and_the_rest_is_not():
    out = writer("END")
    assert feed(out, b"say END now") == (["s", "a", "y", " ", "", "", ""], "stop")
    assert out.text == "say "
    assert out.num_tokens == len("say END")


def test_a_stop_string_inside_one_token_ends_there():
    out = OutputWriter(PieceTokenizer([b"one STOP two"]), SamplingParams(stop="STOP"), frozenset())
    assert feed(out, [0]) == (["one "], "stop")


def test_a_stop_string_across_tokens_of_several_characters_is_found():
    pieces = [b"a<|", b"e", b"nd|", b">b"]
    out = OutputWriter(PieceTokenizer(pieces), SamplingParams(stop="<|end|>"), frozenset())
    assert feed(out, [0, 1, 2, 3]) == (["a", "", "", ""], "stop")
    assert out.text == "a"


def test_a_stop_string_of_multi_byte_characters_is_found():
    out = writer("€€")
    assert feed(out, "a€b€€".encode())[1] == "stop"
    assert out.text == "a€b"


def test_held_text_is_shown_as_soon_as_it_cannot_become_a_stop_string():
    assert feed(writer("END"), b"ENx") == (["", "", "ENx"], None)


def test_held_text_that_begins_anew_is_held_from_the_new_beginning():
    out = writer("aab")
    assert feed(out, b"aaab") == (["", "", "a", ""], "stop")
    assert out.text == "a"


def test_held_text_is_shown_at_the_end():
    out = writer("END")
    assert feed(out, b"the EN", room=6) == (["t", "h", "e", " ", "", "EN"], "length")
    assert out.text == "the EN"


def test_held_text_is_shown_when_a_stop_token_ends_the_request():
    out = writer("END")
    assert feed(out, [*b"EN", EOS]) == (["", "", "EN"], "stop")


def test_the_first_of_several_stop_strings_wins():
    for stops in (("two", "one"), ("one", "two")):
        out = writer(*stops)
        assert feed(out, b"zero one two")[1] == "stop"
        assert out.text == "zero "


def test_a_stop_string_that_begins_another_ends_first():
    out = writer("abc", "ab")
    assert feed(out, b"xab") == (["x", "", ""], "stop")
    assert out.text == "x"


def test_a_stop_string_inside_the_beginning_of_another_ends_and_leaves_what_came_before():
    out = writer("abcd", "bc")
    assert feed(out, b"abc")[1] == "stop"
    assert out.text == "a"


def test_a_one_character_stop_string_holds_nothing_back():
    assert feed(writer("\n"), b"ab\n") == (["a", "b", ""], "stop")


# ---- why a request ends


def test_a_stop_token_ends_without_text():
    out = writer()
    assert feed(out, [ord("a"), EOS]) == (["a", ""], "stop")
    assert out.text == "a" and out.num_tokens == 2


def test_a_stop_token_of_the_requests_own_adds_no_text_even_if_it_has_some():
    assert feed(writer(stop_ids=frozenset({ord("!")})), b"hi!") == (["h", "i", ""], "stop")


def test_the_last_token_with_room_ends_with_length_and_is_shown():
    assert feed(writer(), b"abc", room=2) == (["a", "b"], "length")


def test_a_stop_on_the_last_token_is_a_stop():
    assert feed(writer("b"), b"ab", room=2)[1] == "stop"
    assert feed(writer(), [ord("a"), EOS], room=2)[1] == "stop"


def test_neither_stop_tokens_nor_stop_strings_count_before_min_tokens():
    out = writer("b", min_tokens=4)
    assert feed(out, [ord("b"), EOS, ord("a"), ord("b")]) == (["b", "", "a", ""], "stop")
    assert out.text == "ba"
    assert feed(writer(min_tokens=3), [EOS, EOS, EOS]) == (["", "", ""], "stop")


def test_a_stop_string_begun_before_min_tokens_counts_when_completed_after():
    out = writer("END", min_tokens=3)
    assert feed(out, b"END") == (["", "", ""], "stop")
    assert out.text == ""


@pytest.mark.parametrize("stop", [("END",), ("END", "ENDS", "D")])
def test_the_stop_string_stays_in_the_text_if_asked(stop):
    params = SamplingParams(stop=stop, include_stop_str_in_output=True)
    out = OutputWriter(ByteTokenizer(), params, frozenset({EOS}))
    assert feed(out, b"abENDS") == (["a", "b", "", "", "END"], "stop")
    assert out.text == "abEND"


def test_of_a_token_with_more_text_only_the_part_up_to_the_stop_string_stays():
    class Pairs(ByteTokenizer):
        def token_bytes(self, token: int) -> bytes:
            return bytes([token, token])

    params = SamplingParams(stop=["bbc"], include_stop_str_in_output=True)
    out = OutputWriter(Pairs(), params, frozenset())
    assert feed(out, b"abcd") == (["aa", "", "bbc"], "stop")


@pytest.mark.parametrize(("skip", "text"), [(True, "a"), (False, "a<s>")])
def test_control_tokens_are_text_if_asked_and_the_end_token_only_with_its_stop_string(skip, text):
    for include, end in ((False, ""), (True, "" if skip else "</s>")):
        params = SamplingParams(skip_special_tokens=skip, include_stop_str_in_output=include)
        out = OutputWriter(ByteTokenizer(), params, frozenset({EOS}))
        assert feed(out, [ord("a"), BOS, EOS])[1] == "stop"
        assert out.text == text + end


def test_a_stop_token_of_the_requests_own_is_shown_if_asked():
    params = SamplingParams(include_stop_str_in_output=True)
    assert feed(OutputWriter(ByteTokenizer(), params, frozenset({33})), b"hi!") == (["h", "i", "!"], "stop")


# ---- from a draft or not


def test_a_segment_belongs_to_the_token_that_completed_it():
    out = writer()
    first, second = "é".encode()
    out.add(first, drafted_by="suffix", room_left=9)
    out.add(second, drafted_by=None, room_left=9)
    out.add(first, drafted_by=None, room_left=9)
    out.add(second, drafted_by="suffix", room_left=9)
    assert out.take() == [Segment("é", None), Segment("é", "suffix")]


def test_held_segments_keep_who_said_them_when_shown_later():
    out = writer("abc")
    for char, drafted_by in (("a", "suffix"), ("b", None), ("x", "suffix")):
        out.add(ord(char), drafted_by=drafted_by, room_left=9)
    assert out.take() == [Segment("a", "suffix"), Segment("b", None), Segment("x", "suffix")]


def test_a_token_shown_in_two_parts_keeps_its_mark_on_both():
    out = OutputWriter(PieceTokenizer([b"xa", b"c"]), SamplingParams(stop="ab"), frozenset())
    out.add(0, drafted_by="suffix", room_left=9)
    assert out.take() == [Segment("x", "suffix")]
    out.add(1, drafted_by=None, room_left=9)
    assert out.take() == [Segment("a", "suffix"), Segment("c", None)]


def test_a_token_cut_by_a_stop_string_keeps_its_mark_on_what_is_shown():
    out = OutputWriter(PieceTokenizer([b"ab", b"cXd"]), SamplingParams(stop="X"), frozenset())
    out.add(0, drafted_by=None, room_left=9)
    assert out.add(1, drafted_by="suffix", room_left=9) == "stop"
    assert out.take() == [Segment("ab", None), Segment("c", "suffix")]


# ---- properties

ALPHABET = st.sampled_from(["a", "b", "c", "é", "€", "😀"])
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3)


def transcript(
    pieces: Sequence[bytes], stops: Sequence[str], group_sizes: Sequence[int], min_tokens: int = 0
) -> tuple[str, str, int, FinishReason | None]:
    """Concatenated segments, text, number of tokens and reason, with segments read after each group of tokens."""
    params = SamplingParams(stop=tuple(stops), min_tokens=min_tokens, max_tokens=max(len(pieces), min_tokens, 1))
    out = OutputWriter(PieceTokenizer(pieces), params, frozenset())
    sizes = iter(group_sizes)
    left, shown = next(sizes, 1), ""
    reason: FinishReason | None = None
    for i in range(len(pieces)):
        reason = out.add(i, drafted_by="suffix" if i % 2 else None, room_left=len(pieces) - i - 1)
        left -= 1
        if left <= 0 or reason:
            shown += "".join(segment.text for segment in out.take())
            left = next(sizes, 1)
        if reason:
            break
    return shown, out.text, out.num_tokens, reason


def reference(
    pieces: Sequence[bytes], stops: Sequence[str], min_tokens: int = 0
) -> tuple[str, str, int, FinishReason | None]:
    """The definition: if the text contains a stop string after a token, the text ends before the stop string.

    An unfinished character is not text yet. Before min_tokens a stop string is ordinary text, so an occurrence counts
    only if it ends inside the newest text.
    """
    before = ""
    for i in range(1, len(pieces) + 1):
        text = whole_characters(b"".join(pieces[:i]))
        if i >= min_tokens:
            places = [place for stop in stops for place in occurrences(text, stop, ending_after=len(before))]
            if places:
                return text[: min(places)], text[: min(places)], i, "stop"
        before = text
    text = b"".join(pieces).decode(errors="replace")
    return text, text, len(pieces), "length" if pieces else None


def whole_characters(data: bytes) -> str:
    """The text of `data` without an unfinished character at the end, which has at most three bytes."""
    full = data.decode(errors="replace")
    for cut in range(1, min(3, len(data)) + 1):
        head, tail = data[:-cut], data[-cut:]
        unfinished = any(_decodes(tail + more) for more in CONTINUATIONS)
        if unfinished and not _decodes(tail) and full == head.decode(errors="replace") + "\ufffd":
            return head.decode(errors="replace")
    return full


CONTINUATIONS = [bytes(more) for more in ([0x80], [0x80] * 2, [0x80] * 3, [0xBF], [0xBF] * 2, [0xBF] * 3)]


def _decodes(data: bytes) -> bool:
    """Whether the bytes are exactly one character."""
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def occurrences(text: str, stop: str, *, ending_after: int) -> list[int]:
    return [i for i in range(len(text)) if text.startswith(stop, i) and i + len(stop) > ending_after]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=3), max_size=24), st.lists(st.integers(1, 6), max_size=12))
def test_segments_join_to_the_plain_decoding_of_the_bytes(pieces, group_sizes):
    shown, text, num_tokens, reason = transcript(pieces, (), group_sizes)
    assert shown == text == b"".join(pieces).decode(errors="replace")
    assert (num_tokens, reason) == (len(pieces), "length" if pieces else None)


@st.composite
def torn_texts(draw: st.DrawFn) -> list[bytes]:
    """A text cut into tokens anywhere, also inside characters; sometimes with invalid bytes."""
    data = draw(st.text(ALPHABET, max_size=24)).encode()
    if draw(st.booleans()):
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.sampled_from([b"\xff", b"\x80", b"\xe2\x82"])) + data[at:]
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=20)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@settings(max_examples=300, deadline=None)
@given(torn_texts(), STOPS, st.lists(st.integers(1, 6), max_size=12))
def test_stop_strings_end_the_text_as_the_definition_says_however_tokens_are_grouped(pieces, stops, group_sizes):
    found = transcript(pieces, stops, group_sizes)
    assert found == reference(pieces, stops)
    assert found == transcript(pieces, stops, [])
    assert not any(stop in found[1] for stop in stops)


@settings(max_examples=150, deadline=None)
@given(torn_texts(), st.text(ALPHABET, min_size=1, max_size=4), st.integers(0, 6))
def test_a_stop_string_counts_where_it_is_completed_after_min_tokens(pieces, stop, min_tokens):
    assert transcript(pieces, [stop], [], min_tokens) == reference(pieces, [stop], min_tokens)


@settings(max_examples=100, deadline=None)
@given(torn_texts(), STOPS)
def test_what_is_shown_on_the_way_is_never_taken_back(pieces, stops):
    out = OutputWriter(PieceTokenizer(pieces), SamplingParams(stop=tuple(stops)), frozenset())
    final = reference(pieces, stops)[1]
    for i in range(len(pieces)):
        reason = out.add(i, drafted_by=None, room_left=len(pieces) - i - 1)
        assert final.startswith(out.text)
        if reason:
            break
    assert out.text == final


def test_a_stop_string_completed_before_min_tokens_stays_text_whatever_the_other_stop_strings():
    """With stop "a" alone the text is "ab"; the additional stop string "aa" must not change that."""
    alone, beside = writer("a", min_tokens=2), writer("a", "aa", min_tokens=2)
    assert feed(alone, b"ab")[1] is None
    assert feed(beside, b"ab")[1] is None


def test_control_tokens_are_part_of_the_text_only_where_asked():
    said = [*b"a", BOS, *b"b"]
    hidden = OutputWriter(ByteTokenizer(), SamplingParams(), frozenset({EOS}))
    shown = OutputWriter(ByteTokenizer(), SamplingParams(visible_tokens=[BOS, EOS]), frozenset({EOS}))
    feed(hidden, said)
    feed(shown, [*said, EOS])
    assert hidden.text == "ab" and shown.text == "a<s>b"  # what ends an answer is never part of it


def test_a_stop_string_may_contain_a_visible_control_token():
    out = OutputWriter(ByteTokenizer(), SamplingParams(visible_tokens=[BOS], stop="a<s>"), frozenset({EOS}))
    assert feed(out, [*b"xa", BOS, *b"b"])[1] == "stop" and out.text == "x"

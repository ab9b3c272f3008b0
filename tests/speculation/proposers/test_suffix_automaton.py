"""The automaton against a list of all substrings."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from outpace.speculation.proposers.suffix_automaton import MAX_COUNTED_LINKS, Cursor, SuffixAutomaton

tokens = st.integers(0, 2)
texts = st.lists(tokens, max_size=25)
several_texts = st.lists(texts, max_size=5)


def automaton_of(*texts: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.start_text()
        automaton.extend(text)
    return automaton


def substrings(*texts: list[int]) -> Counter[tuple[int, ...]]:
    """Every non-empty substring and how often it occurs."""
    return Counter(
        tuple(text[start:end])
        for text in texts
        for start in range(len(text))
        for end in range(start + 1, len(text) + 1)
    )


def state_of(automaton: SuffixAutomaton, string: list[int] | tuple[int, ...]) -> int | None:
    state: int | None = 0
    for token in string:
        state = automaton.transitions[state].get(token) if state is not None else None
    return state


def longest_suffix_in(text: list[int], *texts: list[int]) -> int:
    known = substrings(*texts)
    return next((n for n in range(len(text), 0, -1) if tuple(text[len(text) - n :]) in known), 0)


def check_match(cursor: Cursor, text: list[int]) -> None:
    """The cursor's state is the one its match reaches from the root, and its length belongs to that state."""
    automaton, length = cursor.automaton, cursor.length
    assert cursor.state == state_of(automaton, text[len(text) - length :])
    assert length <= automaton.length[cursor.state]
    assert length == 0 or length > automaton.length[automaton.link[cursor.state]]


@given(several_texts)
def test_holds_exactly_the_substrings_with_their_counts_and_continuations(texts):
    automaton = automaton_of(*texts)
    known = substrings(*texts)
    for string, num_occurrences in known.items():
        state = state_of(automaton, string)
        assert state is not None
        assert automaton.count[state] == num_occurrences
        followers = {token for token in range(3) if (*string, token) in known}
        assert set(automaton.transitions[state]) == followers


@given(several_texts)
def test_is_compact_and_linked_by_suffix(texts):
    automaton = automaton_of(*texts)
    assert len(automaton.length) <= max(1, 2 * sum(map(len, texts)))
    longest = {0: 0}
    for string in substrings(*texts):
        state = state_of(automaton, string)
        assert state is not None
        longest[state] = max(longest.get(state, 0), len(string))
        assert automaton.length[automaton.link[state]] < len(string)
    assert longest == dict(enumerate(automaton.length))  # and so no state is unreachable


def test_texts_do_not_run_into_each_other():
    automaton = automaton_of([1, 2], [3, 4])
    assert state_of(automaton, [2, 3]) is None
    assert automaton.transitions[state_of(automaton, [1, 2]) or 0] == {}


def test_repeating_a_text_adds_counts_and_no_states():
    automaton = automaton_of([1, 2, 1, 3])
    num_states = len(automaton.length)
    automaton.start_text()
    automaton.extend([1, 2, 1, 3])
    assert len(automaton.length) == num_states
    assert automaton.count[state_of(automaton, [1]) or 0] == 4


@given(texts)
def test_repeated_suffix_is_the_longest_that_occurs_earlier(text):
    automaton = automaton_of(text)
    state, length = automaton.repeated_suffix()
    assert length == longest_suffix_in(text, text[:-1])
    assert state == state_of(automaton, text[len(text) - length :])


@given(texts, st.integers(0, 25))
def test_reading_in_pieces_is_reading_at_once(text, cut):
    pieces = SuffixAutomaton()
    pieces.extend(text[:cut])
    pieces.extend(text[cut:])
    whole = automaton_of(text)
    for name in SuffixAutomaton.__slots__:
        assert getattr(pieces, name) == getattr(whole, name)


@given(several_texts, texts)
def test_cursor_keeps_the_longest_suffix_that_occurs(texts, text):
    cursor = Cursor(automaton_of(*texts))
    for end in range(len(text)):
        cursor.advance(text[end : end + 1])
        assert cursor.length == longest_suffix_in(text[: end + 1], *texts)
        check_match(cursor, text[: end + 1])


@given(st.lists(st.tuples(texts, st.lists(tokens, max_size=6)), max_size=6))
def test_cursor_stays_valid_while_the_automaton_grows(rounds):
    automaton = SuffixAutomaton()
    cursor = Cursor(automaton)
    read: list[int] = []
    for text, heard in rounds:
        automaton.start_text()
        automaton.extend(text)
        cursor.advance([])
        check_match(cursor, read)
        cursor.advance(heard)
        read += heard
        check_match(cursor, read)


def test_cursor_moves_when_its_state_is_split():
    automaton = automaton_of([1, 2, 3])
    cursor = Cursor(automaton)
    cursor.advance([2])  # shares a state with [1, 2], until [2] occurs without it
    whole = cursor.state
    automaton.start_text()
    automaton.extend([9, 2, 4])
    cursor.advance([])
    assert cursor.state != whole
    assert set(automaton.transitions[cursor.state]) == {3, 4}


def test_repetitive_text_is_counted_within_bounds_from_the_longest_context_down():
    automaton = SuffixAutomaton()
    automaton.extend([1] * 20_000)  # counting every link would take 2e8 additions
    assert automaton.count[-5:] == [5, 4, 3, 2, 1]
    assert automaton.count[1] == MAX_COUNTED_LINKS

"""The index of a predicted text, compared with a search of the whole text."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from outpace.speculation.proposers import prediction_text
from outpace.speculation.proposers.prediction_text import MOST_MATCHED, Match, Prediction

# Token i stands for these bytes; the last one is a control token. Some are the beginning or the end of others.
PIECES = (b"a", b"b", b"ab", b"ba", b"aab", b"abba", b"\xc3", b"")
texts = st.lists(st.integers(0, len(PIECES) - 1), max_size=60)


def predicted(tokens: list[int]) -> Prediction:
    return Prediction(tokens, PIECES.__getitem__)


def common_end(one: bytes, other: bytes) -> int:
    return next(
        (i for i in range(min(len(one), len(other))) if one[-1 - i] != other[-1 - i]), min(len(one), len(other))
    )


@given(texts)
def test_boundaries_are_where_tokens_begin_and_where_the_text_ends(tokens):
    prediction = predicted(tokens)
    assert prediction.text == b"".join(PIECES[token] for token in tokens)
    written = [token for token in tokens if PIECES[token]]
    assert prediction.tokens == written
    places = [0, *accumulate(len(PIECES[token]) for token in written)]
    found = {place: prediction.boundary_at(place) for place in range(len(prediction.text) + 1)}
    assert {place: count for place, count in found.items() if count is not None} == {p: i for i, p in enumerate(places)}


@given(texts, st.data())
def test_tokens_between_two_places_lie_wholly_between_them(tokens, data):
    prediction = predicted(tokens)
    begin = data.draw(st.integers(0, len(prediction.text)))
    end = data.draw(st.integers(begin, len(prediction.text)))
    starts = prediction.starts
    wanted = [i for i in range(len(prediction.tokens)) if begin <= starts[i] and starts[i + 1] <= end]
    assert list(prediction.tokens_between(begin, end)) == wanted


@given(texts, texts, st.data())
def test_the_match_found_is_one_that_says_most(tokens, output, data):
    prediction = predicted(tokens)
    latest = b"".join(PIECES[token] for token in output)[-MOST_MATCHED:]
    expected = data.draw(st.integers(0, len(prediction.text)))
    match = prediction.find(latest, expected)
    first = next(i for i, start in enumerate(prediction.starts) if start >= expected)
    said: dict[int, float] = {}
    for token, place in enumerate(prediction.starts[:-1]):
        num_bytes = common_end(prediction.text[:place], latest)
        is_near = first <= token < first + 16
        if is_near and num_bytes >= 2:
            said[place] = 0.3 + num_bytes / 4
        elif num_bytes >= 4:
            said[place] = num_bytes * (1 / 12)
    if match is None:
        assert not said
        return
    assert match.evidence == said[match.place] and match.num_bytes == common_end(prediction.text[: match.place], latest)
    if len(said) <= prediction_text._MOST_COMPARED:  # otherwise the nearest ones are compared
        assert match.evidence == max(said.values())


def test_a_longer_match_is_better_and_among_equals_the_next_one_forwards():
    far = b"x" * 40
    pieces = (b"line one;", b"line two;", far, b"end")
    prediction = Prediction([0, 2, 0, 2, 1, 2, 0, 3], pieces.__getitem__)
    after = [prediction.starts[i + 1] for i, token in enumerate(prediction.tokens) if token == 0]
    latest = b"a new line one;"
    assert [prediction.find(latest, near) for near in (0, after[0] + 1, after[1] + 1)] == [
        Match(place, len(b"line one;"), 0.3 + len(b"line one;") / 4) for place in after
    ]
    found = prediction.find(b"line two;", 0)
    assert found is not None and found.place == prediction.starts[5]


def test_with_a_frequent_key_a_search_compares_few_places(monkeypatch):
    """It takes a bounded time, however long the text."""
    prediction = Prediction([0] * 20_000, lambda token: b"    ")
    compared: list[int] = []
    matched = Prediction._matched

    def counted(self: Prediction, latest: bytes, place: int) -> int:
        compared.append(place)
        return matched(self, latest, place)

    monkeypatch.setattr(Prediction, "_matched", counted)
    assert prediction.find(b"x    ", 40_000) is not None
    assert len(compared) <= 32


def test_an_empty_text_has_no_match():
    prediction = Prediction([], bytes)
    assert prediction.find(b"anything", 0) is None and prediction.boundary_at(0) == 0

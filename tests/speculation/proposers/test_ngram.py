"""Prompt lookup against a search of the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outpace.core import Draft, Request
from outpace.speculation.proposers.base import DraftAsk, Proposer
from outpace.speculation.proposers.ngram import MOST_COMPARED, NgramProposer
from tests.requests_helper import make_request

texts = st.lists(st.integers(0, 2), max_size=40)
sizes = st.sampled_from([(1, 1), (1, 3), (2, 2), (2, 4), (3, 5)])


def draft(proposer: Proposer, request: Request, depth: int) -> list[int]:
    (answer,) = proposer.propose([DraftAsk(request, depth)])
    assert answer == Draft(answer.tokens, "ngram", None)
    return answer.tokens


def searched(tokens: list[int], min_n: int, max_n: int, depth: int) -> list[int]:
    """The draft by its definition."""
    for n in range(min(max_n, len(tokens)), min_n - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                text = list(tokens)
                for source in range(end, end + depth):
                    text.append(text[source])
                return text[len(tokens) :]
    return []


@given(texts, sizes, st.integers(1, 10))
def test_draft_is_what_a_search_of_the_text_finds(tokens, sizes, depth):
    min_n, max_n = sizes
    proposer = NgramProposer(min_n, max_n)
    assert draft(proposer, make_request(tokens), depth) == searched(tokens, min_n, max_n, depth)


@given(texts, texts, sizes, st.data())
def test_catching_up_is_the_same_as_reading_at_once(prompt, output, sizes, data):
    min_n, max_n = sizes
    proposer, request = NgramProposer(min_n, max_n), make_request(prompt)
    while output:
        assert draft(proposer, request, 5) == searched(request.tokens, min_n, max_n, 5)
        num_emitted = data.draw(st.integers(1, len(output)))
        request.tokens += output[:num_emitted]
        output = output[num_emitted:]
    assert draft(proposer, request, 5) == searched(request.tokens, min_n, max_n, 5)


def test_longest_ngram_wins_over_a_later_shorter_one():
    tokens = [1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]
    assert draft(NgramProposer(1, 3), make_request(tokens), 1) == [7]
    assert draft(NgramProposer(1, 2), make_request(tokens), 1) == [8]


def test_of_a_frequent_ngram_only_the_latest_occurrences_are_compared():
    """A lookup takes a bounded time, however long the text."""

    def found(num_occurrences: int) -> list[int]:
        others = [token for i in range(num_occurrences - 1) for token in (1, 2, 100 + i)]
        return draft(NgramProposer(2, 3), make_request([9, 1, 2, 7, *others, 9, 1, 2]), 1)

    assert found(MOST_COMPARED) == [7], "the longest one is still among them"
    assert found(MOST_COMPARED + 1) == [100 + MOST_COMPARED - 1], "the latest of the shorter ones"


def test_repeated_pattern_is_copied_past_the_end_to_full_depth():
    assert draft(NgramProposer(2, 4), make_request([5, 1, 2, 3, 1, 2, 3]), 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert draft(NgramProposer(2, 4), make_request([4, 4, 4]), 5) == [4, 4, 4, 4, 4]


def test_no_match_is_an_empty_draft():
    for tokens in ([], [1], [1, 1], [1, 2, 3, 4, 5]):
        assert draft(NgramProposer(2, 4), make_request(tokens), 4) == []


def test_requests_do_not_see_each_other():
    proposer = NgramProposer(2, 3)
    first, second = make_request([1, 2, 3, 1, 2]), make_request([4, 1, 2])
    drafts = proposer.propose([DraftAsk(first, 2), DraftAsk(second, 2)])
    assert [answer.tokens for answer in drafts] == [[3, 1], []]


def test_release_forgets_and_ignores_the_unknown():
    proposer = NgramProposer(2, 3)
    request = make_request([1, 2, 3, 1, 2])
    proposer.release(request)
    assert draft(proposer, request, 1) == [3]
    proposer.release(request)
    assert not proposer._indexes
    assert draft(proposer, request, 1) == [3]

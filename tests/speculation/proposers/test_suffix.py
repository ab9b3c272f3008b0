"""The suffix proposer against counting by hand, and the store it shares between requests."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from outpace.core import Draft, Request
from outpace.speculation.proposers.base import DraftAsk
from outpace.speculation.proposers.suffix import MIN_SURVIVAL, STORED_CONTEXT, SuffixProposer
from tests.requests_helper import make_request

texts = st.lists(st.integers(0, 2), max_size=25)
depths = st.integers(1, 10)


def draft(proposer: SuffixProposer, request: Request, depth: int) -> list[int]:
    (answer,) = proposer.propose([DraftAsk(request, depth)])
    assert answer == Draft(answer.tokens, "suffix", None)
    assert len(answer.tokens) <= depth
    return answer.tokens


def followers(texts: Sequence[list[int]], context: list[int]) -> dict[int, int]:
    """How often each token followed the context, in order of first occurrence."""
    counts: dict[int, int] = {}
    for text in texts:
        for end in range(len(context), len(text)):
            if text[end - len(context) : end] == context:
                counts[text[end]] = counts.get(text[end], 0) + 1
    return counts


def occurs(text: list[int], context: list[int]) -> bool:
    return any(text[end - len(context) : end] == context for end in range(len(context), len(text) + 1))


def counted(texts: Sequence[list[int]], context: list[int], depth: int, min_match: int) -> tuple[float, list[int]]:
    """Score and draft by their definitions, from the context's longest suffix that occurs in the texts."""
    while context and not any(occurs(text, context) for text in texts):
        context = context[1:]
    matched, score, survival, drafted = len(context), 0.0, 1.0, list[int]()
    while len(context) >= min_match and len(drafted) < depth:
        counts = followers(texts, context)
        if not counts:
            context = context[1:]
            matched = matched if drafted else len(context)
            continue
        best = max(reversed(counts), key=lambda token: counts[token])
        agreed = matched + len(drafted)
        survival *= counts[best] / sum(counts.values()) * agreed / (agreed + 1)  # rounded as the proposer rounds
        if survival < MIN_SURVIVAL:
            break
        score += survival
        drafted.append(best)
        context = [*context, best]
    return score, drafted


def repeated_suffix(tokens: list[int]) -> list[int]:
    """The longest suffix that also occurs earlier."""
    return next((tokens[i:] for i in range(1, len(tokens)) if occurs(tokens[:-1], tokens[i:])), [])


@given(texts, depths, st.integers(1, 3))
def test_draft_from_own_text_is_what_counting_gives(tokens, depth, min_match):
    expected = counted([tokens], repeated_suffix(tokens), depth, min_match)[1]
    assert draft(SuffixProposer(0, min_match), make_request(tokens), depth) == expected


@given(st.lists(texts.filter(bool), max_size=4), texts, depths)
def test_draft_is_the_better_of_own_text_and_store(outputs, tokens, depth):
    proposer = SuffixProposer(1000)
    for output in outputs:
        proposer.release(make_request([], output))
    own = counted([tokens], repeated_suffix(tokens), depth, 2)
    stored = counted(outputs, tokens, depth, 2)
    expected = stored if stored[0] > own[0] else own
    assert draft(proposer, make_request(tokens), depth) == expected[1]


@given(texts, texts, depths, st.data())
def test_catching_up_is_the_same_as_reading_at_once(prompt, output, depth, data):
    proposer, request = SuffixProposer(0), make_request(prompt)
    while output:
        draft(proposer, request, depth)
        num_emitted = data.draw(st.integers(1, len(output)))
        request.tokens += output[:num_emitted]
        output = output[num_emitted:]
    assert draft(proposer, request, depth) == draft(SuffixProposer(0), make_request(request.tokens), depth)


@given(st.lists(texts, min_size=1, max_size=8), st.integers(0, 60), depths)
def test_reading_along_while_the_store_grows_and_forgets_never_breaks(outputs, store_tokens, depth):
    proposer, request = SuffixProposer(store_tokens), make_request([0, 1])
    for output in outputs:
        proposer.release(make_request([1], output))
        draft(proposer, request, depth)
        request.tokens += output[:3]
        draft(proposer, request, depth)
        assert all(generation.num_tokens <= store_tokens // 2 for generation in proposer._stores.generations(""))


def test_repeated_pattern_is_copied_past_the_end():
    assert draft(SuffixProposer(0), make_request([1, 2, 3] * 3), 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert draft(SuffixProposer(0), make_request([4] * 4), 6) == [4] * 6


def test_most_frequent_continuation_wins_and_of_equals_the_newest():
    often, once = [1, 2, 7], [1, 2, 8]
    assert draft(SuffixProposer(0), make_request([*often, *often, *once, 1, 2]), 1) == [7]
    assert draft(SuffixProposer(0), make_request([*often, *once, 1, 2]), 1) == [8]
    # The same where the context's state was split only after both were seen, and the newest has the lower id.
    assert draft(SuffixProposer(0), make_request([0, 1, 2, 9, 0, 1, 2, 8, 5, 1, 2]), 1) == [8]


def test_draft_ends_where_survival_is_unlikely():
    undecided = [token for follower in range(10, 30) for token in (1, 2, follower)]
    assert draft(SuffixProposer(0), make_request([*undecided, 1, 2]), 4) == []
    seen_once = [1, 2, *range(10, 60)]
    num_trusted = 18  # 2 / (2 + 18) is still 0.1
    assert draft(SuffixProposer(0), make_request([*seen_once, 1, 2]), 50) == seen_once[2 : 2 + num_trusted]


def test_short_match_is_trusted_less_than_a_long_one():
    proposer = SuffixProposer(1000)
    proposer.release(make_request([], [3, 4, 5, 1, 2, 8, 8, 8]))
    request = make_request([1, 2, 7, 7, 7, 3, 4, 5, 1, 2])
    assert draft(proposer, request, 3) == [8, 8, 8]


def test_nothing_matched_is_an_empty_draft():
    for tokens in ([], [1], [1, 2, 3], [1, 2, 1]):  # the last matches one token: noise
        assert draft(SuffixProposer(100), make_request(tokens), 4) == []
    assert draft(SuffixProposer(100, min_match=1), make_request([1, 2, 1]), 1) == [2]


def test_store_remembers_what_earlier_requests_said_after_which_prompt():
    proposer = SuffixProposer(1000)
    proposer.release(make_request([1, 2, 3], [4, 5, 6]))  # never drafted for
    request = make_request([9, 2, 3])
    assert draft(proposer, request, 4) == [4, 5, 6]
    request.tokens += [4]
    assert draft(proposer, request, 4) == [5, 6]


def test_store_keeps_the_end_of_a_prompt_only():
    proposer = SuffixProposer(1000)
    prompt = list(range(100, 130))
    proposer.release(make_request(prompt, [1]))
    assert draft(proposer, make_request(prompt[:-STORED_CONTEXT]), 4) == []
    assert draft(proposer, make_request(prompt[: 2 - STORED_CONTEXT]), 4) == prompt[2 - STORED_CONTEXT :][:4]


def test_request_without_output_and_store_of_no_size_remember_nothing():
    proposer = SuffixProposer(1000)
    proposer.release(make_request([1, 2, 3, 4]))
    assert draft(proposer, make_request([1, 2]), 4) == []
    proposer = SuffixProposer(0)
    proposer.release(make_request([1, 2], [3, 4]))
    assert draft(proposer, make_request([1, 2]), 4) == []


def test_store_is_bounded_and_keeps_the_recent():
    proposer = SuffixProposer(40)
    for start in range(0, 1000, 10):
        proposer.release(make_request([], range(start, start + 10)))
    first, second, third, last = (make_request([start, start + 1]) for start in (0, 960, 970, 990))
    assert draft(proposer, first, 2) == []
    assert draft(proposer, second, 2) == [962, 963]
    assert draft(proposer, third, 2) == [972, 973]
    assert draft(proposer, last, 2) == [992, 993]
    assert [generation.num_tokens for generation in proposer._stores.generations("")] == [20, 20]


def salted(salt: str, prompt: Sequence[int], output: Sequence[int] = ()) -> Request:
    request = make_request(prompt, output)
    request.cache_salt = salt
    return request


def test_only_requests_with_the_same_salt_share_outputs():
    proposer = SuffixProposer(1000)
    proposer.release(salted("ours", [], [1, 2, 3, 4, 5]))
    assert draft(proposer, salted("ours", [2, 3]), 2) == [4, 5]
    assert draft(proposer, salted("theirs", [2, 3]), 2) == []
    assert draft(proposer, make_request([2, 3]), 2) == []
    proposer.release(salted("theirs", [], [1, 2, 3, 8, 9]))
    assert draft(proposer, salted("theirs", [2, 3]), 2) == [8, 9]
    assert draft(proposer, salted("ours", [2, 3]), 2) == [4, 5]


def test_all_salts_together_are_bounded_and_the_least_recent_go_first():
    proposer = SuffixProposer(40)
    for number in range(100):
        proposer.release(salted(str(number), [], range(10)))
    kept = [number for number in range(100) if draft(proposer, salted(str(number), [3, 4]), 1) == [5]]
    assert kept == [96, 97, 98, 99]
    proposer.forget()
    assert draft(proposer, salted("99", [3, 4]), 1) == []


def test_output_larger_than_a_generation_keeps_its_end():
    proposer = SuffixProposer(40)
    proposer.release(make_request([], range(100)))
    assert draft(proposer, make_request([50, 51]), 2) == []
    assert draft(proposer, make_request([90, 91]), 2) == [92, 93]


def test_running_request_follows_the_store_through_its_generations():
    proposer = SuffixProposer(40)
    proposer.release(make_request([], [5]))
    request = make_request([7, 8])
    assert draft(proposer, request, 2) == []
    proposer.release(make_request([], [7, 8, 1, 2, 3]))
    request.tokens += [1]
    assert draft(proposer, request, 2) == []  # only the new token was matched in the grown store
    request.tokens += [2]
    assert draft(proposer, request, 2) == [3]
    proposer.release(make_request([], range(100, 120)))
    assert draft(proposer, request, 2) == [3]  # in the old generation by now
    proposer.release(make_request([], range(200, 220)))
    assert draft(proposer, request, 2) == []


def test_release_twice_stores_once_and_what_came_between():
    proposer = SuffixProposer(1000)
    twice, other = make_request([5], [1, 2, 7]), make_request([5], [1, 2, 8])
    proposer.release(twice)
    proposer.release(twice)
    (young, _) = proposer._stores.generations("")
    assert young.num_tokens == 4
    proposer.release(other)
    assert draft(proposer, make_request([1, 2]), 1) == [8]  # once each, so the newer
    twice.tokens += [3, 4]
    proposer.release(twice)
    assert young.num_tokens == 4 + 4 + 6
    assert draft(proposer, make_request([2, 7]), 2) == [3, 4]


def test_release_twice_stores_once_though_a_generation_passed():
    proposer = SuffixProposer(40)
    request = make_request([5], [1, 2, 7])
    proposer.release(request)
    proposer.release(make_request([], range(100, 120)))
    proposer.release(request)
    assert [generation.num_tokens for generation in proposer._stores.generations("")] == [20, 4]


def test_resumed_request_is_not_misled_by_its_own_stored_text():
    proposer = SuffixProposer(1000)
    request = make_request([1, 2, 3, 7, 7, 7, *range(100, 120)], [2, 3, 8, 8, 8, 1, 2, 3])
    assert draft(proposer, request, 3) == [7, 7, 7]
    proposer.release(request)  # preempted: the store matches up to its last token and has the continuation 2, 3, 8
    assert draft(proposer, request, 3) == [7, 7, 7]


def test_release_forgets_the_request():
    proposer = SuffixProposer(0)
    request = make_request([1, 2, 3, 1, 2])
    proposer.release(request)
    assert draft(proposer, request, 1) == [3]
    proposer.release(request)
    assert not proposer._contexts
    assert draft(proposer, request, 1) == [3]


def test_several_requests_in_one_call_are_answered_in_order():
    proposer = SuffixProposer(0)
    asks = [DraftAsk(make_request(tokens), 2) for tokens in ([1, 2, 3, 1, 2], [4, 1, 2], [1, 2, 9, 9, 1, 2])]
    assert [answer.tokens for answer in proposer.propose(asks)] == [[3, 1], [], [9, 9]]


def at_place(place: str, prompt: list[int], output: list[int]) -> Request:
    request = make_request(prompt, output)
    request.place = place
    return request


def test_a_place_is_a_context_of_its_own():
    """The prompts have nothing in common, so only the place can tell what comes."""
    proposer = SuffixProposer(1024)
    proposer.release(at_place("a/name", [1, 2, 3], [50, 51, 52]))
    proposer.release(at_place("a/city", [4, 5, 6], [60, 61, 62]))
    [draft] = proposer.propose([DraftAsk(at_place("a/name", [7, 8, 9], []), 8)])
    assert draft.tokens == [50, 51, 52]
    [draft] = proposer.propose([DraftAsk(at_place("a/city", [7, 8, 9], [60]), 8)])
    assert draft.tokens == [61, 62]
    for place, output in (("", []), ("a/age", []), ("a/city", [50])):
        [draft] = proposer.propose([DraftAsk(at_place(place, [7, 8, 9], output), 8)])
        assert draft.tokens == []


def test_an_output_of_a_place_that_was_stored_in_parts_is_stored_once():
    proposer = SuffixProposer(1024)
    request = at_place("p", [1, 2], [50, 51])
    proposer.release(request)  # preempted
    request.tokens += [52, 53]
    proposer.release(request)
    [draft] = proposer.propose([DraftAsk(at_place("p", [9], []), 8)])
    assert draft.tokens[:2] == [50, 51] and min(draft.tokens) > 0

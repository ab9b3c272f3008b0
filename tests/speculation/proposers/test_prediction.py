"""Drafts from a predicted text: followed through edits, counted, and forgotten with their request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.core import Draft, Request
from outpace.errors import UsageError
from outpace.speculation.proposers.base import DraftAsk
from outpace.speculation.proposers.prediction import Follower, PredictionProposer, read_prediction
from outpace.speculation.proposers.prediction_text import Match, Prediction
from tests.fakes import BOS, EOS, ByteTokenizer
from tests.predicted_words import Words
from tests.requests_helper import make_request

OLD = """def total(prices, rate):
    result = 0
    for price in prices:
        result += price * rate
    return result


def report(prices):
    print("the prices are", prices)
    print("and the total is", total(prices, 3))
"""


def draft(request: Request, depth: int = 8) -> Draft:
    (answer,) = PredictionProposer().propose([DraftAsk(request, depth)])
    assert len(answer.tokens) == len(answer.confidence) <= depth and answer.probs is None
    assert all(0.0 < sure < 1.0 for sure in answer.confidence)
    return answer


def finish(request: Request) -> tuple[int, int]:
    """End the request; returns the numbers of accepted and rejected tokens of the prediction."""
    request.finish_reason = "stop"
    PredictionProposer().release(request)
    return request.spec.accepted_prediction_tokens, request.spec.rejected_prediction_tokens


def rejections(words: Words, request: Request, output: str, depth: int = 8) -> list[tuple[str, str]]:
    """Verify drafts against this output until it ends. Returns each draft that was not accepted whole, and the text
    that the target wrote from there on."""
    tokens, found = words.encode(output), list[tuple[str, str]]()
    request.tokens.append(tokens[0])  # the token that follows the prompt comes without a draft
    while request.num_output < len(tokens):
        drafted, wanted = draft(request, depth).tokens, tokens[request.num_output :]
        hits = next((i for i, (a, b) in enumerate(zip(drafted, wanted, strict=False)) if a != b), len(drafted))
        if not drafted or hits < min(len(drafted), len(wanted)):
            found.append((words.decode(drafted[hits:]), words.decode(wanted[hits : hits + depth])))
        request.tokens += wanted[: hits + 1]
    return found


def test_an_output_as_predicted_takes_whole_drafts_to_its_end():
    words = Words()
    request = words.predicted(OLD)
    num_tokens = len(words.encode(OLD))
    assert not rejections(words, request, OLD)
    assert not draft(request).tokens, "the prediction has ended"
    assert finish(request) == (num_tokens, 0)


@pytest.mark.parametrize(
    ("change", "most"),
    [
        (("    result = 0\n", "    result = 0\n    count = len(prices)\n"), 7),
        (("    for price in prices:\n        result += price * rate\n", ""), 1),
        (("price * rate", "price * (1 + rate)"), 7),
        (("print(", "log(", 1), 4),
        (("3", "5"), 3),
        (('"the prices are"', '"die Preise: "'), 6),
        (("def report", "def unused():\n    return None\n\n\ndef report"), 13),
        (("def total", "import math\n\n\ndef total"), 4),
    ],
    ids=["insertion", "deletion", "insertion in a line", "word", "number", "string", "function", "beginning"],
)
def test_after_an_edit_drafts_go_on_behind_it(change, most):
    """Only what is new, and the token or two that show where the output goes on, take more steps."""
    words, new = Words(), OLD.replace(*change)
    request = words.predicted(OLD)
    assert new != OLD
    assert len(rejections(words, request, new)) <= most
    accepted, rejected = finish(request)
    kept = len(words.encode(OLD)) - len(words.encode(change[0]))
    assert accepted >= kept - 3 and accepted + rejected == len(words.encode(OLD))


def test_lines_that_repeat_are_followed_in_order():
    words = Words()
    lines = [f"    check(table[{i}], 'row {i} is wrong')\n" for i in range(12)]
    request = words.predicted("".join(lines))
    assert not rejections(words, request, "".join(lines))
    # Without rows 3 to 5, the number is the first difference, and the second number confirms it.
    request = words.predicted("".join(lines))
    assert len(rejections(words, request, "".join(lines[:3] + lines[6:]))) <= 2
    # A row twice: the drafts of the second one are those of the row after it, up to the number.
    request = words.predicted("".join(lines))
    assert len(rejections(words, request, "".join(lines[:4] + lines[3:]))) <= 3


def test_a_replacement_is_repeated():
    """After a name was replaced once, drafts have the new one, also if it has more tokens."""
    words = Words()
    request = words.predicted(OLD)
    new = OLD.replace("prices", "net.amounts")
    wrong = rejections(words, request, new)
    # Four steps for the first one, as without a space before it, and four for the first one with a space.
    assert len(wrong) <= 8 < 4 * OLD.count("prices")
    assert all("amounts" not in of_draft for of_draft, _ in wrong)
    # Wherever a draft ends, inside the new name too, the next one goes on.
    for depth in (1, 2, 3):
        assert len(rejections(words, words.predicted(OLD), new, depth)) <= 8


def test_a_replacement_that_is_not_repeated_is_drafted_once():
    words = Words()
    old = "one two three four one five six seven one eight nine one ten"
    request = words.predicted(old)
    wrong = rejections(words, request, "one two three four 1 five six seven one eight nine one ten", depth=4)
    assert [of_draft for of_draft, _ in wrong if "1" in of_draft] == [" 1 eight"]


def test_a_place_found_by_chance_does_not_replace_the_last_certain_one():
    """Two words of the output are also far away. Then it goes on where it was, and three bytes are enough to see it."""
    words = Words()
    request = words.predicted(" ".join([*(f"x{i}" for i in range(40)), "zebra yak and others"]))
    request.tokens += words.encode("x0 x1 x2 x3 zebra")
    assert draft(request, 2).tokens == words.encode(" yak and")
    request.tokens += words.encode(" yak! x4")
    assert draft(request, 2).tokens == words.encode(" x5 x6")


def test_an_unrelated_prediction_gives_hardly_any_drafts():
    words = Words()
    request = words.predicted(OLD)
    text = (
        "Once upon a time a miller had three sons and a cat. The youngest got nothing but the cat, yet it could talk."
    )
    tokens = words.encode(text)
    drafted = 0
    for token in tokens:
        request.tokens.append(token)
        drafted += len(draft(request).tokens)
    assert drafted <= 16, "at most two short matches"
    assert finish(request) == (0, len(words.encode(OLD)))


def test_no_prediction_and_an_empty_one_give_no_drafts():
    words, proposer = Words(), PredictionProposer()
    plain, empty = make_request([0], words.encode("hello")), words.predicted("")
    empty.tokens += words.encode("hello world")
    assert not draft(plain).tokens and not draft(empty).tokens
    assert not proposer.serves(plain) and proposer.serves(empty)
    assert finish(plain) == (0, 0) and finish(empty) == (0, 0)


def test_text_in_other_tokens_is_followed_by_its_bytes():
    """The output spells a word with other tokens, as it does near an edit; drafts go on at the next token."""
    pieces = (b"Gr", "ü".encode()[:1], "ü".encode()[1:] + b"n", "Grün".encode(), b" ist", b" die", b" Farbe")
    prediction = Prediction([3, 4, 5, 6], pieces.__getitem__)
    for spelled in ([3], [0, 1, 2]):
        request = make_request([0], spelled)
        request.predicted = Follower(prediction)
        assert draft(request).tokens == [4, 5, 6]
        request.tokens += [4, 5, 6]
        assert finish(request) == (4, 0)
    inside = make_request([0], [0, 1])
    inside.predicted = Follower(prediction)
    assert not draft(inside).tokens, "no token of the prediction begins here"


@given(st.lists(st.integers(97, 100), max_size=40), st.lists(st.integers(97, 100), max_size=60), st.data())
def test_catching_up_is_the_same_as_reading_every_token(predicted, output, data):
    prediction = Prediction(predicted, ByteTokenizer().token_bytes)
    steady, late = make_request([97]), make_request([97])
    steady.predicted, late.predicted = Follower(prediction), Follower(prediction)
    for i, token in enumerate(output):
        steady.tokens.append(token)
        wanted = draft(steady, 6)
        if data.draw(st.booleans()):
            late.tokens = [97, *output[: i + 1]]
            found = draft(late, 6)
            assert found.tokens == wanted.tokens and found.confidence == wanted.confidence
    late.tokens = list(steady.tokens)
    draft(steady), draft(late)
    counts = finish(steady)
    assert counts == finish(late) and sum(counts) == len(predicted)


def test_confidence_grows_with_what_agreed():
    words = Words()
    request = words.predicted(OLD)
    request.tokens += words.encode("def")
    fresh = draft(request).confidence
    assert fresh == sorted(fresh) and fresh[0] > 0.9, "a client expects its prediction to hold from the beginning"
    request.tokens += words.encode(" something(prices")
    found = draft(request).confidence
    assert found == sorted(found) and 0.5 < found[0] < fresh[0]


def test_places_that_do_not_last_make_the_next_one_doubtful_until_tokens_agree_again():
    """In a text of its own, an output agrees with the prediction for a word here and there."""
    words = Words()
    request = words.predicted(OLD)
    request.tokens += words.encode("def total(prices, rate):")
    sure = list[float]()
    for text in ("\n    result = 1", " result = 1", " result = 1"):
        request.tokens += words.encode(text)  # at the last word, it departs from the prediction again
        request.tokens += words.encode(" result")
        sure.append(draft(request).confidence[0])
    assert sure == sorted(sure, reverse=True) and len(set(sure)) == 3
    request.tokens += words.encode("\n\n\ndef report(prices):")
    assert draft(request).confidence[0] > sure[0]


def test_a_request_that_ends_frees_its_prediction_and_a_preempted_one_keeps_it():
    words, proposer = Words(), PredictionProposer()
    request = words.predicted(OLD)
    request.tokens += words.encode("def total(")
    assert draft(request, 2).tokens == words.encode("prices,")
    proposer.release(request)
    assert request.predicted is not None and draft(request, 2).tokens == words.encode("prices,")
    assert finish(request) == (3, len(words.encode(OLD)) - 3)
    assert request.predicted is None


def test_a_prediction_that_was_never_asked_for_counts_nothing():
    request = Words().predicted(OLD)
    request.tokens += [1, 2, 3]
    assert finish(request) == (0, 0)


def test_of_a_long_text_the_beginning_is_read_and_no_more():
    checks: list[None] = []
    prediction = read_prediction("abcd" * 1000, ByteTokenizer(), 700, lambda: checks.append(None))
    assert bytes(prediction.tokens) == b"abcd" * 175
    assert len(checks) == 4, "one for what comes before a text, and one for each piece of 256 that was read"


def test_reading_stops_where_the_caller_says_so():
    def stop() -> None:
        raise UsageError("the client has left; nobody waits for this")

    with pytest.raises(UsageError, match="has left"):
        read_prediction("abc", ByteTokenizer(), 700, stop)


def test_control_tokens_are_never_drafted():
    prediction = read_prediction("<s>ab</s>c", ByteTokenizer(), 700, lambda: None)
    assert prediction.tokens == [97, 98, 99] and not {BOS, EOS} & set(prediction.tokens)


def test_its_costs_are_those_of_searching(monkeypatch):
    searched: list[bytes] = []
    find = Prediction.find

    def counted(self: Prediction, latest: bytes, expected: int) -> Match | None:
        searched.append(latest)
        return find(self, latest, expected)

    monkeypatch.setattr(Prediction, "find", counted)
    request = make_request([0])
    costs = PredictionProposer().measure_costs(request)
    assert costs.lookup_seconds > 0 and costs.passes is None
    assert len(searched) > 240, "nearly every token departs"
    assert request.predicted is None and request.tokens == [0]

"""When a draft model reads a text: what that costs, what it may bring, and what became of earlier stakes."""

from __future__ import annotations

import pytest

from outpace.core import Request
from outpace.speculation.base import DraftTiming
from outpace.speculation.costs import Costs, StepCosts
from outpace.speculation.reading import Prospect, Record, Returns
from outpace.speculation.seats import Step
from outpace.speculation.sweep import Table
from tests.desk import FLAT, RIGHT, Desk, always, request_of

# ---- what it costs


def test_reading_is_priced_by_its_own_curve():
    """A pass that verifies asks for logits of every token, one that reads for those of the last."""
    steps = StepCosts({1: 1.0, 101: 21.0})
    costs = Costs(target=StepCosts({1: 10.0}), draft=steps, reading=StepCosts({1: 1.0, 101: 6.0}))
    assert costs.reading_seconds(100) == pytest.approx(5.0)
    assert costs.draft_seconds(1, 101, 3, 0.0) == pytest.approx(1.0 + 5.0 + 2 * 1.0)
    assert costs.draft_seconds(1, 2, 3, 0.0) == pytest.approx(1.2 + 2 * 1.0), "two tokens are left by an accepted draft"
    assert Costs(target=steps, draft=steps).reading_seconds(100) == pytest.approx(20.0), "the best that is known"


# ---- what it may bring


def _reader(seconds_of_text: float) -> Desk:
    """A draft worth having, for which a text of 200 tokens takes so many plain steps to read."""
    desk = Desk(FLAT, draft=always(sure=0.9), draft_seconds=0.05)
    assert desk.policy.costs is not None
    for costs in (desk.policy.costs, desk.truth):
        costs.draft = StepCosts({1: 0.05, 2: 0.05, 200: 0.05 + seconds_of_text})
    return desk


def _is_read(desk: Desk, who: Request, steps: int = 6) -> bool:
    return any(depth for [depth] in desk.run([who], steps))


def test_a_text_is_read_where_enough_is_left_to_say():
    desk = _reader(seconds_of_text=5.0)
    desk.run([request_of(length=2)], 40)  # something is known of the draft
    assert _is_read(desk, request_of(length=200, max_length=300))
    assert not _is_read(desk, request_of(length=200, max_length=208)), "eight tokens are not worth five steps"


def test_the_very_first_text_may_cost_only_so_much():
    assert _is_read(_reader(seconds_of_text=4.0), request_of(length=200))
    assert not _is_read(_reader(seconds_of_text=12.0), request_of(length=200))
    assert not _is_read(_reader(seconds_of_text=4.0), request_of(length=200, max_length=206)), "nor for a short answer"


@pytest.mark.parametrize(("num_tokens", "is_read"), [(16, False), (48, True)])
def test_the_very_first_text_is_not_that_of_a_request_that_says_little(num_tokens, is_read):
    """Whoever tries a server with a few tokens is not to pay a seventh of them for all who come after."""
    assert _is_read(_reader(seconds_of_text=2.2), request_of(length=200, max_length=200 + num_tokens)) == is_read


@pytest.mark.parametrize(("num_said", "is_tried_again"), [(5, True), (64, False)])
def test_a_loss_of_one_that_ended_sooner_than_expected_keeps_nobody_from_trying(num_said, is_tried_again):
    desk = _reader(seconds_of_text=2.0)
    assert desk.policy._parts is not None
    reading, request = desk.policy._parts.drafting.reading, request_of(length=200)
    seat = desk.policy._seat(request)
    seat.has_read, seat.expected_output = True, 64.0
    reading.record.begin()
    request.tokens += [RIGHT] * (num_said - request.num_output)
    reading.ended(request, seat, lost=0.4)
    assert reading.record.is_worth_trying == is_tried_again


@pytest.mark.parametrize(
    ("has_read", "num_guessed", "drafted"),
    [(False, 0, [True, True]), (False, 10, [False, True]), (True, 0, [False, True])],
)
def test_whose_text_is_read_is_decided_by_what_was_said_not_by_the_guess_of_one_step(has_read, num_guessed, drafted):
    """A guess that promises more than the draft model serves this step; reading serves those to come."""
    desk = Desk(FLAT, draft=always(), draft_seconds=0.02)
    requests = [request_of(), request_of()]
    assert desk.policy._parts is not None
    seats = [desk.policy._seat(request) for request in requests]
    seats[0].has_read, seats[0].num_guessed = has_read, num_guessed
    step = Step(1, requests, seats, {}, 0, 100.0, 1.0)
    prospects = [Prospect(row, [0.8], 100, True) for row in range(2)]
    table = Table([1.0] * 8, expected=2.0)
    plan = desk.policy._parts.drafting.best(step, table, [0, 1], [[0.9, 0.9, 0.9], []], prospects, 4)
    assert plan is not None and plan.drafted == drafted


def test_what_reading_in_one_go_took_is_what_its_passes_do_not_usually_take():
    timing = DraftTiming(undivided=(8, 3, 100.0, 1.0), num_read=500)
    assert timing.divide(lambda rows, tokens, context: 0.1) == pytest.approx(0.1)
    assert timing.reading_seconds == pytest.approx(1.0 - 3 * 0.1)
    assert timing.divide(lambda rows, tokens, context: 0.1) == 0.0 and timing.reading_seconds == pytest.approx(0.7)


def test_passes_that_were_faster_than_usual_leave_nothing_for_reading():
    timing = DraftTiming(undivided=(8, 4, 100.0, 0.2), num_read=500)
    assert timing.divide(lambda rows, tokens, context: 0.1) == pytest.approx(0.05)
    assert timing.reading_seconds == pytest.approx(0.0)


# ---- what became of earlier stakes


def ended(record: Record, *, lost: bool) -> None:
    record.begin()
    record.end(0.2 if lost else 0.0)


def test_at_first_one_text_is_read_at_a_time():
    record = Record()
    assert record.is_worth_trying
    record.begin()
    assert not record.is_worth_trying, "nobody knows yet how the first one fares"
    record.end(0.0)
    assert record.is_worth_trying


def test_each_winner_lets_more_try_at_once():
    record = Record()
    for _ in range(3):
        ended(record, lost=False)
    tried = 0
    while record.is_worth_trying:
        record.begin()
        tried += 1
        assert tried < 100
    assert tried > 1


def test_a_loser_keeps_others_from_trying_for_a_while_and_not_for_ever():
    record = Record()
    for _ in range(3):
        ended(record, lost=False)
    ended(record, lost=True)
    others = 0
    while not record.is_worth_trying:
        record.pass_time()
        others += 1
        assert others < 1000
    assert others >= 20, "losers stay rare"


def test_who_lost_little_frightens_nobody():
    record = Record()
    record.begin()
    record.end(0.05)
    record.begin()
    record.end(0.0)
    assert record.is_worth_trying


def test_a_few_winners_speak_for_reading_again():
    record = Record()
    record.begin()
    record.begin()
    record.begin()
    record.begin()
    record.end(0.2)
    for _ in range(3):
        assert not record.is_worth_trying
        record.end(0.0)
    assert record.is_worth_trying


def test_many_losers_keep_others_away_for_longer():
    def waits(num_losers: int) -> int:
        record = Record()
        for _ in range(num_losers):
            ended(record, lost=True)
        others = 0
        while not record.is_worth_trying:
            record.pass_time()
            others += 1
        return others

    assert waits(1) < waits(3) < 1000


def test_after_a_loser_one_tries_at_a_time_again():
    record = Record()
    for _ in range(5):
        ended(record, lost=False)
    ended(record, lost=True)
    while not record.is_worth_trying:
        record.pass_time()
    record.begin()
    assert not record.is_worth_trying


# ---- what reading has brought to all of them


def drafted(returns: Returns, numbers: range, *, gain: float) -> None:
    for number in numbers:
        returns.add(number, 4, 1.0, gain)


def test_texts_are_read_as_long_as_drafts_bring_what_they_take():
    returns = Returns()
    drafted(returns, range(1000), gain=1.0)
    assert returns.is_worth_it(1000)


def test_drafts_that_have_lost_time_pause_reading_each_time_for_longer():
    returns, number, pauses = Returns(), 0, []
    for _ in range(3):
        while returns.is_worth_it(number):
            returns.add(number, 4, 1.0, 0.9)
            number += 1
        begun = number
        while not returns.is_worth_it(number):
            number += 1
        pauses.append(number - begun)
    assert pauses[0] > 50 and pauses[1] > 1.9 * pauses[0] and pauses[2] > 1.9 * pauses[1]


def test_a_few_steps_that_lost_say_nothing_yet():
    returns = Returns()
    drafted(returns, range(32), gain=0.5)
    assert returns.is_worth_it(32)


@pytest.mark.parametrize("is_used", [True, False])
def test_what_was_read_for_nothing_counts(is_used):
    returns = Returns()
    for number in range(200):
        returns.add(number, 4, 1.0, 1.1)
        if not is_used:
            returns.charge(4, 0.3)
    assert returns.is_worth_it(199) == is_used


def test_drafts_that_pay_again_are_not_held_to_what_was():
    returns = Returns()
    drafted(returns, range(100), gain=0.9)
    resumed = next(number for number in range(100, 1000) if returns.is_worth_it(number))
    drafted(returns, range(resumed, resumed + 400), gain=1.3)
    assert returns._pause == Returns._PAUSE


def test_what_a_request_alone_has_lost_is_not_held_against_a_batch():
    returns = Returns()
    for number in range(1000):
        returns.add(number, 1, 1.0, 0.5)
        returns.charge(1, 1.0)
    drafted(returns, range(1000, 1200), gain=1.1)
    assert returns.is_worth_it(1200)

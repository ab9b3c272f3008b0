"""When a draft model reads a text: what that costs, what it may bring, and what became of earlier stakes."""

from __future__ import annotations

import pytest

from outpace.core import Request
from outpace.speculation.costs import Costs, StepCosts
from outpace.speculation.reading import Record
from tests.desk import FLAT, Desk, always, request_of

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


# ---- what became of earlier stakes


def ended(record: Record, *, lost: bool) -> None:
    record.begin()
    record.end(lost=lost)


def test_at_first_one_text_is_read_at_a_time():
    record = Record()
    assert record.is_worth_trying
    record.begin()
    assert not record.is_worth_trying, "nobody knows yet how the first one fares"
    record.end(lost=False)
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

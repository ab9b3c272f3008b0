"""Guesses cost something: looking for something to copy stays within a small share of the time."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from outpace.core import Request
from tests.desk import FLAT, PROPORTIONAL, RIGHT, USUAL, Desk, Script, always, nothing, request_of

PRICE = 0.05  # of a guess, in plain steps


def num_asked(desk: Desk, requests: list[Request]) -> int:
    return sum(map(len, desk.policy.wanted_guesses(requests).values()))


def _seen_by(asked: list[int]) -> Script:
    """Has no guess, and notes about whom it was asked."""

    def script(request: Request) -> tuple[Sequence[bool], float]:
        asked.append(request.id)
        return [], 0.0

    return script


@pytest.mark.parametrize("num_requests", [1, 8, 64])
def test_however_many_requests_run_looking_costs_a_small_share_of_the_time(num_requests):
    desk = Desk(FLAT, suffix=nothing, guess_seconds=PRICE)
    batch = [request_of() for _ in range(num_requests)]
    asked: list[int] = []
    desk.proposers["suffix"].script = _seen_by(asked)
    desk.run(batch, 3000)
    assert len(asked) * PRICE <= 0.5 + 0.005 * 3000
    assert set(asked) == {request.id for request in batch}, "and yet everybody is asked about"


def test_looking_costs_less_where_a_good_guess_would_save_little():
    """A batch that fills the machine: not even a guess that is right brings much more than asking for it costs."""
    asked = list[int]()
    for points, plain_seconds in ((FLAT, 1.0), (PROPORTIONAL, 8.0)):
        seen: list[int] = []
        desk = Desk(points, suffix=_seen_by(seen), guess_seconds=PRICE * plain_seconds)
        desk.run([request_of() for _ in range(8)], 4000)
        asked.append(len(seen))
    in_flat, in_full = asked
    assert in_full <= in_flat / 5, "a tenth, beside what is there at first"
    assert in_full >= 20, "costs may be wrong: somebody is asked about all the same"


def test_what_looking_is_worth_follows_the_number_of_requests():
    desk = Desk(USUAL, suffix=nothing, guess_seconds=PRICE)
    batch = [request_of() for _ in range(16)]
    assert desk.policy._parts is not None
    asking = desk.policy._parts.asking
    desk.run(batch, 4)
    among_many = asking.worth
    desk.run(batch[:1], 1)
    assert asking.worth == 1.0 > among_many


def test_those_asked_about_longest_ago_come_first():
    desk = Desk(FLAT, suffix=nothing, guess_seconds=PRICE)
    batch = [request_of() for _ in range(20)]  # so many that a newcomer brings nothing of its own
    desk.run(batch, 200)
    newcomer = request_of()
    asked: list[int] = []
    while len(asked) < 21:
        wanted = desk.policy.wanted_guesses([*batch, newcomer])
        asked += [ask.request.id for asks in wanted.values() for ask in asks]
        desk.policy.decide([*batch, newcomer], {})
    assert asked[0] == newcomer.id and len(set(asked)) == 21


def test_curiosity_waits_until_it_can_ask_about_all_of_a_few_at_once():
    """A step in which somebody is asked about costs something whoever it is: four guesses in one, not one in four."""
    desk = Desk(FLAT, suffix=nothing, guess_seconds=PRICE)
    batch = [request_of() for _ in range(4)]
    desk.run(batch, 200)
    asked = []
    for _ in range(400):
        asked.append(num_asked(desk, batch))
        desk.policy.decide(batch, {})
    assert set(asked) == {0, 4}


def test_guesses_dearer_than_the_purse_for_several_are_asked_for_all_the_same():
    desk = Desk(FLAT, suffix=nothing, guess_seconds=0.2)
    batch = [request_of() for _ in range(16)]
    desk.run(batch, 200)
    asked = 0
    for _ in range(2000):
        asked += num_asked(desk, batch)
        desk.policy.decide(batch, {})
    assert asked >= 2


def test_where_somebody_is_asked_about_in_any_case_the_purse_pays_for_one_more():
    desk = Desk(USUAL, suffix=nothing, guess_seconds=PRICE)
    batch = [request_of() for _ in range(4)]
    desk.run(batch, 200)
    assert desk.policy._parts is not None
    desk.policy._parts.resting.end()
    desk.policy._parts.asking._purse = 1.5 * desk.policy._parts.asking.price(desk.policy._seat(batch[0]))
    assert num_asked(desk, batch) == 0
    desk.policy._parts.resting.end()
    desk.policy._seat(batch[0]).is_eager = True
    assert num_asked(desk, batch) == 2


def test_a_step_without_anybody_to_ask_about_is_not_decided():
    desk = Desk(FLAT, suffix=nothing, guess_seconds=PRICE)
    batch = [request_of() for _ in range(4)]
    desk.run(batch, 200)
    for _ in range(100):
        wanted = desk.policy.wanted_guesses(batch)
        assert desk.policy.is_resting != bool(wanted)
        desk.policy.decide(batch, {})


def test_beside_a_request_that_insists_on_drafts_there_is_no_rest():
    desk = Desk(FLAT, suffix=nothing, guess_seconds=PRICE)
    batch = [request_of(), request_of(mode="on")]
    for _ in range(100):
        desk.policy.wanted_guesses(batch)
        assert not desk.policy.is_resting
        assert desk.policy.decide(batch, {})[1].depth


def test_guesses_that_save_more_than_they_cost_are_asked_for_every_step():
    desk, who = Desk(USUAL, suffix=always(), guess_seconds=PRICE), request_of()
    desk.run([who], 20)
    for _ in range(20):
        assert num_asked(desk, [who]) == 1
        desk.policy.decide([who], {})


def test_what_a_draft_model_had_accepted_is_not_the_guesses_merit():
    """The guesser is always wrong, the draft model always right: the guesser is asked no more than curiosity pays."""
    desk = Desk(FLAT, suffix=always(False, sure=0.5), draft=always(sure=0.9), guess_seconds=PRICE, draft_seconds=0.01)
    who = request_of(length=2)
    desk.run([who], 40)
    asked = 0
    for _ in range(100):
        asked += num_asked(desk, [who])
        desk.step([who])
    assert any(record.rows[0].method == "draft" for record in desk.policy.trace)
    assert asked < 60


def test_in_debt_only_the_purse_pays():
    desk, who = Desk(USUAL, suffix=always(), guess_seconds=PRICE), request_of()
    desk.run([who], 20)
    desk.policy._seat(who).num_right = 0
    desk.policy.ledger.write_off(1000.0)
    assert desk.policy._parts is not None
    desk.policy._parts.books._saved_by_guesses = -0.1  # it was by guesses that so much was lost
    assert desk.policy._parts.books.forbid_guesses
    asked = 0
    for _ in range(300):
        asked += num_asked(desk, [who])
        desk.policy.decide([who], {})
    assert asked * PRICE <= 0.5 + 0.005 * 300


def forbidden(desk: Desk) -> None:
    """In debt by guesses, and not to be made good in this test."""
    assert desk.policy._parts is not None
    desk.policy.ledger.write_off(1000.0)
    desk.policy._parts.books._saved_by_guesses = -0.1


@pytest.mark.parametrize("right", [True, False])
def test_in_debt_guesses_are_used_for_those_they_were_right_about_while_only_compared(right):
    desk, who = Desk(FLAT, suffix=always(right)), request_of()
    forbidden(desk)
    assert desk.run([who], 4)[:4] == [[0]] * 4, "nothing is known of it yet"
    assert any(depth for [depth] in desk.run([who], 20)) == right


def test_in_debt_a_guess_that_was_wrong_ends_that():
    desk, who = Desk(USUAL, suffix=always()), request_of()
    desk.run([who], 20)
    forbidden(desk)
    assert desk.depths([who]) != [0]
    desk.proposers["suffix"].script = always(False)
    desk.run([who], 2)
    forbidden(desk)
    assert not any(depth for [depth] in desk.run([who], 50))


@pytest.mark.parametrize(("num_running", "num_paid"), [(1, 24), (2, 12), (16, 2), (17, 0)])
def test_among_a_few_a_new_request_pays_for_being_asked_about(num_running, num_paid):
    """The fewer have to wait for it, the longer it is looked whether its text is of another kind."""
    desk, batch = Desk(USUAL, suffix=nothing, guess_seconds=PRICE), [request_of() for _ in range(num_running)]
    desk.run(batch, 40)
    assert desk.policy._parts is not None
    asking = desk.policy._parts.asking
    before = asking._purse
    seat = desk.policy._seat(request_of())
    paid = num_paid * asking.worth * asking.price(seat)
    assert before is not None and asking._purse == pytest.approx(before + paid)


def test_a_request_alone_that_soon_copies_is_noticed_although_those_before_it_did_not():
    desk = Desk(USUAL, suffix=nothing, guess_seconds=PRICE)
    for _ in range(20):
        before = request_of()
        desk.run([before], 30)
        desk.policy.release(before)
    who = request_of()
    first = who.num_output
    desk.proposers["suffix"].script = lambda request: always()(request) if request.num_output > first + 6 else ([], 0.0)
    assert any(depth for [depth] in desk.run([who], 12))


# ---- rests


def test_while_there_is_nobody_to_ask_about_steps_are_plain_without_looking():
    desk, who = Desk(USUAL, suffix=nothing, guess_seconds=PRICE), request_of()
    desk.run([who], 100)
    rested = 0
    for _ in range(100):
        desk.step([who])
        rested += desk.policy.is_resting
    assert rested > 60
    assert any("nobody to ask about" in step.reason for step in desk.policy.trace)


def test_a_rest_ends_when_the_batch_changes():
    desk, who = Desk(USUAL, suffix=nothing, guess_seconds=PRICE), request_of()
    desk.run([who], 100)
    while not desk.policy.is_resting:
        desk.step([who])
    desk.decide([who, request_of()])
    assert not desk.policy.is_resting


def test_what_was_rested_is_in_the_books_when_the_request_ends():
    desk, who = Desk(USUAL, suffix=nothing, guess_seconds=PRICE), request_of(length=3, max_length=203)
    while who.finish_reason is None:
        desk.step([who], policy_seconds=0.01)
    assert who.tokens[3:] == [RIGHT] * 200
    assert who.spec.decode_seconds == pytest.approx(202.0) and who.spec.plain_seconds == pytest.approx(200.0)
    ledger = desk.policy.ledger
    assert [ledger.spent_seconds, ledger.plain_seconds] == pytest.approx([202.0, 200.0])


def test_deciding_that_saves_nothing_is_paid_out_of_a_small_share_of_the_time():
    """Guesses are right just often enough to be used, and bring no more than their slots cost."""
    rng = random.Random(7)
    desk = Desk(USUAL, suffix=lambda request: ([rng.random() < 0.3] * 1, 0.5), guess_seconds=0.0)
    who = request_of()
    num_decided = 0
    for _ in range(600):
        desk.step([who], policy_seconds=0.04)
        num_decided += not desk.policy.is_resting
    assert 0.04 * num_decided <= 1.5 + 0.01 * 600, "with what was laid by at first"


def test_deciding_that_saves_more_than_it_costs_never_rests():
    desk, who = Desk(USUAL, suffix=always(), guess_seconds=0.0), request_of()
    desk.step([who])
    for _ in range(200):
        desk.step([who], policy_seconds=0.04)
        assert not desk.policy.is_resting

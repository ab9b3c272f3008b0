"""The books of single steps: those mixed with prompts, and plain ones that costs had wrong."""

from __future__ import annotations

import pytest

from outpace.core import Draft, Request, StepStats, Verdict
from outpace.speculation.seats import Choice, Outcome
from tests.desk import RIGHT, Desk, nothing, request_of

COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 101: 11.0, 104: 11.3}  # a prompt of a hundred tokens takes ten steps


def book(
    desk: Desk,
    who: Request,
    *,
    said: int,
    num_prefill: int,
    seconds: float,
    policy_seconds: float = 0.0,
    hidden_seconds: float = 0.0,
) -> None:
    """One step in which a draft of three was accepted as far as was said."""
    drafted = 3 if said > 1 else 0
    guess = Draft([RIGHT] * drafted, "suffix", confidence=[0.9] * drafted)
    desk.policy.wanted_guesses([who])
    desk.policy.decide([who], {who.id: [guess]}, num_prefill)
    choice = Choice("suffix", drafted, draft=guess) if drafted else Choice.plain()
    outcome = Outcome(who, choice, Verdict([RIGHT] * said, drafted, said - 1))
    stats = StepStats(num_decode_rows=1, num_prefill_tokens=num_prefill, num_emitted=said, forward_seconds=seconds)
    stats.policy_seconds, stats.hidden_seconds = policy_seconds, hidden_seconds
    desk.policy.account([outcome], stats, 0.0)


def test_a_step_mixed_with_a_prompt_is_booked_with_its_share_of_decoding():
    """Four tokens said in a step of four beside a prompt: without it, 1.3 seconds for what plainly takes four."""
    mixed, pure = (Desk(COSTS, suffix=nothing) for _ in range(2))
    book(mixed, request_of(), said=4, num_prefill=100, seconds=11.3)
    book(pure, request_of(), said=4, num_prefill=0, seconds=1.3)
    assert pure.policy.ledger.estimated_speedup == pytest.approx(4 / 1.3)
    assert mixed.policy.ledger.estimated_speedup == pytest.approx(4 / 1.3)


def test_a_plain_step_beside_a_prompt_neither_gains_nor_loses_however_long_it_took():
    desk, who = Desk(COSTS, suffix=nothing), request_of()
    book(desk, who, said=1, num_prefill=100, seconds=30.0)
    assert desk.policy.ledger.estimated_speedup == pytest.approx(1.0)
    assert who.spec.decode_seconds == pytest.approx(who.spec.plain_seconds)


def test_gains_are_measured_by_plain_steps_as_they_were_where_costs_have_them_wrong():
    """Costs say 1.0, plain steps take 0.9: a step of 1.3 that says four saves less than costs would have it."""
    desk, who = Desk(COSTS, suffix=nothing), request_of()
    for _ in range(40):
        book(desk, who, said=1, num_prefill=0, seconds=0.9)
    before = who.spec.plain_seconds
    book(desk, who, said=4, num_prefill=0, seconds=1.3)
    assert who.spec.plain_seconds - before == pytest.approx(4 * 0.9, rel=0.02)


def test_deciding_while_the_device_is_at_work_costs_nothing():
    """A step begun before it was asked for takes a second from the one before, whatever the host does meanwhile."""
    waiting, hiding = (Desk(COSTS, suffix=nothing) for _ in range(2))
    for _ in range(20):
        book(waiting, request_of(), said=1, num_prefill=0, seconds=0.8, policy_seconds=0.2)
        book(hiding, request_of(), said=1, num_prefill=0, seconds=0.8, policy_seconds=0.2, hidden_seconds=0.2)
    assert waiting.policy.ledger.estimated_speedup == pytest.approx(0.8)
    assert hiding.policy.ledger.estimated_speedup == pytest.approx(1.0)


def test_deciding_before_a_draft_is_waited_for_even_if_verifying_was_begun_behind_it():
    stats = StepStats(policy_seconds=0.2, draft_seconds=0.5, forward_seconds=0.8, hidden_seconds=0.1)
    assert stats.deciding_seconds == 0.2


def test_a_pass_that_was_disturbed_forbids_nothing_and_is_not_denied():
    desk, who = Desk(COSTS, suffix=nothing), request_of()
    book(desk, who, said=2, num_prefill=0, seconds=50.0)
    assert not desk.policy.ledger.is_in_debt
    assert desk.policy.ledger.estimated_speedup == pytest.approx(2 / 50)


def test_drafts_that_cost_what_they_were_meant_to_cost_are_not_excused():
    desk, who = Desk({1: 1.0, 4: 4.0}, suffix=nothing), request_of()
    for _ in range(3):
        book(desk, who, said=2, num_prefill=0, seconds=4.0)
    assert desk.policy.ledger.is_in_debt


@pytest.mark.parametrize("num_on_end", [0, 40])
def test_where_plain_steps_are_begun_ahead_a_lone_one_that_takes_longer_says_nothing_of_them(num_on_end: int):
    """On a device a plain step after others waits for nothing but the model; one between drafts waits for the host."""
    desk, who = Desk(COSTS, suffix=nothing, begins_ahead=True), request_of()
    for _ in range(num_on_end):
        book(desk, who, said=1, num_prefill=0, seconds=0.8, hidden_seconds=0.1)
    believed = desk.policy._plain_seconds([who])[0]
    assert believed == pytest.approx(0.8 if num_on_end else 1.0, rel=0.02)
    for _ in range(40):
        book(desk, who, said=1, num_prefill=0, seconds=1.1)
    assert desk.policy._plain_seconds([who])[0] == pytest.approx(believed, rel=0.01)


def test_where_plain_steps_are_begun_ahead_a_lone_one_that_takes_less_than_they_were_thought_to_is_believed():
    desk, who = Desk(COSTS, suffix=nothing, begins_ahead=True), request_of()
    for _ in range(40):
        book(desk, who, said=1, num_prefill=0, seconds=0.9)
    assert desk.policy._plain_seconds([who])[0] == pytest.approx(0.9, rel=0.02)

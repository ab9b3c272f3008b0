"""Budgets: what speculation may lose, and how a debt is recovered. Back-off: when failures are tried again."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.core import StepStats
from outpace.speculation.policy.accounts import Accounts
from outpace.speculation.policy.budget import Backoff, Budget
from outpace.speculation.policy.tunables import TUNABLES

GRANT = 2.0


def budget(allowed_loss: float = 0.02, grant: float = GRANT) -> Budget:
    return Budget(grant, allowed_loss)


def lose(budget: Budget, steps: int, spent: float = 1.5) -> None:
    for _ in range(steps):
        budget.book(spent, 1.0, 1.0)


def plain_steps(budget: Budget, steps: int, policy: float = 0.0) -> None:
    for _ in range(steps):
        budget.book(1.0 + policy, 1.0, 1.0)


def steps_until_debt(budget: Budget, spent: float) -> int:
    for steps in range(1, 10_000):
        budget.book(spent, 1.0, 1.0)
        if budget.balance <= 0.0:
            return steps
    return 10_000


def test_nothing_is_known_before_the_first_step_and_the_grant_is_there():
    found = budget()
    assert found.estimated_speedup is None and found.balance == GRANT
    assert (found.spent_seconds, found.plain_seconds) == (0.0, 0.0)


def test_the_estimate_is_of_everything_since_the_start():
    found = budget()
    found.book(1.0, 3.0, 1.0)
    found.book(1.0, 1.0, 1.0)
    assert found.estimated_speedup == pytest.approx(2.0)
    assert (found.spent_seconds, found.plain_seconds) == (2.0, 4.0)


def test_plain_decoding_with_a_quick_policy_is_never_in_debt():
    found = budget()
    for _ in range(20):
        plain_steps(found, 500, policy=0.1 * 0.02)
        assert found.balance > 0.0
    assert found.estimated_speedup == pytest.approx(1 / 1.002)


def test_gains_never_lower_the_balance():
    found = budget()
    before = found.balance
    for _ in range(1000):
        found.book(1.0, 2.0, 1.0)
        assert found.balance >= before
        before = found.balance


def test_a_few_losing_steps_are_allowed_before_anything_is_known_and_no_more():
    assert 2 <= steps_until_debt(budget(), 1.5) <= 50


def test_a_loss_below_what_is_allowed_goes_on_for_ever_and_one_above_it_does_not():
    assert steps_until_debt(budget(0.10), 1.01) == 10_000
    assert steps_until_debt(budget(0.10), 1.11) < 2_000


def test_the_more_is_allowed_the_longer_it_lasts():
    lasts = [steps_until_debt(budget(allowed), 1.5) for allowed in (0.01, 0.05, 0.2, 0.4)]
    assert lasts == sorted(lasts) and lasts[0] < lasts[-1]


@given(st.lists(st.tuples(st.floats(0.5, 3.0), st.floats(0.5, 3.0)), max_size=60), st.sampled_from([0.01, 0.02, 0.2]))
def test_whoever_stops_in_debt_has_lost_no_more_than_grant_and_allowed_loss(steps, allowed):
    """Steps run while the balance is positive; only the last one can overdraw it."""
    found, last = budget(allowed), 0.0
    for spent, plain in steps:
        if found.balance <= 0.0:
            break
        found.book(spent, plain, 1.0)
        last = max(0.0, spent - plain)
    assert found.spent_seconds - found.plain_seconds <= GRANT + allowed * found.plain_seconds + last + 1e-9


def test_a_debt_is_made_good_by_gains_at_once_and_by_plain_steps_with_time():
    by_gain, by_time = budget(), budget()
    for found in (by_gain, by_time):
        lose(found, 30)
        assert found.balance < 0.0
    lost = by_gain.spent_seconds - by_gain.plain_seconds
    by_gain.book(1.0, 1.0 + lost, 1.0)
    assert by_gain.balance > 0.0
    plain_steps(by_time, 10)
    assert by_time.balance < 0.0, "not yet"
    needed = 10
    while by_time.balance <= 0.0:
        plain_steps(by_time, 10)
        needed += 10
        assert needed < 20_000
    assert needed > 100


def test_how_many_plain_steps_a_debt_takes_is_known_before():
    found = budget()
    lose(found, 10)
    expected = found.steps_to_earn(-found.balance)
    needed = 0
    while found.balance <= 0.0:
        plain_steps(found, 1)
        needed += 1
    assert needed == pytest.approx(expected, abs=2)
    assert found.steps_to_earn(-found.balance) <= 1


def test_what_was_gained_long_ago_pays_for_no_losses_without_end():
    found = budget()
    for _ in range(10_000):
        found.book(1.0, 2.0, 1.0)
    assert found.balance <= TUNABLES.most_balance
    assert steps_until_debt(found, 1.5) < 100
    assert found.estimated_speedup is not None and found.estimated_speedup > 1, "the estimate still remembers it"


def test_losses_are_measured_in_the_steps_of_the_present_batch():
    """A loss of ten milliseconds is large if a step takes one millisecond, and small if it takes a second."""
    small, large = budget(), budget()
    for found, seconds in ((small, 0.001), (large, 1.0)):
        found.book(seconds, seconds, seconds)
        found.book(0.010, 0.0, seconds)
    assert small.balance < 0.0 < large.balance


def test_one_step_that_something_disturbed_forbids_nothing():
    found = budget()
    found.book(50.0, 1.0, 1.0, excused=48.0)
    assert found.balance > 0.0
    assert found.estimated_speedup == pytest.approx(1.0 / 50.0), "what it took is not denied"


def test_the_first_loss_is_a_debt_where_nothing_may_be_lost():
    found = budget(0.0)
    assert found.balance == 0.0, "there is no grant, either"
    found.book(1.0, 1.0, 1.0)
    assert found.balance == 0.0
    found.book(1.001, 1.0, 1.0)
    assert found.balance < 0.0
    assert found.steps_to_earn(-found.balance) > 10**6, "plain steps never make it good"
    found.book(1.0, 1.1, 1.0)
    assert found.balance > 0.0


# ---- investments in later steps


def test_what_serves_later_steps_lowers_the_balance_as_they_pass():
    invested, spent = budget(), budget()
    invested.book(3.0, 1.0, 1.0, invested=2.0)
    spent.book(3.0, 1.0, 1.0)
    assert spent.balance < invested.balance - 1.0
    assert invested.estimated_speedup == spent.estimated_speedup, "time is time in the estimate"
    gaps = []
    for _ in range(4):
        plain_steps(invested, 50)
        plain_steps(spent, 50)
        gaps.append(invested.balance - spent.balance)
    assert all(second <= first for first, second in pairwise(gaps)) and abs(gaps[-1]) < 0.1


def test_what_serves_later_steps_is_worth_it_where_they_gain_more():
    """Each step gains half a step: the balance never falls below its start."""
    found = budget()
    before = found.balance
    found.book(3.0, 1.0, 1.0, invested=2.0)
    for _ in range(40):
        found.book(1.0, 1.5, 1.0)
        assert found.balance > before - 0.5
    assert found.balance > before


# ---- trying again


def waits(num_failures: int) -> list[int]:
    """Steps between one failure and the next attempt, which fails too."""
    backoff, step = Backoff(), 1
    found = []
    for _ in range(num_failures):
        backoff.fail(step)
        found.append(backoff.due - step)
        step = backoff.due
    return found


def test_what_was_never_tried_may_be_tried_at_once():
    assert Backoff().due == 0


def test_what_fails_again_and_again_waits_longer_and_longer_up_to_a_limit():
    found = waits(12)
    assert all(wait >= 1 for wait in found)
    assert all(second >= first for first, second in pairwise(found[3:]))
    assert found[:5] != found[5:10]
    assert max(found) <= 2 * TUNABLES.longest_backoff and found[-1] >= TUNABLES.longest_backoff


def test_what_succeeds_need_not_wait_and_starts_over():
    backoff, fresh = Backoff(), Backoff()
    for step in (1, 3, 7, 40):
        backoff.fail(step)
    backoff.succeed()
    assert backoff.due == 0
    backoff.fail(100)
    fresh.fail(100)
    assert backoff.due == fresh.due


@given(st.integers(1, 10_000), st.integers(0, 200), st.integers(1, 8))
def test_what_waits_equally_long_is_tried_in_the_same_step(step, later, num_failures):
    """Requests that failed at about the same step are tried in the same step: each such step has a cost."""
    first, second = Backoff(), Backoff()
    for _ in range(num_failures):
        first.fail(step)
    for _ in range(num_failures):
        second.fail(step + later)
    wait = TUNABLES.longest_backoff
    assert first.due > step and second.due > step + later
    if first.due > step + later:  # still waiting when the other starts to wait
        assert first.due == second.due
    assert abs(first.due - second.due) <= later + wait


def test_idle_steps_make_a_debt_good_though_they_take_more_than_is_earned() -> None:
    """A step of a small model on a fast machine is so short that even idling takes a larger share than is earned."""
    accounts = Accounts(allowed_loss=0.02)
    accounts.budget.book(3.0, 0.0, 1.0)
    before = accounts.budget.balance
    assert before < 0
    for _ in range(300):
        accounts.add_plain_step(StepStats(forward_seconds=1.0, policy_seconds=0.01, num_emitted=1), is_idle=True)
    accounts.settle([], [], 1.0)
    assert accounts.budget.balance == pytest.approx(before + 300 * 0.5 * TUNABLES.budget_share * 0.02)
    assert accounts.budget.spent_seconds == pytest.approx(3.0 + 300 * 1.01)  # reported all the same


def test_steps_with_a_decision_are_charged_for_it() -> None:
    accounts = Accounts(allowed_loss=0.02)
    before = accounts.budget.balance
    accounts.add_plain_step(StepStats(forward_seconds=1.0, policy_seconds=0.05, num_emitted=1), is_idle=False)
    accounts.settle([], [], 1.0)
    assert accounts.budget.balance == pytest.approx(before - 0.05 + TUNABLES.budget_share * 0.02)

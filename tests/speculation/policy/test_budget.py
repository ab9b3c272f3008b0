"""Budgets: the plain steps that may be lost, and how a debt is repaid. Back-off: when failures are tried again."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.speculation.policy.budget import Backoff, Budget
from outpace.speculation.policy.tunables import TUNABLES

GRANT = 2.0


def budget(share: float = 0.02, grant: float = GRANT) -> Budget:
    return Budget(grant, share)


def steps_of(budget: Budget, spent: float, steps: int = 1, emitted: float = 1.0) -> None:
    """Steps that take `spent` plain steps each, and emit as many tokens as `emitted` plain ones."""
    for _ in range(steps):
        budget.earn(emitted)
        budget.book(spent - emitted)


def steps_until_debt(budget: Budget, spent: float) -> int:
    for steps in range(1, 10_000):
        steps_of(budget, spent)
        if budget.balance <= 0.0:
            return steps
    return 10_000


# ---- the balance


def test_before_the_first_step_the_grant_is_there():
    assert budget().balance == GRANT


def test_plain_decoding_with_a_quick_policy_is_never_in_debt():
    found = budget()
    for _ in range(20):
        steps_of(found, 1.0 + 0.1 * 0.02, 500)
        assert found.balance > 0.0


def test_a_share_of_the_plain_steps_may_be_lost():
    found = budget(0.02)
    found.earn(50.0)
    assert found.balance == pytest.approx(GRANT + 1.0)
    found.book(0.4)
    assert found.balance == pytest.approx(GRANT + 0.6)


def test_gains_never_lower_the_balance():
    found = budget()
    before = found.balance
    for _ in range(1000):
        steps_of(found, 1.0, emitted=2.0)
        assert found.balance >= before
        before = found.balance


def test_a_few_losing_steps_are_allowed_before_anything_is_known_and_no_more():
    assert 2 <= steps_until_debt(budget(), 1.5) <= 50


def test_a_loss_below_what_is_allowed_goes_on_for_ever_and_one_above_it_does_not():
    assert steps_until_debt(budget(0.10), 1.09) == 10_000
    assert steps_until_debt(budget(0.10), 1.11) < 2_000


def test_the_more_is_allowed_the_longer_it_lasts():
    lasts = [steps_until_debt(budget(allowed), 1.5) for allowed in (0.01, 0.05, 0.2, 0.4)]
    assert lasts == sorted(lasts) and lasts[0] < lasts[-1]


@given(st.lists(st.tuples(st.floats(0.5, 3.0), st.floats(0.5, 3.0)), max_size=60), st.sampled_from([0.01, 0.02, 0.2]))
def test_whoever_stops_in_debt_has_lost_no_more_than_grant_and_allowed_loss(steps, allowed):
    """Steps run while the balance is positive; only the last one can overdraw it."""
    found, lost, plain_steps, last = budget(allowed), 0.0, 0.0, 0.0
    for spent, emitted in steps:
        if found.balance <= 0.0:
            break
        steps_of(found, spent, emitted=emitted)
        lost, plain_steps, last = lost + spent - emitted, plain_steps + emitted, max(0.0, spent - emitted)
    assert lost <= GRANT + allowed * plain_steps + last + 1e-9


def test_a_debt_is_made_good_by_gains_at_once_and_by_plain_steps_with_time():
    by_gain, by_time = budget(), budget()
    for found in (by_gain, by_time):
        steps_of(found, 1.5, 30)
        assert found.balance < -5.0
    steps_of(by_gain, 1.0, emitted=1.0 + 15.0)
    assert by_gain.balance > 0.0
    expected = round(-by_time.balance / 0.02)
    steps_of(by_time, 1.0, expected - 2)
    assert by_time.balance < 0.0, "not yet"
    steps_of(by_time, 1.0, 4)
    assert by_time.balance > 0.0


def test_what_was_gained_long_ago_pays_for_no_losses_without_end():
    by_gains, by_steps = budget(), budget()
    steps_of(by_gains, 1.0, 10_000, emitted=2.0)
    by_steps.earn(1e6)
    for found in (by_gains, by_steps):
        assert found.balance == TUNABLES.most_balance
        assert steps_until_debt(found, 1.5) < 100


def test_the_first_loss_is_a_debt_where_nothing_may_be_lost():
    found = budget(0.0)
    assert found.balance == 0.0, "there is no grant, either"
    steps_of(found, 1.0)
    assert found.balance == 0.0
    steps_of(found, 1.001)
    assert found.balance < 0.0
    before = found.balance
    steps_of(found, 1.0, 1000)
    assert found.balance == before, "plain steps never make it good"
    steps_of(found, 1.0, emitted=1.1)
    assert found.balance > 0.0


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
    assert max(found) <= 2 * TUNABLES.longest_wait and found[-1] >= TUNABLES.longest_wait


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
    wait = TUNABLES.longest_wait
    assert first.due > step and second.due > step + later
    if first.due > step + later:  # still waiting when the other starts to wait
        assert first.due == second.due
    assert abs(first.due - second.due) <= later + wait

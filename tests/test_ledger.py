"""The books: what speculation may lose, when that is used up, and how it is made good."""

from __future__ import annotations

import pytest

from outpace.speculation.ledger import Ledger


def lose(ledger: Ledger, steps: int, spent: float = 1.5) -> None:
    for _ in range(steps):
        ledger.add(spent, 1.0, 1.0)


def plain_steps(ledger: Ledger, steps: int, policy: float = 0.0) -> None:
    for _ in range(steps):
        ledger.add(1.0 + policy, 1.0, 1.0)


def steps_until_debt(ledger: Ledger, spent: float) -> int:
    for steps in range(1, 10_000):
        ledger.add(spent, 1.0, 1.0)
        if ledger.is_in_debt:
            return steps
    return 10_000


def test_nothing_is_known_before_the_first_step():
    ledger = Ledger(0.02)
    assert ledger.estimated_speedup is None and not ledger.is_in_debt


def test_the_estimate_is_of_everything_since_the_start():
    ledger = Ledger(0.02)
    ledger.add(1.0, 3.0, 1.0)
    ledger.add(1.0, 1.0, 1.0)
    assert ledger.estimated_speedup == pytest.approx(2.0)
    assert (ledger.spent_seconds, ledger.plain_seconds) == (2.0, 4.0)


def test_plain_decoding_with_a_thrifty_policy_is_never_in_debt():
    ledger = Ledger(0.02)
    for _ in range(20):
        plain_steps(ledger, 500, policy=0.005)
        assert not ledger.is_in_debt
    assert ledger.estimated_speedup == pytest.approx(1 / 1.005)


def test_gains_are_no_debt():
    ledger = Ledger(0.02)
    for _ in range(1000):
        ledger.add(1.0, 2.0, 1.0)
        assert not ledger.is_in_debt


def test_a_few_losing_steps_are_allowed_before_anything_is_known_and_no_more():
    steps = steps_until_debt(Ledger(0.02), 1.5)
    assert 2 <= steps <= 50


def test_a_loss_below_what_is_allowed_goes_on_for_ever_and_one_above_it_does_not():
    assert steps_until_debt(Ledger(0.10), 1.01) == 10_000
    assert steps_until_debt(Ledger(0.10), 1.11) < 2_000


def test_the_more_is_allowed_the_longer_it_lasts():
    lasts = [steps_until_debt(Ledger(allowed), 1.5) for allowed in (0.01, 0.05, 0.2, 0.4)]
    assert lasts == sorted(lasts) and lasts[0] < lasts[-1]


def test_a_debt_is_made_good_by_gains_at_once_and_by_plain_steps_with_time():
    by_gain, by_time = Ledger(0.02), Ledger(0.02)
    for ledger in (by_gain, by_time):
        lose(ledger, 30)
        assert ledger.is_in_debt
    lost = by_gain.spent_seconds - by_gain.plain_seconds
    by_gain.add(1.0, 1.0 + lost, 1.0)
    assert not by_gain.is_in_debt
    plain_steps(by_time, 10)
    assert by_time.is_in_debt, "not yet"
    needed = 0
    while by_time.is_in_debt:
        plain_steps(by_time, 100)
        needed += 100
        assert needed < 20_000
    assert needed > 100


def test_old_gains_are_no_licence():
    """What was gained an hour ago does not pay for losses without end today."""
    ledger = Ledger(0.02)
    for _ in range(10_000):
        ledger.add(1.0, 2.0, 1.0)
    assert steps_until_debt(ledger, 1.5) < 10_000
    assert ledger.estimated_speedup is not None and ledger.estimated_speedup > 1, "the estimate still remembers them"


def test_the_allowance_is_measured_in_the_steps_of_the_present_batch():
    """Ten lost milliseconds are much where a step takes one, and nothing where it takes a second."""
    small, large = Ledger(0.02), Ledger(0.02)
    for ledger, seconds in ((small, 0.001), (large, 1.0)):
        ledger.add(seconds, seconds, seconds)
        ledger.write_off(0.010)
    assert small.is_in_debt and not large.is_in_debt


def test_one_step_that_something_disturbed_forbids_nothing():
    ledger = Ledger(0.02)
    ledger.add(50.0, 1.0, 1.0, excused=48.0)
    assert not ledger.is_in_debt
    assert ledger.estimated_speedup == 1.0 / 50.0, "what it took is not denied"


# ---- none allowed


def test_where_nothing_may_be_lost_the_first_loss_is_a_debt():
    ledger = Ledger(0.0)
    assert not ledger.is_in_debt
    ledger.add(1.0, 1.0, 1.0)
    assert not ledger.is_in_debt
    ledger.add(1.001, 1.0, 1.0)
    assert ledger.is_in_debt
    ledger.add(1.0, 1.1, 1.0)
    assert not ledger.is_in_debt


# ---- investments


def test_an_investment_is_no_loss_until_it_is_paid():
    invested, spent = Ledger(0.0), Ledger(0.0)
    invested.add(5.0, 1.0, 1.0, invested=4.0)
    spent.add(5.0, 1.0, 1.0)
    assert spent.is_in_debt and not invested.is_in_debt
    assert invested.estimated_speedup == spent.estimated_speedup, "time is time in the estimate"


def test_an_investment_is_paid_over_the_steps_it_serves():
    """Each step gains half of a step and pays a quarter for having read: worth it. Then half: no gain is left."""
    ledger = Ledger(0.0)
    ledger.add(2.0, 1.0, 1.0, invested=1.0)
    for _ in range(4):
        ledger.add(1.0, 1.5, 1.0, paid=0.25)
        assert not ledger.is_in_debt
    ledger = Ledger(0.0)
    ledger.add(2.0, 1.0, 1.0, invested=1.0)
    ledger.add(1.0, 1.5, 1.0, paid=0.75)
    assert ledger.is_in_debt


def test_an_investment_that_serves_nobody_any_more_is_lost():
    ledger = Ledger(0.0)
    ledger.add(5.0, 1.0, 1.0, invested=4.0)
    ledger.write_off(4.0)
    assert ledger.is_in_debt
    spent = ledger.spent_seconds
    ledger.write_off(1.0)
    assert ledger.spent_seconds == spent, "the time was counted when it was spent"

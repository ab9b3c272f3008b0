"""A decision stands for several steps: a model's plan where comparing plans takes a noticeable share of a step, a plain
one until something is due to be tried again."""

from __future__ import annotations

from itertools import pairwise

import pytest

from outpace.core import Request
from outpace.speculation.policy.tunables import TUNABLES
from tests.session_driver import FLAT, USUAL, SessionDriver, always, nothing, request_of

SLOW = 0.1  # plain steps that a decision takes


def driver_of() -> SessionDriver:
    return SessionDriver(FLAT, draft=always(sure=0.9), suffix=nothing, draft_seconds=0.02)


def repeated(driver: SessionDriver) -> list[bool]:
    return [trace.reason.endswith("as before") for trace in driver.policy.trace]


def until_repeating(driver: SessionDriver, batch: list[Request]) -> None:
    for _ in range(50):
        driver.step(batch, policy_seconds=SLOW)
        if repeated(driver)[-1]:
            return
    raise AssertionError("no plan was repeated")


def test_where_deciding_is_quick_every_step_is_decided():
    driver = driver_of()
    taken = driver.run([request_of()], 60)
    assert sum(map(any, taken)) > 40 and not any(repeated(driver))


def test_where_deciding_is_slow_most_steps_repeat_the_last_plan():
    driver, batch = driver_of(), [request_of() for _ in range(4)]
    taken = driver.run(batch, 120, policy_seconds=SLOW)
    flags = repeated(driver)
    assert sum(flags) > 60
    runs = "".join("r" if flag else "." for flag in flags).split(".")
    assert max(map(len, runs)) < TUNABLES.longest_wait
    for before, now, is_repeated in zip(taken, taken[1:], flags[1:], strict=False):
        assert not is_repeated or now == before


def test_a_repeated_plan_looks_nothing_up():
    driver, batch = driver_of(), [request_of() for _ in range(4)]
    for _ in range(80):
        num_asked = driver.proposers["suffix"].num_asked
        driver.step(batch, policy_seconds=SLOW)
        assert not repeated(driver)[-1] or driver.proposers["suffix"].num_asked == num_asked


def test_a_new_request_or_a_prompt_ends_the_repeating():
    driver, batch = driver_of(), [request_of() for _ in range(4)]
    until_repeating(driver, batch)
    driver.step(batch, policy_seconds=SLOW, num_prefill=8)
    assert not repeated(driver)[-1]
    until_repeating(driver, batch)
    driver.step([*batch, request_of()], policy_seconds=SLOW)
    assert not repeated(driver)[-1]


def test_a_plan_that_turns_bad_stands_for_no_longer_than_the_budget_lasts():
    """What is lost is what was in the budget, and the step that overdraws it."""
    driver, batch = driver_of(), [request_of() for _ in range(4)]
    until_repeating(driver, batch)
    driver.gain(100.0)
    driver.accepts = lambda drafted: 0
    lost = -driver.policy.budget.balance
    while repeated(driver)[-1]:
        driver.step(batch, policy_seconds=10 * SLOW)
    assert driver.policy.budget.balance > -2.0 and lost == -TUNABLES.most_balance


def test_plain_steps_that_measure_come_between_repeated_plans():
    driver, batch = driver_of(), [request_of() for _ in range(4)]
    driver.run(batch, 5 * TUNABLES.plain_every, policy_seconds=SLOW)
    measured = [i for i, trace in enumerate(driver.policy.trace) if trace.reason.endswith("to measure it")]
    assert len(measured) >= 4
    assert max(b - a for a, b in pairwise(measured)) <= TUNABLES.plain_every + 2


def test_a_plan_with_lookups_does_not_stand():
    """Its drafts are used up: the next step has to look up others."""
    driver, who = SessionDriver(FLAT, suffix=always(sure=0.9)), request_of()
    taken = driver.run([who], 60, policy_seconds=SLOW)
    assert sum(map(any, taken)) > 40 and not any(repeated(driver))


def test_no_plan_stands_where_no_loss_is_allowed():
    driver = SessionDriver(FLAT, draft=always(sure=0.9), draft_seconds=0.02, allowed_loss=0.0)
    taken = driver.run([request_of(length=2)], 60, policy_seconds=SLOW)
    assert any(map(any, taken)) and not any(repeated(driver))


def test_a_request_about_to_end_gets_no_more_than_it_can_use():
    driver = driver_of()
    short, long = request_of(max_length=70), request_of()
    while short.finish_reason is None:
        left = short.max_useful_depth
        [outcome, _] = driver.step([short, long], policy_seconds=SLOW)
        assert outcome.verdict.num_drafted <= left
    assert any(repeated(driver))


# ---- plain decisions


def idling(seconds: float = 0.05) -> tuple[SessionDriver, list[Request]]:
    """Lookups take time and find nothing; the latest step was idle, and so would be the next."""
    driver, batch = SessionDriver(USUAL, suffix=nothing, lookup_seconds=seconds), [request_of() for _ in range(2)]
    driver.run(batch, 100)
    while driver.policy._step + 2 >= driver.policy._stands_until or not is_idle(driver):
        driver.step(batch)
    return driver, batch


def is_idle(driver: SessionDriver) -> bool:
    return driver.policy.trace[-1].reason == "idle"


def test_a_plain_decision_stands_until_something_is_due():
    driver, batch = idling()
    due = driver.policy._stands_until
    assert due == min(driver.policy._state(who).lookup.due for who in batch)
    num_asked = driver.proposers["suffix"].num_asked
    while driver.policy._step < due - 1:
        driver.step(batch)
        assert is_idle(driver) and driver.proposers["suffix"].num_asked == num_asked
    driver.step(batch)
    assert not is_idle(driver) and driver.proposers["suffix"].num_asked > num_asked


def test_a_prompt_beside_it_does_not_end_a_plain_decision():
    driver, batch = idling()
    driver.step(batch, num_prefill=8)
    assert is_idle(driver)


def test_another_batch_ends_a_plain_decision():
    driver, batch = idling()
    driver.step(batch[:1])
    assert not is_idle(driver)
    driver, batch = idling()
    driver.step([*batch, request_of()])
    assert not is_idle(driver)


def test_idle_steps_earn_though_they_take_more_time_than_that_and_decisions_are_charged():
    """A step of a small model on a fast machine is so short that even idling takes a larger share than is earned."""
    driver, batch = idling()
    policy, earned = driver.policy, TUNABLES.engine_share * 0.02
    driver.lose(3.0 + policy.budget.balance)
    while policy._stands_until - policy._step < 4 or not is_idle(driver):
        driver.step(batch)
    plain_step, before, lost = policy.plain_step_seconds, policy.budget.balance, driver.lost
    assert plain_step is not None
    driver.step(batch, policy_seconds=0.01)
    assert is_idle(driver) and policy.budget.balance == pytest.approx(before + earned)
    assert driver.lost == pytest.approx(lost + 0.01), "reported all the same"
    while is_idle(driver):
        before = policy.budget.balance
        driver.step(batch, deciding_seconds=0.01)
    assert policy.budget.balance < before + earned - 0.009 / plain_step, "the time of looking up is charged, too"


def test_in_debt_less_is_spent_on_attempts_than_is_earned():
    """Lookups find nothing."""
    driver, batch = idling()
    driver.lose(10.0 + driver.policy.budget.balance)
    for _ in range(4):
        before = driver.policy.budget.balance
        driver.run(batch, 150)
        assert driver.policy.budget.balance > before


def test_a_model_that_is_due_ends_a_plain_decision():
    driver = SessionDriver(USUAL, draft=nothing, draft_seconds=1.0)
    batch = [request_of()]
    driver.run(batch, 100)
    waits = []
    for _ in range(100):
        driver.step(batch)
        if not is_idle(driver):
            waits.append(driver.policy._models["draft"].due - driver.policy._step)
    assert waits and set(waits) == {TUNABLES.longest_wait}

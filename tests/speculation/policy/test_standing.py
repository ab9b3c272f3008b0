"""Where comparing plans takes a noticeable share of a step, a model's plan is repeated for a few steps."""

from __future__ import annotations

from outpace.core import Request
from outpace.speculation.policy.policy import _MAX_REPEATED
from tests.session_driver import FLAT, SessionDriver, always, nothing, request_of

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
    assert max(map(len, runs)) <= _MAX_REPEATED
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


def test_a_step_that_loses_ends_the_repeating():
    driver, batch = driver_of(), [request_of() for _ in range(4)]
    until_repeating(driver, batch)
    driver.accepts = lambda drafted: 0
    driver.step(batch, policy_seconds=SLOW)
    driver.step(batch, policy_seconds=SLOW)
    assert not repeated(driver)[-1]


def test_a_request_about_to_end_gets_no_more_than_it_can_use():
    driver = driver_of()
    short, long = request_of(max_length=70), request_of()
    while short.finish_reason is None:
        left = short.max_useful_depth
        [outcome, _] = driver.step([short, long], policy_seconds=SLOW)
        assert outcome.verdict.num_drafted <= left
    assert any(repeated(driver))

"""The trace explains every decision: the reason, what was expected, and what happened."""

from __future__ import annotations

import json

import pytest

from outpace.core import Request
from outpace.speculation.costs.curves import DraftCosts, StepCosts
from outpace.speculation.policy.tunables import TUNABLES
from tests.session_driver import FLAT, PROPORTIONAL, USUAL, SessionDriver, always, nothing, request_of


def test_a_record_says_why_what_was_expected_and_what_came():
    one, other = request_of(), request_of()
    driver = SessionDriver(FLAT, suffix=lambda request: ([request is one] * 4, 0.9), lookup_seconds=0.0)
    outcomes = driver.step([one, other])
    [step] = driver.policy.trace
    assert "of plain" in step.reason
    assert step.plain_seconds == pytest.approx(1.0) and step.seconds == pytest.approx(1.0)
    assert [row.request_id for row in step.rows] == [one.id, other.id]
    assert [row.method for row in step.rows] == ["suffix", "suffix"]
    for row, outcome in zip(step.rows, outcomes, strict=True):
        assert row.depth == outcome.choice.depth == row.num_drafted == 4
        assert row.expected_tokens == pytest.approx(outcome.choice.expected) and row.expected_tokens > 1
    assert [(row.num_accepted, row.num_emitted) for row in step.rows] == [(4, 5), (0, 1)]


def test_a_record_has_all_that_a_step_took():
    driver = SessionDriver(FLAT, suffix=always(), lookup_seconds=0.1)
    driver.step([request_of(), request_of()], policy_seconds=0.05)
    assert driver.policy.trace[-1].seconds == pytest.approx(1.0 + 2 * 0.1 + 0.05)


def test_the_expected_gain_is_named():
    driver = SessionDriver(FLAT, suffix=always(sure=0.9), lookup_seconds=0.0)
    driver.step([who := request_of()])
    [step] = driver.policy.trace
    [row] = step.rows
    assert row.request_id == who.id
    assert f"{row.expected_tokens:.2f}" in step.reason, "alone, at flat costs, tokens per step are the gain"


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (SessionDriver(FLAT, suffix=nothing), "nothing beats plain decoding"),
        (SessionDriver(PROPORTIONAL, suffix=always()), "nothing beats plain decoding"),
        (SessionDriver(PROPORTIONAL, draft=always()), "nothing beats plain decoding"),
        (SessionDriver(FLAT, suffix=always(), speculation="on"), "nothing to weigh"),
    ],
    ids=["nothing found", "too dear", "a model that is too dear", "on"],
)
def test_plain_decoding_has_its_reasons_too(driver, reason):
    driver.step([request_of(length=2)])
    assert driver.policy.trace[-1].reason == reason


def test_a_full_batch_has_its_reason_too():
    driver = SessionDriver(FLAT, suffix=always(), disable_by_batch_size=1)
    driver.step([request_of()])
    assert driver.policy.trace[-1].reason == "nothing to weigh"


def test_an_idle_step_and_one_that_measures_are_named():
    idle, measured = SessionDriver(USUAL, suffix=nothing, lookup_seconds=0.1), SessionDriver(USUAL, suffix=always())
    for driver, reason in ((idle, "idle"), (measured, "a plain step, to measure it")):
        driver.run([request_of()], 2 * TUNABLES.plain_every)
        steps = [step for step in driver.policy.trace if step.reason == reason]
        assert steps and all(row.depth == 0 for step in steps for row in step.rows)


def behind() -> tuple[SessionDriver, list[Request]]:
    """An untried model that must catch up on the texts first: eight plain steps for all of them."""
    costs = DraftCosts(StepCosts({1: 0.2, 256: 0.23}), StepCosts({1: 0.2, 200: 1.2, 1600: 8.2}))
    return SessionDriver(FLAT, models={"draft": (always(sure=0.9), costs)}), [request_of(length=200) for _ in range(8)]


def test_a_plan_that_no_budget_covers_is_named():
    driver, batch = behind()
    driver.lose(driver.policy.budget.balance + 5.0)
    driver.run(batch, 40)
    assert any(step.reason == "no budget covers the best plan" for step in driver.policy.trace)


def test_a_record_is_json():
    driver = SessionDriver(FLAT, suffix=always())
    driver.step([request_of()])
    record = json.loads(json.dumps(driver.policy.trace[-1].as_dict()))
    assert set(record) == {"step", "reason", "plain_seconds", "rows", "seconds"}
    assert set(record["rows"][0]) == {
        "request_id",
        "method",
        "depth",
        "expected_tokens",
        "num_drafted",
        "num_accepted",
        "num_emitted",
    }


def test_a_record_is_a_line_for_people():
    driver = SessionDriver(FLAT, suffix=always(length=4), lookup_seconds=0.0)
    driver.step([request_of(), request_of(mode="off")])
    line = driver.policy.trace[-1].as_line()
    assert line.startswith("1000.00 ms (plain 1000.00 ms); expected ")
    assert "suffix 4: 4 accepted, 5 emitted" in line and line.endswith("| plain, 1 emitted")


def test_only_as_many_are_kept_as_were_asked_for():
    driver, who = SessionDriver(FLAT, suffix=always()), request_of()
    driver.run([who], 1100)
    assert len(driver.policy.trace) == 1000


def test_nothing_is_kept_where_nobody_asked():
    driver, who = SessionDriver(FLAT, suffix=always()), request_of()
    driver.policy.keep_trace(0)
    driver.run([who], 5)
    assert not driver.policy.trace


def test_what_is_expected_is_what_comes_on_the_whole():
    """After many drafts that are right three times in four, the expected and the actual tokens agree."""
    who = request_of()
    driver = SessionDriver(FLAT, suffix=lambda request: ([(len(request.tokens) + i) % 4 > 0 for i in range(8)], 0.7))
    driver.run([who], 400)
    rows = [row for step in list(driver.policy.trace)[-200:] for row in step.rows if row.depth]
    expected, came = sum(row.expected_tokens for row in rows), sum(row.num_emitted for row in rows)
    assert expected == pytest.approx(came, rel=0.35)

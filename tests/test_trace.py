"""Every decision can be explained: why, what was expected, and what came."""

from __future__ import annotations

import json

import pytest

from tests.desk import FLAT, PROPORTIONAL, Desk, always, nothing, request_of


def test_a_record_says_why_what_was_expected_and_what_came():
    desk, one, other = Desk(FLAT, suffix=lambda request: ([request is one] * 4, 0.9)), request_of(), request_of()
    outcomes = desk.step([one, other])
    [step] = desk.policy.trace
    assert "of plain" in step.reason
    assert step.plain_seconds == pytest.approx(1.0) and step.seconds == pytest.approx(1.0)
    assert [row.request_id for row in step.rows] == [one.id, other.id]
    assert [row.method for row in step.rows] == ["suffix", "suffix"]
    for row, outcome in zip(step.rows, outcomes, strict=True):
        assert row.depth == outcome.choice.depth == row.num_drafted == 4
        assert row.expected_tokens == pytest.approx(outcome.choice.expected) and row.expected_tokens > 1
    assert [(row.num_accepted, row.num_said) for row in step.rows] == [(4, 5), (0, 1)]


def test_the_expected_gain_is_named():
    desk = Desk(FLAT, suffix=always(sure=0.9), guess_seconds=0.0)
    desk.step([who := request_of()])
    [step] = desk.policy.trace
    [row] = step.rows
    assert row.request_id == who.id
    assert f"{row.expected_tokens:.2f}" in step.reason, "alone, at flat costs, tokens per step are the gain"


@pytest.mark.parametrize(
    ("desk", "reason"),
    [
        (Desk(FLAT, suffix=nothing), "no guess"),
        (Desk(PROPORTIONAL, suffix=always()), "nothing beats plain decoding"),
        (Desk(FLAT, suffix=always(), speculation="on"), "nothing to weigh"),
        (Desk(FLAT, suffix=always(), disable_by_batch_size=1), "nothing to weigh"),
    ],
    ids=["no guess", "too dear", "on", "crowded"],
)
def test_plain_decoding_has_its_reasons_too(desk, reason):
    desk.step([request_of()])
    assert desk.policy.trace[-1].reason == reason


def test_a_debt_and_a_probe_are_named():
    desk, who = Desk(FLAT, draft=always(False), draft_seconds=0.02), request_of(length=2)
    desk.policy.ledger.write_off(100.0)
    desk.run([who], 200)
    reasons = {step.reason for step in desk.policy.trace}
    assert "the ledger is below the allowed loss" in reasons
    assert any("a probe of the draft model" in reason for reason in reasons)
    for step in desk.policy.trace:
        if "ledger" in step.reason:
            assert ("probe" in step.reason) == any(row.depth for row in step.rows)


def test_records_are_json():
    desk = Desk(FLAT, suffix=always())
    desk.step([request_of()])
    record = json.loads(json.dumps(desk.policy.trace[-1].as_dict()))
    assert set(record) == {"reason", "plain_seconds", "rows", "seconds"}
    assert set(record["rows"][0]) == {
        "request_id",
        "method",
        "depth",
        "expected_tokens",
        "num_drafted",
        "num_accepted",
        "num_said",
    }


def test_only_as_many_are_kept_as_were_asked_for():
    desk, who = Desk(FLAT, suffix=always()), request_of()
    desk.run([who], 1100)
    assert len(desk.policy.trace) == 1000


def test_where_nobody_asked_nothing_is_kept():
    desk, who = Desk(FLAT, suffix=always()), request_of()
    desk.policy.keep_trace(0)
    desk.run([who], 5)
    assert not desk.policy.trace


def test_what_is_expected_is_what_comes_on_the_whole():
    """After a while of drafts that are right three times in four, belief and outcome agree."""
    who = request_of()
    desk = Desk(FLAT, suffix=lambda request: ([(len(request.tokens) + i) % 4 > 0 for i in range(8)], 0.7))
    desk.run([who], 400)
    rows = [row for step in list(desk.policy.trace)[-200:] for row in step.rows if row.depth]
    expected, came = sum(row.expected_tokens for row in rows), sum(row.num_said for row in rows)
    assert expected == pytest.approx(came, rel=0.35)

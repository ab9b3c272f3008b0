"""Lookups take time: they run while they save more than they cost, otherwise at growing intervals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import ceil

import pytest

from outpace.core import Request
from outpace.speculation.policy.tunables import TUNABLES
from outpace.speculation.proposers.prediction import Follower
from outpace.speculation.proposers.prediction_text import Prediction
from tests.session_driver import FLAT, RIGHT, USUAL, WRONG, SessionDriver, always, nothing, request_of

PRICE = 0.05  # of a lookup, in plain steps
SHARE = 0.02  # of the time that may be lost, by default


def asked_in(driver: SessionDriver, requests: Sequence[Request], steps: int, name: str = "suffix") -> list[int]:
    """The number of requests in each call of a proposer."""
    found = []
    for _ in range(steps):
        before = driver.proposers[name].num_asked
        driver.step(requests)
        found.append(driver.proposers[name].num_asked - before)
    return found


# ---- when a request is looked up


def test_a_request_is_looked_up_at_once():
    driver = SessionDriver(USUAL, suffix=nothing, lookup_seconds=PRICE)
    batch = [request_of() for _ in range(3)]
    assert asked_in(driver, batch, 1) == [3]


def test_lookups_that_save_more_than_they_cost_are_made_in_every_step():
    driver, who = SessionDriver(USUAL, suffix=always(), lookup_seconds=PRICE), request_of()
    driver.run([who], 20)
    asked = asked_in(driver, [who], 60)
    measured = [step.reason.endswith("to measure it") for step in list(driver.policy.trace)[-60:]]
    assert all(bool(num) != is_measured for num, is_measured in zip(asked, measured, strict=True))


def test_lookups_that_cost_nothing_are_made_in_every_step():
    driver, who = SessionDriver(USUAL, suffix=nothing, lookup_seconds=0.0), request_of()
    assert asked_in(driver, [who], 100) == [1] * 100


@pytest.mark.parametrize("script", [nothing, always(False)], ids=["nothing found", "always wrong"])
def test_lookups_that_bring_nothing_are_made_less_and_less(script):
    driver, who = SessionDriver(USUAL, suffix=script, lookup_seconds=0.01), request_of()
    asked = asked_in(driver, [who], 800)
    assert 2 <= sum(asked[:40]) >= sum(asked[-40:])
    assert sum(asked[400:]) * 0.01 < SHARE * 400, "within the allowed loss"
    assert sum(asked[400:]) >= 1, "but it never stops looking"


@pytest.mark.parametrize("num_requests", [1, 8, 64])
def test_however_many_requests_run_lookups_in_vain_cost_a_small_share_of_the_time(num_requests):
    driver = SessionDriver(FLAT, suffix=nothing, lookup_seconds=PRICE)
    batch = [request_of() for _ in range(num_requests)]
    driver.run(batch, 3000)
    suffix = driver.proposers["suffix"]
    first_look = PRICE * num_requests
    allowed = TUNABLES.engine_grant + first_look + 1.0 + SHARE * 3000
    assert suffix.num_asked * PRICE <= allowed
    assert {request.id for asked in suffix.asked for request in asked} == {request.id for request in batch}


def test_lookups_dearer_than_what_is_left_of_the_budget_are_made_all_the_same_now_and_then():
    driver = SessionDriver(FLAT, suffix=nothing, lookup_seconds=0.2)
    batch = [request_of() for _ in range(16)]
    driver.run(batch, 200)
    assert sum(asked_in(driver, batch, 2000)) >= 2


def test_requests_that_wait_equally_long_are_looked_up_in_the_same_step():
    """Each step with lookups has a fixed cost: four requests share one step instead of using four."""
    driver = SessionDriver(FLAT, suffix=nothing, lookup_seconds=0.001)
    batch = [request_of() for _ in range(4)]
    driver.run(batch, 200)
    asked = asked_in(driver, batch, 400)
    assert set(asked) == {0, 4}


def test_a_lookup_that_is_dearer_than_what_it_saves_is_left():
    """One correct token saves less than a step."""
    cheap, dear = (SessionDriver(USUAL, suffix=always(sure=0.95, length=1), lookup_seconds=s) for s in (0.05, 0.95))
    asked = []
    for driver in (cheap, dear):
        who = request_of()
        driver.run([who], 60)
        asked.append(sum(asked_in(driver, [who], 100)))
    assert asked[0] > 80 and asked[1] < 30


def test_a_request_alone_that_soon_copies_is_noticed_although_those_before_it_did_not():
    driver = SessionDriver(USUAL, suffix=nothing, lookup_seconds=0.01)
    for _ in range(20):
        before = request_of()
        driver.run([before], 30)
        driver.policy.release(before)
    who = request_of()
    first = who.num_output
    driver.proposers["suffix"].script = lambda request: (
        always()(request) if request.num_output > first + 6 else ([], 0.0)
    )
    assert any(depth for [depth] in driver.run([who], 7 + 2 * TUNABLES.longest_wait))


def test_what_was_given_up_is_found_again_when_it_would_be_right():
    driver, who = SessionDriver(USUAL, suffix=nothing, lookup_seconds=0.01), request_of()
    driver.run([who], 200)
    driver.proposers["suffix"].script = always()
    taken = [depth for [depth] in driver.run([who], 8 * TUNABLES.longest_wait)]
    assert sum(depth > 0 for depth in taken[-TUNABLES.longest_wait :]) > TUNABLES.longest_wait / 2


def test_a_request_nothing_is_known_of_is_judged_by_what_lookups_saved_others():
    """A request without matches is looked up for longer beside four that copy than alone."""
    copying = [request_of() for _ in range(4)]
    ids = {request.id for request in copying}
    script = lambda request: always()(request) if request.id in ids else ([], 0.0)  # noqa: E731
    beside, alone = (SessionDriver(FLAT, suffix=script, lookup_seconds=PRICE) for _ in range(2))
    beside.run(copying, 40)
    one, other = request_of(), request_of()
    beside.run([*copying, one], 12)
    alone.run([other], 12)
    counts = [
        sum(who in asked for asked in driver.proposers["suffix"].asked)
        for driver, who in ((beside, one), (alone, other))
    ]
    assert counts[0] > counts[1]


def test_what_a_draft_model_had_accepted_is_not_the_lookups_merit():
    """The lookup is always wrong, the draft model always right."""
    driver = SessionDriver(
        FLAT, suffix=always(False, sure=0.5), draft=always(sure=0.9), lookup_seconds=PRICE, draft_seconds=0.01
    )
    who = request_of(length=2)
    driver.run([who], 40)
    assert sum(asked_in(driver, [who], 100)) < 40
    methods = [row.method for step in list(driver.policy.trace)[-100:] for row in step.rows]
    assert methods.count("draft") > 80


def test_lookups_are_few_where_the_budget_is_in_debt_by_them():
    driver, who = SessionDriver(USUAL, suffix=always(sure=0.95), lookup_seconds=PRICE), request_of()
    driver.run([who], 20)
    driver.proposers["suffix"].script = always(False, sure=0.95)
    driver.run([who], 20)
    driver.lose(10.0)
    assert sum(asked_in(driver, [who], 300)) * PRICE <= 1.0 + SHARE * 300


@pytest.mark.parametrize("right", [True, False])
def test_in_debt_lookups_are_used_where_they_should_gain_and_go_on_if_they_do(right):
    driver, who = SessionDriver(USUAL, suffix=always(right, sure=0.9)), request_of()
    driver.lose(driver.policy.budget.balance + 1.0)
    drafted = [depth > 0 for [depth] in driver.run([who], 100)]
    assert any(drafted[-20:]) == right
    assert sum(drafted) <= 8 or right


def test_lookups_that_are_right_again_are_found_when_the_debt_is_repaid():
    driver, who = SessionDriver(USUAL, suffix=always()), request_of()
    driver.run([who], 30)
    driver.proposers["suffix"].script = always(False)
    driver.run([who], 60)
    debt = -driver.policy.budget.balance
    assert debt > 1.0
    driver.proposers["suffix"].script = always()
    repaid = ceil(debt / (TUNABLES.engine_share * SHARE))
    assert any(depth for [depth] in driver.run([who], repaid + TUNABLES.longest_wait))


def test_what_a_lookup_takes_is_learned_from_every_one():
    driver, who = SessionDriver(USUAL, suffix=always(), lookup_seconds=0.01), request_of()
    driver.truth.drafts["suffix"].lookup_seconds = 0.03
    driver.run([who], 200)
    assert driver.costs.drafts["suffix"].lookup_seconds == pytest.approx(0.03, rel=0.05)


# ---- two proposers


def asked_of(driver: SessionDriver, who: Request, steps: int) -> dict[str, int]:
    """How often each proposer was asked."""
    before = {name: proposer.num_asked for name, proposer in driver.proposers.items()}
    driver.run([who], steps)
    return {name: proposer.num_asked - before[name] for name, proposer in driver.proposers.items()}


@pytest.mark.parametrize("lookup_seconds", [0.001, PRICE])
def test_a_request_is_looked_up_by_all_of_its_proposers_while_one_of_them_is_right(lookup_seconds):
    driver = SessionDriver(FLAT, suffix=always(False), ngram=always(True), lookup_seconds=lookup_seconds)
    who = request_of()
    driver.run([who], 60)
    for name, other in (("ngram", "suffix"), ("suffix", "ngram")):
        asked = asked_of(driver, who, 60)
        assert asked["suffix"] == asked["ngram"] > 55
        methods = [row.method for step in list(driver.policy.trace)[-60:] for row in step.rows if row.depth]
        assert methods.count(name) > 50
        driver.proposers[other].script, driver.proposers[name].script = always(True), always(False)
        driver.run([who], 60)  # and what has changed is noticed


def test_what_all_lookups_of_a_request_save_must_be_worth_all_of_their_cost():
    """One right token saves most of a step: one lookup for 0.4 is worth that, and two are not."""
    script, asked = always(sure=0.95, length=1), []
    for other in (None, nothing):
        driver, who = SessionDriver(USUAL, suffix=script, ngram=other, lookup_seconds=0.4), request_of()
        driver.run([who], 60)
        asked.append(asked_of(driver, who, 100)["suffix"])
    assert asked[0] > 80 and asked[1] < 30


def test_of_two_that_find_different_things_both_are_asked():
    """Each proposer is right for one of the two requests."""
    one, other = request_of(), request_of()
    driver = SessionDriver(
        FLAT,
        suffix=lambda request: always()(request) if request is one else ([], 0.0),
        ngram=lambda request: always()(request) if request is other else ([], 0.0),
        lookup_seconds=0.01,
    )
    taken = [depths for depths in driver.run([one, other], 150)[-50:] if any(depths)]
    assert len(taken) > 40 and taken.count([8, 8]) > 30


# ---- idle steps


def test_steps_in_which_nothing_is_due_are_plain_without_a_look():
    driver, who = SessionDriver(USUAL, suffix=nothing, lookup_seconds=PRICE), request_of()
    driver.run([who], 100)
    asked = asked_in(driver, [who], 100)
    idle = [step.reason == "idle" for step in list(driver.policy.trace)[-100:]]
    assert sum(idle) > 60
    assert not any(num for num, is_idle in zip(asked, idle, strict=True) if is_idle)


def test_a_step_is_idle_or_looks_somebody_up():
    driver = SessionDriver(FLAT, suffix=nothing, lookup_seconds=0.001)
    batch = [request_of() for _ in range(4)]
    driver.run(batch, 200)
    asked = asked_in(driver, batch, 100)
    idle = [step.reason == "idle" for step in list(driver.policy.trace)[-100:]]
    assert [not num for num in asked] == idle


def test_a_new_request_ends_idling():
    driver, who = SessionDriver(USUAL, suffix=nothing, lookup_seconds=0.001), request_of()
    driver.run([who], 100)
    assert driver.policy.budget.balance > 0.0
    while driver.policy.trace[-1].reason != "idle":
        driver.step([who])
    newcomer = request_of()
    driver.step([who, newcomer])
    assert driver.policy.trace[-1].reason != "idle"
    assert driver.proposers["suffix"].asked[-1] == [newcomer] or newcomer in driver.proposers["suffix"].asked[-1]


def test_there_is_no_idling_beside_a_request_that_insists_on_drafts():
    driver = SessionDriver(FLAT, suffix=nothing, lookup_seconds=PRICE)
    batch = [request_of(), request_of(mode="on")]
    for _ in range(100):
        decision = driver.decision(batch)
        assert not decision.is_idle and decision.choices[1].depth


def test_a_request_that_insists_on_drafts_ends_idling():
    driver, who = SessionDriver(USUAL, suffix=nothing, lookup_seconds=PRICE), request_of()
    driver.run([who], 100)
    driver.lose(1000.0)
    driver.run([who], 20)
    while driver.policy.trace[-1].reason != "idle":
        driver.step([who])
    assert driver.depths([who, request_of(mode="on")]) == [0, 8]


def test_idle_steps_say_what_plain_decoding_says():
    driver, who = SessionDriver(USUAL, suffix=nothing, lookup_seconds=PRICE), request_of(length=3, max_length=203)
    while who.finish_reason is None:
        driver.step([who])
    assert who.tokens[3:] == [RIGHT] * 200


def test_deciding_that_saves_nothing_is_limited_to_a_small_share_of_the_time():
    """Lookups are right just often enough to be used, and gain no more than their verification costs."""
    rng = random.Random(7)
    driver = SessionDriver(USUAL, suffix=lambda request: ([rng.random() < 0.3] * 1, 0.5), lookup_seconds=0.0)
    who = request_of()
    driver.run([who], 600, deciding_seconds=0.04)
    assert driver.lost <= TUNABLES.engine_grant + 2.0 + SHARE * 600
    assert sum(step.reason == "idle" for step in driver.policy.trace) > 200


def test_deciding_that_saves_more_than_it_costs_never_idles():
    driver, who = SessionDriver(USUAL, suffix=always(), lookup_seconds=0.0), request_of()
    driver.run([who], 200, policy_seconds=0.04)
    assert not any(step.reason == "idle" for step in driver.policy.trace)


# ---- predictions


def followed(request: Request) -> tuple[Sequence[bool], Sequence[float]]:
    """The script of a proposer that drafts from the request's prediction."""
    assert request.predicted is not None
    request.predicted.read(request)
    tokens, confidence = request.predicted.draft(16)
    return [token == RIGHT for token in tokens], confidence


def predicting(tokens: Sequence[int]) -> Request:
    request = request_of()
    request.predicted = Follower(Prediction(tokens, lambda token: b"word %d\n" % token))
    return request


def test_a_prediction_that_holds_is_drafted_to_full_depth_from_the_first_step():
    driver = SessionDriver(FLAT, suffix=followed)
    first = predicting([99, *[RIGHT] * 200])
    assert driver.depths([first]) == [8]
    driver.run([first], 30)
    assert first.spec.plain_seconds > 5 * first.spec.decode_seconds


@pytest.mark.parametrize("wrong", [[99, *[WRONG] * 500], [RIGHT, WRONG] * 300], ids=["unrelated", "misleading"])
def test_a_prediction_that_does_not_hold_costs_no_more_than_is_allowed(wrong):
    driver = SessionDriver(USUAL, suffix=followed, lookup_seconds=0.005)
    who, num_steps = predicting(wrong), 400
    num_drafted = sum(sum(depths) for depths in driver.run([who], num_steps))
    driver.settle(who)
    assert num_drafted < 0.1 * num_steps
    lost = who.spec.decode_seconds - who.spec.plain_seconds
    assert lost < TUNABLES.request_grant + SHARE * num_steps

"""The planner against a search of all possible plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outpace.core import Request
from outpace.speculation.costs.curves import DraftCosts, StepCosts
from outpace.speculation.policy.decision import Decision
from outpace.speculation.policy.planner import _LEAST_SURVIVAL, Plan, Stop
from tests.session_driver import FLAT, USUAL, SessionDriver, always, model_costs, request_of

MOST = 5  # tokens of a draft: few, so that all plans can be searched


@dataclass
class Batch:
    """A step before the decision, with the lookups of each request."""

    driver: SessionDriver
    requests: list[Request]
    decision: Decision
    survival: list[list[float]]  # by row: the chance of each token to be reached and accepted

    def plan(self) -> Plan:
        assert self.decision.situation is not None
        return self.driver.policy._planner.with_lookups(self.decision.situation, self.decision.found)

    def seconds(self, depths: Sequence[int]) -> float:
        return self.driver.truth.target.seconds(len(depths), len(depths) + sum(depths)) + self.host(depths)

    def host(self, depths: Sequence[int]) -> float:
        return self.driver.truth.token_seconds * self.expected(depths) + self.driver.truth.schedule_seconds

    def expected(self, depths: Sequence[int]) -> float:
        return len(depths) + sum(sum(row[:depth]) for row, depth in zip(self.survival, depths, strict=True))

    def speed(self, depths: Sequence[int]) -> float:
        return self.expected(depths) / self.seconds(depths)

    def choices(self) -> list[tuple[int, ...]]:
        """Every vector of depths that fits into a step."""
        most = self.driver.policy._config.max_step_tokens - len(self.survival)
        return [each for each in product(*(range(len(row) + 1) for row in self.survival)) if sum(each) <= most]

    def depths(self, plan: Plan) -> tuple[int, ...]:
        return tuple(plan.depths.get(row, 0) for row in range(len(self.survival)))


def batch_of(points: Mapping[int, float], confidence: Sequence[Sequence[float]], **options: Any) -> Batch:
    """Lookups with these confidences; acceptance turns them into chances."""
    requests = [request_of() for _ in confidence]
    by_id = {request.id: list(claimed) for request, claimed in zip(requests, confidence, strict=True)}
    driver = SessionDriver(
        points,
        suffix=lambda request: ([True] * len(by_id[request.id]), by_id[request.id]),
        lookup_seconds=0.0,
        max_sequences=4,
        **options,
    )
    for costs in (driver.costs, driver.truth):
        costs.token_seconds, costs.schedule_seconds = 0.01, 0.02
    acceptance = driver.policy.acceptances["suffix"]
    survival = [acceptance.survival(0, claimed, 0.0, 0.0) for claimed in confidence]
    return Batch(driver, requests, driver.decision(requests), survival)


CLAIMS = st.floats(0.0, 1.0)
CONFIDENCE = st.lists(st.lists(CLAIMS, min_size=1, max_size=MOST), min_size=1, max_size=4)


@st.composite
def stairs(draw: st.DrawFn) -> dict[int, float]:
    """Cost curves with jumps of any width and height, on any slope."""
    width, rise = draw(st.integers(1, 8)), draw(st.floats(0.0, 1.5))
    slope = draw(st.sampled_from([0.0, 0.01, 0.1, 0.5]))
    return {n: 1.0 + rise * ((n - 1) // width) + slope * (n - 1) for n in range(1, 4 * MOST + 6)}


@st.composite
def anything(draw: st.DrawFn) -> dict[int, float]:
    """Cost curves that rise and fall."""
    sizes = range(1, 4 * MOST + 6)
    return dict(zip(sizes, draw(st.lists(st.floats(0.3, 4.0), min_size=len(sizes), max_size=len(sizes))), strict=True))


TABLES = st.one_of(stairs(), anything())


@given(CONFIDENCE, stairs())
@example([[0.1, 0.45, 0.79]], {n: 1.0 + 1.33 * ((n - 1) // 2) for n in range(1, 26)})  # the second token is free
@settings(max_examples=150, deadline=None)
def test_no_choice_of_depths_is_faster(confidence, points):
    """Among tokens with a chance of at least 0.05: the planner ignores others."""
    batch = batch_of(points, confidence)
    likely = [sum(chance >= _LEAST_SURVIVAL for chance in chances) for chances in batch.survival]
    seen = [depths for depths in batch.choices() if all(map(int.__le__, depths, likely))]
    best = max(batch.speed(depths) for depths in seen)
    assert batch.speed(batch.depths(batch.plan())) >= (1 - 1e-9) * best


@given(CONFIDENCE, TABLES)
@settings(max_examples=100, deadline=None)
def test_no_choice_of_depths_among_likely_tokens_is_faster(confidence, points):
    """The same without such unlikely tokens, exactly and for any costs."""
    likely = [[0.9 + 0.1 * each for each in claimed][:3] for claimed in confidence]
    batch = batch_of(points, likely)
    best = max(batch.speed(depths) for depths in batch.choices())
    assert batch.speed(batch.depths(batch.plan())) >= (1 - 1e-9) * best


@given(CONFIDENCE, TABLES)
@settings(max_examples=60, deadline=None)
def test_a_plan_says_what_its_depths_come_to(confidence, points):
    batch = batch_of(points, confidence)
    check(batch, batch.plan())


def check(batch: Batch, plan: Plan) -> None:
    depths = batch.depths(plan)
    if any(depths):
        assert plan.speed == pytest.approx(batch.speed(depths))
        assert plan.seconds == pytest.approx(batch.seconds(depths))
    for row, depth in plan.depths.items():
        assert 0 < depth <= len(batch.survival[row])
        assert plan.gains[row] == pytest.approx(sum(batch.survival[row][:depth]))
        assert plan.lookups[row].tokens and plan.lookups[row].proposer == "suffix"


@given(CONFIDENCE, TABLES)
@settings(max_examples=60, deadline=None)
def test_tokens_are_taken_likeliest_first_and_never_without_those_before(confidence, points):
    """A plan takes a prefix of every row: the prefixes must hold the likeliest tokens of the batch."""
    batch = batch_of(points, confidence)
    depths = batch.depths(batch.plan())
    taken = [chance for row, depth in zip(batch.survival, depths, strict=True) for chance in row[:depth]]
    left = [chance for row, depth in zip(batch.survival, depths, strict=True) for chance in row[depth:]]
    assert not taken or not left or min(taken) >= max(left) - 1e-9


def test_equal_chances_keep_the_order_of_the_draft():
    batch = batch_of({1: 1.0, 4: 1.0, 5: 9.0, 16: 20.0}, [[0.999] * 3] * 2)
    assert sum(batch.plan().depths.values()) == 2


def test_free_tokens_are_all_taken_and_dear_ones_left():
    free, dear = {1: 1.0, 16: 1.0}, {1: 1.0, 16: 16.0}
    assert batch_of(free, [[0.6] * 4]).plan().depths == {0: 4}
    assert batch_of(dear, [[0.6] * 4]).plan().depths == {}


def test_a_step_up_is_not_the_end_of_the_stairs():
    """The second token costs nearly two steps, those up to the eighth nothing more: together they are worth it."""
    table = {1: 1.0, 2: 1.9, 8: 1.9, 9: 9.0, 16: 16.0}
    assert batch_of(table, [[0.95] * 8]).plan().depths == {0: 7}
    assert batch_of(table, [[0.3] * 8]).plan().depths == {}


def test_no_more_is_taken_than_there_is_room_for():
    flat = {1: 1.0, 16: 1.0}
    assert sum(batch_of(flat, [[0.99] * 4] * 2, max_step_tokens=4).plan().depths.values()) == 2
    assert batch_of(flat, [[0.99] * 4] * 4, max_step_tokens=4).plan().depths == {}


def test_nothing_found_is_no_plan():
    assert batch_of({1: 1.0, 16: 1.0}, [[], []]).decision.plan is None


def test_of_two_lookups_for_a_request_the_one_that_promises_more_is_taken():
    driver = SessionDriver(FLAT, suffix=always(sure=0.9, length=2), ngram=always(sure=0.9, length=6))
    decision = driver.decision([request_of()])
    assert decision.situation is not None
    plan = driver.policy._planner.with_lookups(decision.situation, decision.found)
    assert plan.lookups[0].proposer == "ngram"


# ---- models


def model_plans(
    driver: SessionDriver, requests: Sequence[Request], name: str = "draft", *, balance: float = 1000.0
) -> list[Plan]:
    decision = driver.decision(requests)
    assert decision.situation is not None
    return driver.policy._planner.with_model(decision.situation, name, Plan(), balance)


def test_plans_of_a_model_come_the_fastest_first():
    driver = SessionDriver(USUAL, draft=always(sure=0.9), draft_seconds=0.02)
    plans = model_plans(driver, [request_of(length=2) for _ in range(3)])
    speeds = [plan.speed for plan in plans]
    assert speeds and speeds == sorted(speeds, reverse=True)
    assert all(plan.model == "draft" and not plan.lookups for plan in plans)


def test_a_slots_price_is_what_the_last_tokens_cost():
    driver = SessionDriver({1: 1.0, 6: 1.5, 18: 5.1}, draft=always(sure=0.9), draft_seconds=0.02)
    requests = [request_of(length=2) for _ in range(2)]
    situation, planner, prices = driver.decision(requests).situation, driver.policy._planner, {}
    assert situation is not None
    for plan in model_plans(driver, requests):
        stops = planner.stops(situation, plan)
        assert stops is not None
        acceptance, at_least, to_go_on = stops
        assert acceptance is driver.policy.acceptances["draft"]
        assert (to_go_on - at_least) / plan.speed == pytest.approx(0.02 / 2, rel=0.01), (
            "a pass, by each of two requests"
        )
        prices[plan.depth] = at_least / plan.speed
    assert prices[1] == pytest.approx(0.1) and prices[2] == pytest.approx(0.1) and prices[3] == pytest.approx(0.3)


def test_every_depth_of_a_model_is_weighed():
    driver = SessionDriver(FLAT, draft=always(sure=0.9), draft_seconds=0.02)
    plans = model_plans(driver, [request_of(length=2) for _ in range(3)])
    assert {plan.depth for plan in plans} == {1, 2, 3, 4, 6, 8}


@pytest.mark.parametrize("covered", [1, 2, 3, 8])
def test_the_only_depth_that_budgets_cover_is_taken(covered, monkeypatch):
    driver, batch = (
        SessionDriver(FLAT, draft=always(sure=0.9), draft_seconds=0.02),
        [request_of(length=2) for _ in range(3)],
    )
    monkeypatch.setattr(driver.policy._accounts, "covers", lambda situation, plan, *_, is_proven: plan.depth == covered)
    decision = driver.decision(batch)
    assert decision.plan is not None and decision.plan.depth == covered


@pytest.mark.parametrize("one_pass", [False, True])
def test_a_models_plan_counts_its_passes_and_the_targets(one_pass):
    driver = SessionDriver(USUAL, models={"any": (always(sure=0.9), model_costs(0.1, one_pass=one_pass))})
    requests = [request_of(length=2) for _ in range(3)]
    for plan in model_plans(driver, requests, "any"):
        tokens, rows = sum(plan.depths.values()), len(plan.depths)
        drafting = driver.truth.drafts["any"].seconds(rows, plan.depth, 2.0)
        assert plan.seconds == pytest.approx(drafting + driver.truth.target.seconds(3, 3 + tokens), rel=1e-3)
        assert plan.catch_up_seconds == 0.0


def test_a_model_drafts_first_for_those_it_has_least_to_catch_up_with():
    """For all of them, or for those whose texts the budget can pay."""
    catch_up = StepCosts({1: 0.02, 2: 0.02, 502: 5.02})
    costs = DraftCosts(StepCosts({1: 0.02, 256: 0.03}), catch_up)
    driver = SessionDriver(FLAT, models={"draft": (always(sure=0.9), costs)})
    requests = [request_of(length=60), request_of(length=2), request_of(length=200), request_of(length=70)]
    for balance, paid in ((-1.0, {1}), (0.3, {1}), (0.8, {0, 1}), (1.6, {0, 1, 3}), (9.0, {0, 1, 2, 3})):
        groups = {frozenset(plan.depths) for plan in model_plans(driver, requests, balance=balance)}
        assert groups == {frozenset(paid), frozenset(range(4))}
        for plan in model_plans(driver, requests, balance=balance):
            assert plan.is_mixed == (len(plan.depths) < 4)
            caught_up = sum(len(requests[row].tokens) for row in plan.depths if row != 1)
            expected = costs.catch_up_seconds(caught_up, len(plan.depths)) if caught_up else 0.0
            assert plan.catch_up_seconds == pytest.approx(expected)


@pytest.mark.parametrize("max_depth", [1, 2, 3])
def test_a_request_that_allows_few_tokens_is_drafted_for_after_one_that_allowed_many(max_depth):
    driver = SessionDriver(FLAT, draft=always(sure=0.95), draft_seconds=0.001, depth=16)
    generous, modest = request_of(length=2), request_of(length=2, max_depth=max_depth)
    assert max(depth for [depth] in driver.run([generous], 60)) >= 8
    taken = [depth for [depth] in driver.run([modest], 60)]
    assert taken.count(max_depth) > 40


@pytest.mark.parametrize("room", [1, 2, 3, 9, 15, 16])
def test_plans_of_a_model_fit_into_the_step(room):
    """Eight requests, and a step that can verify few draft tokens."""
    driver = SessionDriver(USUAL, draft=always(sure=0.9), draft_seconds=0.02, max_step_tokens=8 + room)
    sizes = [sum(plan.depths.values()) for plan in model_plans(driver, [request_of(length=2) for _ in range(8)])]
    assert all(0 < size <= room for size in sizes)
    assert bool(sizes) == (room >= 8), "all have drafts or none: there is nothing to catch up on"


def mixed_plans(driver: SessionDriver, requests: Sequence[Request]) -> tuple[list[Plan], Plan]:
    """The plans of the model, and the plan of the lookups alone."""
    decision = driver.decision(requests)
    assert decision.situation is not None
    planner = driver.policy._planner
    base = planner.with_lookups(decision.situation, decision.found)
    return planner.with_model(decision.situation, "draft", base, 1000.0), base


def test_a_model_is_weighed_beside_better_lookups_and_for_all_requests_alike():
    one, other = request_of(length=2), request_of(length=2)
    driver = SessionDriver(
        FLAT,
        suffix=lambda request: ([True] * 16, 0.99) if request is one else ([], 0.0),
        draft=always(sure=0.9),
        draft_seconds=0.02,
    )
    plans, base = mixed_plans(driver, [one, other])
    assert list(base.lookups) == [0]
    beside, alike = ([plan for plan in plans if bool(plan.lookups) == is_beside] for is_beside in (True, False))
    assert all(plan.lookups == base.lookups and plan.is_mixed and not plan.is_repeatable for plan in beside)
    assert all(plan.depths == {0: plan.depth, 1: plan.depth} for plan in alike)
    assert all(not plan.is_mixed and plan.is_repeatable for plan in alike)
    assert {plan.depth for plan in beside} == {plan.depth for plan in alike} == {1, 2, 3, 4, 6, 8}
    speeds = [plan.speed for plan in plans]
    assert speeds == sorted(speeds, reverse=True)


# ---- when a draft stops


def stop(at_least: float, to_go_on: float) -> Stop:
    return Stop(SessionDriver(FLAT, draft=always()).policy.acceptances["draft"], at_least, to_go_on, 0)


def test_a_draft_goes_on_while_its_tokens_are_likely_enough():
    assert all(stop(0.0, 0.0)(0.01) for _ in range(8))
    goes_on = stop(0.3, 0.3)
    assert goes_on(0.99)
    answers = [goes_on(0.7) for _ in range(12)]
    assert answers[0] and not answers[-1]
    assert answers == sorted(answers, reverse=True), "once it has stopped it stays so"


def test_a_token_after_which_no_further_one_pays_is_the_last():
    goes_on = stop(0.1, 0.95)
    assert goes_on(0.5), "it is worth its slot"
    assert not goes_on(0.99), "another pass for the one after it is not"

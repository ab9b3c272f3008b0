"""The policy verifies a draft token if its chance of being accepted is worth its cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from outpace.config import MAX_DEPTH
from outpace.core import Request
from outpace.speculation.policy.state import Choice
from outpace.speculation.policy.tunables import TUNABLES
from tests.session_driver import FLAT, PROPORTIONAL, USUAL, SessionDriver, always, model_costs, nothing, request_of

NONE = Choice.plain()
TOKEN = 0.3  # cost of a further token in USUAL, in plain steps


def expected_of(driver: SessionDriver, who: Request, depth: int, sure: float, method: str = "suffix") -> float:
    """Expected tokens of a step with `depth` draft tokens of this confidence."""
    state, acceptance = driver.policy._state(who), driver.policy.acceptances[method]
    shift = acceptance.shift_of(state.shifts, method, state.settings.log_odds, driver.policy._step)
    return 1.0 + sum(acceptance.survival(state.settings.temperature, [sure] * depth, shift.mean, 0.0))


def is_measured(driver: SessionDriver) -> bool:
    return driver.policy.trace[-1].reason.endswith("to measure it")


# ---- one request


def test_nothing_is_drafted_where_a_second_token_costs_as_much_as_a_second_step():
    driver, who = SessionDriver(PROPORTIONAL, suffix=always(sure=0.99)), request_of()
    assert driver.depths([who]) == [0]
    assert driver.run([who], 200) == [[0]] * 200, "even a lookup that is always right gains nothing here"


def test_flat_costs_draft_to_the_limit():
    assert SessionDriver(FLAT, suffix=always()).depths([request_of()]) == [8]
    assert SessionDriver(FLAT, suffix=always(), depth=3).depths([request_of()]) == [3]
    assert SessionDriver(FLAT, suffix=always()).depths([request_of(max_depth=5)]) == [5]
    assert SessionDriver(FLAT, suffix=always(length=2)).depths([request_of()]) == [2], "no longer than what was found"


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("sure", [0.3, 0.6, 0.8, 0.95])
def test_the_depth_taken_makes_expected_tokens_per_second_largest(right, sure):
    driver, who = SessionDriver(USUAL, suffix=always(right, sure=sure), lookup_seconds=0.0), request_of()
    num_weighed = 0
    for _ in range(16):
        driver.gain(100.0)  # so that every plan is covered
        decision = driver.decision([who])
        if not decision.is_idle and decision.found:
            num_weighed += 1
            [choice] = decision.choices
            speeds = [expected_of(driver, who, depth, sure) / (1 + TOKEN * depth) for depth in range(9)]
            best = max(speeds)
            # A gain within the measurement error is ignored.
            assert speeds[choice.depth] >= 0.99 * best or (choice.depth == 0 and best < 1.03)
            if choice.depth:
                assert choice.expected == pytest.approx(expected_of(driver, who, choice.depth, sure))
        driver.step([who])
    assert num_weighed >= 3


def test_a_lookup_that_nothing_is_known_of_is_taken_only_as_deep_as_a_budget_covers():
    """Even a confident lookup: copying may have ended or not started."""
    taken = []
    for sure in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
        tight, rich = (SessionDriver(USUAL, suffix=always(sure=sure)) for _ in range(2))
        tight.lose(tight.policy.budget.balance + 1.0)
        rich.gain(100.0)
        taken.append((tight.depths([request_of()])[0], rich.depths([request_of()])[0]))
    assert all(less <= more for less, more in taken)
    assert any(less < more for less, more in taken)
    free = SessionDriver(FLAT, suffix=always(sure=0.8), lookup_seconds=0.0)
    free.lose(free.policy.budget.balance)
    assert free.depths([request_of()]) == [8], "what costs nothing needs no budget"


def test_lookups_that_turn_wrong_are_soon_left():
    driver, who = SessionDriver(USUAL, suffix=always(True)), request_of()
    assert 8 in driver.run([who], 30)[-1]
    driver.proposers["suffix"].script = always(False)
    lost = driver.lost
    taken = [depth for [depth] in driver.run([who], 60)]
    assert driver.lost - lost < 3 * TUNABLES.most_balance and sum(taken[-20:]) <= 4, "soon left, and hardly tried again"


def test_a_lookup_that_would_have_been_right_brings_drafting_back():
    """Lookups are compared with the emitted tokens even if they were not verified: that is free."""
    driver, who = SessionDriver(USUAL, suffix=always(False)), request_of()
    driver.run([who], 60)
    assert driver.depths([who]) == [0]
    driver.proposers["suffix"].script = always(True)
    taken = [depth for [depth] in driver.run([who], 300)]
    assert max(taken[-3:]) == 8


def test_a_step_without_a_draft_to_take_is_plain():
    driver, who = SessionDriver(FLAT, suffix=nothing), request_of()
    assert driver.run([who], 30) == [[0]] * 30
    assert driver.policy.estimated_speedup == pytest.approx(1.0, rel=0.001)


def test_tokens_after_the_first_refusal_are_no_evidence():
    """Of eight tokens three are right: three hits and one miss; the four after it were not verified."""
    long = SessionDriver(FLAT, suffix=lambda _: ([True] * 3 + [False] * 5, 0.7))
    short = SessionDriver(FLAT, suffix=lambda _: ([True] * 3 + [False], 0.7))
    whole, cut = request_of(), request_of()
    long.run([whole], 20)
    short.run([cut], 20)
    assert expected_of(long, whole, 8, 0.7) == pytest.approx(expected_of(short, cut, 8, 0.7))


def test_a_released_request_is_forgotten():
    driver, who = SessionDriver(USUAL, suffix=always(False)), request_of()
    driver.run([who], 40)
    before = expected_of(driver, who, 4, 0.9)
    driver.policy.release(who)
    driver.policy.release(who)
    assert driver.policy._states == {}
    assert expected_of(driver, who, 4, 0.9) > before, "what is left is what is general"


def test_a_request_that_ends_is_forgotten():
    driver = SessionDriver(FLAT, suffix=always())
    for _ in range(50):
        who = request_of(max_length=12)
        while who.finish_reason is None:
            driver.step([who])
    assert driver.policy._states == {}


def test_nothing_is_weighed_before_costs_are_known():
    driver, who = SessionDriver(FLAT, suffix=always()), request_of()
    driver.policy.use_costs(None)
    assert driver.decide([who]) == [NONE]
    driver.step([who])
    assert driver.proposers["suffix"].num_asked == 0
    assert driver.decide([request_of(mode="on", method="suffix")])[0].depth == 8


# ---- settings of a request


def test_on_drafts_to_the_depth_asked_for_whatever_it_costs():
    driver, who = SessionDriver(PROPORTIONAL, suffix=always(False), speculation="on", depth=6), request_of()
    assert driver.run([who], 50) == [[6]] * 50
    assert driver.proposers["suffix"].num_asked == 50, "each draft is asked for once: there is nothing to weigh"


@pytest.mark.parametrize(
    ("asked", "method", "depth"),
    [
        ({"mode": "off"}, "none", 0),
        ({"mode": "on"}, "suffix", 8),
        ({"mode": "on", "max_depth": 2}, "suffix", 2),
        ({"mode": "on", "method": "ngram"}, "ngram", 8),
        ({"mode": "on", "max_depth": MAX_DEPTH}, "suffix", MAX_DEPTH),
        ({"method": "none"}, "none", 0),
        ({"max_depth": 0}, "none", 0),
    ],
    ids=repr,
)
def test_a_requests_own_wishes_override_the_engines(asked, method, depth):
    driver = SessionDriver(PROPORTIONAL, suffix=always(), ngram=always())
    [choice] = driver.decide([request_of(**asked)])
    assert (choice.method, choice.depth) == (method, depth)
    assert (choice.ask is not None and choice.ask.depth == depth) if depth else choice.ask is None


def test_a_request_may_ask_for_one_method_in_auto():
    driver = SessionDriver(FLAT, suffix=always(sure=0.99), ngram=always(sure=0.3), draft=always(sure=0.99))
    assert driver.decide([request_of(method="ngram")])[0].method == "ngram"
    assert driver.decide([request_of(method="draft")])[0].method == "draft"
    assert driver.proposers["suffix"].num_asked == 0 and driver.proposers["ngram"].num_asked == 1


def test_a_request_may_turn_auto_on_where_the_engine_always_drafts_or_never_does():
    assert SessionDriver(PROPORTIONAL, suffix=always(), speculation="on").depths([request_of(mode="auto")]) == [0]
    assert SessionDriver(FLAT, suffix=always(), speculation="off", depth=None).depths([request_of(mode="auto")])[0] > 0
    assert SessionDriver(FLAT, suffix=always(), speculation="off", depth=None).depths([request_of(mode="on")])[0] > 0
    assert SessionDriver(FLAT, suffix=always(), speculation="off", depth=None).depths([request_of()]) == [0]


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_a_backend_that_cannot_rewind_is_never_asked_to(mode):
    driver, who = SessionDriver(FLAT, suffix=always(), can_speculate=False, speculation=mode), request_of()
    assert driver.decide([who, request_of(mode="on")]) == [NONE, NONE]
    assert driver.proposers["suffix"].num_asked == 0


@pytest.mark.parametrize("mode", ["on", "auto"])
@pytest.mark.parametrize(("room", "depth"), [(1, 0), (2, 1), (4, 3), (100, 8)])
@pytest.mark.parametrize("method", ["suffix", "draft"])
def test_no_more_is_drafted_than_the_request_may_still_say(mode, room, depth, method):
    """A step emits depth + 1 tokens."""
    driver = SessionDriver(FLAT, speculation=mode, method=method, draft_seconds=1e-6, suffix=always(), draft=always())
    [taken] = driver.depths([request_of(max_length=3 + room)])
    assert taken == depth or (method == "draft" and mode == "auto" and depth / 2 < taken <= depth)


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_nothing_is_drafted_from_a_batch_size_on(mode):
    driver = SessionDriver(FLAT, suffix=always(), speculation=mode, disable_by_batch_size=3)
    batch = [request_of() for _ in range(3)]
    assert driver.depths(batch[:2]) == [8, 8]
    num_asked = driver.proposers["suffix"].num_asked
    assert driver.depths(batch) == [0, 0, 0], "one of them is new"
    assert driver.run(batch, 3) == [[0, 0, 0]] * 3
    assert driver.proposers["suffix"].num_asked == num_asked
    assert driver.depths(batch[1:]) == [8, 8]


def test_a_workload_is_where_expectations_start_and_nothing_more():
    first: dict[str, float] = {}
    later: dict[str, float] = {}
    for workload in ("json", "code", "chat", "narrative"):
        driver, who = SessionDriver(USUAL, suffix=always(sure=0.6), lookup_seconds=0.0), request_of(workload=workload)
        first[workload] = expected_of(driver, who, 4, 0.6)
        driver.proposers["suffix"].script = always(False, sure=0.6)
        driver.run([who], 100)
        later[workload] = expected_of(driver, who, 4, 0.6)
    assert first["json"] > first["code"] > first["chat"] > first["narrative"]
    assert max(later.values()) - min(later.values()) < 0.3 * (first["json"] - first["narrative"]), "evidence took over"


def test_a_workload_changes_no_rule_of_acceptance():
    assert request_of(workload="chat").params.speculation.acceptance == "exact"
    assert not request_of(workload="chat").params.speculation.is_lossy


# ---- a batch


def test_in_a_mixed_batch_only_the_request_that_accepts_gets_slots():
    good, bad = request_of(), request_of()
    driver = SessionDriver({1: 1.0, 6: 1.0, 256: 251.0}, suffix=lambda request: ([request is good] * 16, 0.6))
    taken = driver.run([good, bad], 60)[20:]
    assert sum(of_good > 0 for of_good, _ in taken) > 30
    assert sum(of_bad for _, of_bad in taken) < 0.1 * sum(of_good for of_good, _ in taken)
    taken = driver.run([bad, good], 40)
    assert sum(of_good > 0 for _, of_good in taken) > 30
    assert sum(of_bad for of_bad, _ in taken) < 0.1 * sum(of_good for _, of_good in taken)


def test_requests_that_accept_alike_share_the_slots():
    driver, batch = SessionDriver(USUAL, suffix=always(sure=0.9)), [request_of() for _ in range(3)]
    taken = [depths for depths in driver.run(batch, 40)[20:] if any(depths)]
    assert len(taken) > 10
    assert all(min(depths) > 0 and max(depths) - min(depths) <= 1 for depths in taken)


def test_a_full_batch_drafts_less_than_a_lone_request():
    """Costs are flat up to eight tokens, then steep: eight requests without drafts fill the flat part."""
    driver = SessionDriver({1: 1.0, 8: 1.0, 16: 3.0, 256: 63.0}, suffix=always(sure=0.6))
    batch = [request_of() for _ in range(8)]
    assert driver.depths(batch[:1])[0] > 0
    assert driver.depths(batch) == [0] * 8


def test_stairs_are_filled_to_the_edge():
    """Up to eight tokens cost the same, in any row."""
    stairs = {n: 1.0 + 3.0 * ((n - 1) // 8) for n in range(1, 65)}
    driver = SessionDriver(stairs, suffix=always(sure=0.8))
    for rows in (1, 2, 4, 7):
        batch = [request_of() for _ in range(rows)]
        assert sum(driver.depths(batch)) == min(8 - rows, 8 * rows)


def test_what_others_insist_on_leaves_less_room_for_those_who_are_weighed():
    driver = SessionDriver({1: 1.0, 9: 1.0, 16: 8.0, 256: 248.0}, suffix=always())
    insisting, weighed = request_of(mode="on", max_depth=7), request_of()
    assert driver.depths([weighed]) == [8]
    assert driver.depths([insisting, weighed]) == [7, 0]


def test_what_others_insist_on_is_expected_to_bring_tokens_too():
    driver = SessionDriver(FLAT, suffix=always())
    [fixed, weighed] = driver.decide([request_of(mode="on", max_depth=7), request_of()])
    assert fixed.expected > 1.5 and weighed.expected > 1.5


def test_plain_requests_in_the_batch_count_as_rows():
    driver = SessionDriver({1: 1.0, 8: 1.0, 16: 3.0, 256: 63.0}, suffix=always(sure=0.6))
    plain = [request_of(mode="off") for _ in range(7)]
    assert driver.depths([*plain, request_of()]) == [0] * 8


def test_a_prompt_in_the_step_takes_room():
    points = {1: 1.0, 8: 1.0, 16: 16.0, 256: 496.0}
    for num_prefill, depth in ((0, 7), (4, 3), (7, 0)):
        driver = SessionDriver(points, suffix=always(sure=0.9))
        assert driver.depths([request_of()], num_prefill=num_prefill) == [depth]


def test_no_step_is_larger_than_the_engine_allows():
    driver = SessionDriver(FLAT, suffix=always(), max_step_tokens=10)
    assert sum(driver.depths([request_of() for _ in range(4)])) == 6


def test_no_requests_no_choices():
    driver = SessionDriver(USUAL, suffix=always())
    assert driver.decide([]) == []
    assert driver.policy.decide([], lambda asks: {}).choices == []


# ---- fairness


@pytest.mark.parametrize("token", [0.08, 0.3])
def test_a_request_that_gains_nothing_is_not_slowed_beyond_its_grant_and_the_allowed_loss(token):
    """Each draft token of one request makes the step longer for the other, which never has a draft."""
    points = {1: 1.0, 2: 1.0, 256: 1.0 + 254 * token}
    good, bad = request_of(), request_of()
    driver = SessionDriver(points, suffix=lambda request: ([True] * 16, 0.95) if request is good else ([], 0.0))
    alone = SessionDriver(points, suffix=always(sure=0.95))
    assert max(depth for [depth] in alone.run([request_of()], 20)) == 8
    driver.run([good, bad], 800)
    lost = bad.spec.decode_seconds - bad.spec.plain_seconds
    assert lost < TUNABLES.request_grant + 1.0 + 0.02 * bad.spec.plain_seconds


def test_what_costs_the_others_nothing_is_given():
    good, bad = request_of(), request_of()
    driver = SessionDriver(
        FLAT, suffix=lambda request: ([True] * 16, 0.95) if request is good else ([], 0.0), lookup_seconds=0.0
    )
    taken = driver.run([good, bad], 50)
    assert [8, 0] in taken[:3] and taken.count([8, 0]) > 40
    assert bad.spec.decode_seconds == pytest.approx(bad.spec.plain_seconds)


def test_a_draft_that_would_slow_others_down_is_made_shallower():
    """For half of the batch drafts are right, for the others only their first token. Deep drafts would maximise
    throughput but slow down the others."""
    good, poor = ([request_of(length=2) for _ in range(4)] for _ in range(2))
    rates = {request.id for request in good}

    def script(request: Request) -> tuple[list[bool], float]:
        return ([True] * 16 if request.id in rates else [True] + [False] * 15), 0.9

    driver, batch = SessionDriver(FLAT, draft=script, draft_seconds=0.2), good + poor
    depths = driver.run(batch, 200)
    assert sum(any(each) for each in depths[20:]) >= 60
    for request in poor:
        lost = request.spec.decode_seconds - request.spec.plain_seconds
        assert lost <= TUNABLES.request_grant + 1.0 + 0.05 * request.spec.plain_seconds


def test_a_budget_in_debt_means_that_nothing_is_risked_until_that_is_made_good():
    driver, who = SessionDriver(USUAL, suffix=always(False, sure=0.95)), request_of()
    driver.lose(10.0)
    assert sum(depth for [depth] in driver.run([who], 100)) <= 16, (
        "lookups go on as attempts, at half of what is earned"
    )
    driver.proposers["suffix"].script = always(sure=0.95)
    driver.gain(20.0)
    assert sum(depth == 8 for [depth] in driver.run([who], 300)) > 100


@pytest.mark.parametrize("debt", [0.5, 5.0])
def test_in_debt_a_draft_that_should_gain_is_tried_and_goes_on_if_it_does(debt):
    driver, who = SessionDriver(USUAL, suffix=always(sure=0.95)), request_of()
    driver.run([who], 20)
    driver.lose(driver.policy.budget.balance + debt)
    assert sum(depth > 0 for [depth] in driver.run([who], 40)) > 35
    assert driver.policy.budget.balance > 0.0


def test_in_debt_by_drafts_that_were_wrong_there_are_few_more_of_them():
    driver, who = SessionDriver(USUAL, draft=always(sure=0.9), draft_seconds=0.01), request_of(length=2)
    driver.run([who], 40)
    driver.proposers["draft"].script = always(False, sure=0.9)
    driver.run([who], 30)
    driver.lose(driver.policy.budget.balance + 1.0)
    assert sum(depth > 0 for [depth] in driver.run([who], 100)) <= 6


def test_a_draft_model_that_does_not_pay_is_left_alone_and_found_again_when_it_does():
    driver, who = SessionDriver(USUAL, draft=always(False, sure=0.8), draft_seconds=0.1), request_of(length=2)
    taken = [depth for [depth] in driver.run([who], 400)]
    assert sum(depth > 0 for depth in taken[200:]) < 20
    driver.proposers["draft"].script = always(True, sure=0.8)
    taken = [depth for [depth] in driver.run([who], 3000)]
    assert sum(depth > 0 for depth in taken[-100:]) > 80


@pytest.mark.parametrize(
    "options",
    [
        {"suffix": always(False, sure=0.99)},
        {"suffix": always(False, sure=0.5), "ngram": always(False, sure=0.99)},
        {"draft": always(False, sure=0.99), "draft_seconds": 0.2},
        {"suffix": always(False, sure=0.9), "draft": always(False, sure=0.9), "draft_seconds": 0.1},
    ],
    ids=["lookup", "lookups", "model", "both"],
)
@pytest.mark.parametrize("points", [USUAL, PROPORTIONAL], ids=["usual", "proportional"])
@pytest.mark.parametrize("num_rows", [1, 6])
def test_drafts_that_are_always_wrong_lose_no_more_than_grant_and_allowed_loss(options, points, num_rows):
    driver, batch = SessionDriver(points, **options), [request_of() for _ in range(num_rows)]
    for _ in range(3):
        driver.run(batch, 300)
        check_loss(driver)


def check_loss(driver: SessionDriver, allowed_loss: float = 0.02) -> None:
    """The engine's grant, and as much again for a last step that overdraws it."""
    plain_step = driver.policy.plain_step_seconds
    assert plain_step is not None
    allowed = TUNABLES.engine_grant + TUNABLES.request_grant + allowed_loss * driver.policy.plain_seconds / plain_step
    assert driver.lost <= plain_step * allowed


@pytest.mark.parametrize("period", [1, 3, 10, 40])
@pytest.mark.parametrize("has_model", [False, True])
def test_an_adversary_cannot_make_it_lose_more_than_the_budget(period, has_model):
    """Drafts are right until they are used, and wrong from then on, repeatedly."""
    turns = {"step": 0}

    def script(request: Request) -> tuple[Sequence[bool], float]:
        turns["step"] += 1
        return [(turns["step"] // period) % 2 == 0] * 16, 0.97

    driver = (
        SessionDriver(USUAL, draft=script, draft_seconds=0.05) if has_model else SessionDriver(USUAL, suffix=script)
    )
    batch = [request_of(length=2) for _ in range(2)]
    for _ in range(5):
        driver.run(batch, 200)
        check_loss(driver)


@pytest.mark.parametrize("has_model", [False, True])
def test_an_adversary_that_refuses_whatever_is_drafted_gains_nothing_by_it(has_model):
    """Unused lookups turn out right; used ones are rejected."""
    script = always(sure=0.97)
    driver = (
        SessionDriver(USUAL, suffix=script, draft=script, draft_seconds=0.05)
        if has_model
        else SessionDriver(USUAL, suffix=script)
    )
    driver.accepts = lambda drafted: 0
    batch = [request_of(length=2) for _ in range(2)]
    for _ in range(5):
        driver.run(batch, 300)
        check_loss(driver)


def test_little_is_lost_where_no_loss_is_allowed():
    """A plan that should gain is tried at doubling intervals and then dropped."""
    driver, who = (
        SessionDriver(USUAL, suffix=always(False, sure=0.95), lookup_seconds=0.0, allowed_loss=0.0),
        request_of(),
    )
    driver.run([who], 1000)
    lost = driver.lost
    assert lost <= 1.5 * (TUNABLES.engine_grant + TUNABLES.request_grant), "the first few trials, with no grant"
    assert sum(depth > 0 for [depth] in driver.run([who], 100)) <= 1
    driver.run([who], 1000)
    assert driver.lost <= lost + 0.5, "and then it is not used again"


def test_a_plain_step_comes_now_and_then_so_that_its_cost_is_known():
    driver, who = SessionDriver(FLAT, suffix=always()), request_of()
    taken = [depth for [depth] in driver.run([who], 1000)]
    plain = [i for i, depth in enumerate(taken) if not depth]
    assert 2 <= len(plain) <= 50
    assert any("to measure it" in step.reason for step in driver.policy.trace)


def test_a_step_that_only_measures_is_followed_by_drafts():
    driver, who = SessionDriver(USUAL, draft=always(sure=0.9), draft_seconds=0.01), request_of(length=2)
    depths = [depth for [depth] in driver.run([who], 4 * TUNABLES.plain_every)]
    measured = [i for i, trace in enumerate(driver.policy.trace) if trace.reason.endswith("to measure it")]
    assert len(measured) >= 2
    assert all(depths[i] == 0 and depths[i + 1] > 0 for i in measured if i + 1 < len(depths))


def test_beside_a_request_that_always_drafts_the_others_go_on_being_weighed():
    """A batch with such a request has no plain steps: waiting for one must end."""
    driver, insisting, who = SessionDriver(FLAT, suffix=always()), request_of(mode="on", max_depth=2), request_of()
    taken = [depth for _, depth in driver.run([insisting, who], 500)]
    assert sum(depth > 0 for depth in taken[-100:]) > 90


def test_a_request_that_insists_on_drafts_is_in_nobodys_budget():
    driver, insisting, who = SessionDriver(PROPORTIONAL, suffix=always(False)), request_of(mode="on"), request_of()
    before = driver.policy.budget.balance
    driver.run([insisting], 20)
    assert driver.policy.estimated_speedup is None and driver.policy.budget.balance == before
    driver.run([insisting, who], 1)
    before = driver.policy.budget.balance
    driver.run([insisting, who], 20)
    assert driver.policy.estimated_speedup is None and driver.policy.budget.balance == before
    assert insisting.spec.decode_seconds > 5 * insisting.spec.plain_seconds, "and yet it is told what it took"


def test_plain_steps_lose_only_the_policys_time():
    driver, who = SessionDriver(PROPORTIONAL, suffix=nothing, lookup_seconds=0.0), request_of()
    driver.run([who], 10, policy_seconds=0.01)
    driver.policy.release(who)
    assert driver.policy.spent_seconds == pytest.approx(10.1) and driver.policy.plain_seconds == pytest.approx(10.0)
    assert who.spec.plain_seconds == pytest.approx(10.0) and who.spec.decode_seconds == pytest.approx(10.1)


def test_the_policys_own_time_counts_against_a_draft():
    """A draft of one token gains a fifth of a step, and the policy takes as long."""
    quick, slow = (SessionDriver({1: 1.0, 2: 1.6, 256: 200.0}, suffix=always(sure=0.9, length=1)) for _ in range(2))
    taken = [sum(depth > 0 for [depth] in quick.run([request_of()], 200))]
    taken.append(sum(depth > 0 for [depth] in slow.run([request_of()], 200, policy_seconds=0.5)))
    assert taken[0] > 150 and taken[1] < 50


def test_a_step_with_drafts_is_measured_by_plain_steps():
    driver, who = SessionDriver(USUAL, suffix=always(), lookup_seconds=0.0), request_of()
    [outcome] = driver.step([who])
    depth = outcome.verdict.num_drafted
    assert depth > 0
    assert driver.policy.estimated_speedup == pytest.approx((depth + 1) / (1 + TOKEN * depth))


# ---- a draft model


def test_what_a_draft_model_costs_counts_against_it():
    cheap, dear = (SessionDriver(FLAT, draft=always(sure=0.9), draft_seconds=s) for s in (0.001, 1.0))
    assert cheap.depths([request_of(length=2)])[0] >= 4
    assert dear.depths([request_of(length=2)]) == [0], "a draft token that costs a whole target step is never worth it"


def test_a_draft_that_was_held_up_is_not_charged():
    """Another program had the processor for the time of 100 plain steps."""
    driver, who = SessionDriver(FLAT, draft=always(sure=0.9), draft_seconds=0.05), request_of()
    driver.run([who], 30)
    model, balance = driver.model(), driver.policy.budget.balance
    usual, model.costs = model.costs, model_costs(50.0)
    while not sum(depth for [depth] in driver.run([who], 1)):
        pass
    model.costs = usual
    assert driver.policy.budget.balance > balance - 1.0
    assert sum(depth > 0 for [depth] in driver.run([who], 30)) > 20


def test_a_draft_model_that_is_dearer_than_believed_is_found_out():
    """Each time, what is charged is limited, and the cost that the next plan assumes is larger."""
    driver, who = SessionDriver(FLAT, draft=always(sure=0.9), draft_seconds=0.05), request_of()
    driver.model().costs = model_costs(5.0)
    taken = [depth > 0 for [depth] in driver.run([who], 300)]
    assert sum(taken) < 30 and not any(taken[200:])


def test_a_draft_goes_on_by_its_confidence_and_a_doubtful_one_stops():
    driver, who = SessionDriver(USUAL, draft=always(sure=0.9), draft_seconds=0.01), request_of(length=2)
    driver.run([who], 30)
    while is_measured(driver):
        driver.run([who], 1)
    [choice] = driver.decide([who])
    assert choice.ask is not None and choice.ask.goes_on is not None
    assert choice.ask.goes_on(0.99)
    assert not choice.ask.goes_on(0.01)
    assert not choice.ask.goes_on(0.99), "what comes after a token that was left out is left out too"


def test_a_draft_that_stopped_for_want_of_confidence_is_learned_from():
    """Drafts that stop at once have no token to reject, and yet the policy learns that they are short."""
    driver, who = SessionDriver(USUAL, draft=always(sure=0.02), draft_seconds=0.05), request_of(length=2)
    driver.run([who], 300)
    num_asked = driver.proposers["draft"].num_asked
    for _ in range(5):
        assert sum(depth for [depth] in driver.run([who], 20)) <= 4
    assert driver.proposers["draft"].num_asked - num_asked <= 15, "and the model is seldom asked in vain"


def test_a_model_is_not_tried_where_its_best_draft_would_gain_nothing():
    driver = SessionDriver(PROPORTIONAL, draft=always(sure=0.9), draft_seconds=0.05)
    batch = [request_of(length=2) for _ in range(4)]
    assert sum(map(sum, driver.run(batch, 100))) == 0


def test_a_model_is_tried_for_several_requests_at_once():
    driver, batch = (
        SessionDriver(FLAT, draft=always(sure=0.9), draft_seconds=0.05),
        [request_of(length=2) for _ in range(8)],
    )
    assert sum(depth > 0 for depth in driver.run(batch, 1)[0]) >= 4
    assert min(driver.run(batch, 3)[-1]) > 0, "and where all were right, everybody is drafted for"


# ---- several proposers


def test_the_lookup_that_promises_more_is_taken():
    driver = SessionDriver(FLAT, suffix=always(sure=0.5), ngram=always(sure=0.95))
    assert driver.decide([request_of()])[0].method == "ngram"
    driver = SessionDriver(FLAT, suffix=always(sure=0.95), ngram=always(sure=0.5))
    assert driver.decide([request_of()])[0].method == "suffix"


def test_a_longer_lookup_may_promise_more_than_a_surer_one():
    driver = SessionDriver(FLAT, suffix=always(sure=0.9, length=1), ngram=always(sure=0.8, length=8))
    assert driver.decide([request_of()])[0].method == "ngram"


def test_the_proposer_that_is_right_wins_in_the_end_whatever_each_claims():
    driver, who = SessionDriver(FLAT, suffix=always(False, sure=0.95), ngram=always(True, sure=0.7)), request_of()
    driver.run([who], 60)
    methods = [row.method for step in list(driver.policy.trace)[-30:] for row in step.rows if row.depth]
    assert len(methods) > 20 and methods.count("ngram") >= 0.9 * len(methods)


def test_lookups_that_were_not_taken_are_learned_from_too():
    driver, who = SessionDriver(FLAT, suffix=always(True, sure=0.95), ngram=always(True, sure=0.5)), request_of()
    before = expected_of(driver, who, 4, 0.5, "ngram")
    driver.run([who], 6)
    assert all(row.method != "ngram" for step in driver.policy.trace for row in step.rows)
    assert expected_of(driver, who, 4, 0.5, "ngram") > before


def test_each_request_of_a_batch_has_its_own_proposer():
    one, other = request_of(length=2), request_of(length=2)
    driver = SessionDriver(
        FLAT,
        suffix=lambda request: ([True] * 16, 0.97) if request is one else ([], 0.0),
        draft=always(True, sure=0.9),
        draft_seconds=0.01,
    )
    driver.run([one, other], 40)
    methods = [tuple(row.method for row in step.rows) for step in list(driver.policy.trace)[-20:]]
    assert methods.count(("suffix", "draft")) >= 16


def test_a_draft_model_is_not_run_where_a_lookup_does_as_well():
    driver = SessionDriver(FLAT, suffix=always(True, sure=0.99), draft=always(True, sure=0.9), draft_seconds=0.2)
    driver.run([request_of()], 40)
    assert {row.method for step in driver.policy.trace for row in step.rows} <= {"suffix", "none"}


@pytest.mark.parametrize(("right", "wrong"), [("big", "small"), ("small", "big")])
def test_of_two_models_the_one_that_is_right_is_used(right, wrong):
    driver = SessionDriver(
        USUAL,
        models={
            right: (always(True, sure=0.9), model_costs(0.05)),
            wrong: (always(False, sure=0.9), model_costs(0.05)),
        },
    )
    driver.run([request_of(length=2)], 400)
    methods = [row.method for step in list(driver.policy.trace)[-100:] for row in step.rows if row.depth]
    assert len(methods) > 80 and methods.count(right) > 0.9 * len(methods)


def test_of_two_models_that_are_right_the_cheaper_one_is_used():
    driver = SessionDriver(
        FLAT,
        models={"dear": (always(sure=0.9), model_costs(0.3)), "cheap": (always(sure=0.9), model_costs(0.01))},
    )
    driver.run([request_of(length=2)], 200)
    methods = [row.method for step in list(driver.policy.trace)[-50:] for row in step.rows if row.depth]
    assert len(methods) > 40 and methods.count("cheap") > 0.9 * len(methods)


def test_a_draft_in_one_pass_is_priced_by_one_pass():
    """A pass takes nearly a step: worth it for a whole draft, but not for a single token."""
    once, each = (SessionDriver(FLAT, models={"any": (always(), model_costs(0.9, one_pass=p))}) for p in (True, False))
    taken = [[depth for [depth] in driver.run([request_of(length=2)], 60)] for driver in (once, each)]
    assert taken[0].count(8) > 40
    assert sum(depth > 0 for depth in taken[1]) < 20
    assert once.policy.estimated_speedup is not None and once.policy.estimated_speedup > 2.0


# ---- any batch at all


def test_whatever_comes_choices_stay_within_what_may_be_done():
    """Random batches, settings, drafts and verdicts: depths fit, and methods are those requested."""
    rng = random.Random(7)
    odd = {1: 1.0, 3: 0.9, 5: 2.0, 8: 2.0, 9: 4.0, 64: 20.0}

    def script(request: Request) -> tuple[Sequence[bool], float]:
        return [rng.random() < 0.7 for _ in range(rng.choice([0, 1, 3, 16]))], rng.random()

    driver = SessionDriver(
        odd,
        suffix=script,
        ngram=script,
        draft=script,
        draft_seconds=0.1,
        models={"other": (script, model_costs(0.2, one_pass=True))},
        max_step_tokens=40,
    )
    running: list[Request] = []
    for _ in range(1500):
        while len(running) < rng.randint(1, 12):
            wishes: dict[str, Any] = rng.choice(
                [{}, {}, {"mode": "on", "max_depth": 2}, {"mode": "off"}, {"method": "draft"}]
            )
            running.append(request_of(length=rng.randint(2, 40), max_length=rng.randint(45, 120), **wishes))
        room = {request.id: request.max_useful_depth for request in running}
        outcomes = driver.step(running)
        assert sum(o.choice.depth for o in outcomes if o.request.params.speculation.mode is None) <= 40
        for outcome in outcomes:
            wish, choice = outcome.request.params.speculation, outcome.choice
            assert 0 <= choice.depth <= min(room[outcome.request.id], 2 if wish.mode == "on" else 8)
            assert wish.mode != "off" or not choice.depth
            assert not choice.depth or wish.method in (None, choice.method)
        running = [request for request in running if request.finish_reason is None]
    assert len(driver.policy._states) == len(running)


# ---- regressions


def test_a_draft_of_no_tokens_is_no_trial():
    driver, who = SessionDriver(USUAL, suffix=nothing, draft=nothing, draft_seconds=0.01), request_of(length=2)
    before = expected_of(driver, who, 4, 0.9)
    driver.run([who], 50)
    assert expected_of(driver, who, 4, 0.9) == pytest.approx(before)

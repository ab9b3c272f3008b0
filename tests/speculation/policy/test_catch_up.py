"""When a draft model catches up on a text: the cost, the possible gain and the possible loss."""

from __future__ import annotations

import pytest

from outpace.core import Request
from outpace.speculation.costs.curves import DraftCosts, StepCosts
from outpace.speculation.policy.tunables import TUNABLES
from tests.session_driver import FLAT, Script, SessionDriver, always, request_of

LENGTH = 200  # tokens of a text


def catching_up(seconds: float, script: Script | None = None, draft_seconds: float = 0.05) -> SessionDriver:
    """A draft model that takes so many plain steps to catch up on one text; the cost grows with the texts."""
    catch_up = {2: 0.0, LENGTH: seconds, 16 * LENGTH: 16 * seconds}
    passes = StepCosts({1: draft_seconds} | {size: draft_seconds + each for size, each in catch_up.items()})
    costs = DraftCosts(StepCosts({1: draft_seconds, 256: draft_seconds + 0.03}), passes)
    return SessionDriver(FLAT, models={"draft": (script or always(sure=0.9), costs)})


def drafts_in(driver: SessionDriver, who: Request, steps: int = 10) -> int:
    """Steps with a draft."""
    return sum(depth > 0 for [depth] in driver.run([who], steps))


def test_a_text_is_caught_up_with_where_enough_is_left_to_say():
    driver = catching_up(2.0)
    driver.run([request_of(length=2)], 40)  # the draft model has been tried
    assert drafts_in(driver, request_of(length=LENGTH, max_length=LENGTH + 100))
    assert not drafts_in(driver, request_of(length=LENGTH, max_length=LENGTH + 3), 2), "for three tokens it is not"


def test_a_text_too_long_for_what_is_left_to_say_is_not_caught_up_with():
    """Catching up takes eight target steps, and the request wants as many tokens."""
    driver = catching_up(8.0)
    assert driver.depths([request_of(length=LENGTH, max_length=LENGTH + 8)]) == [0]
    known = request_of(length=LENGTH, max_length=LENGTH + 8)
    driver = catching_up(8.0)
    driver.model().num_cached[known.id] = LENGTH - 1
    assert driver.depths([known])[0] > 0, "what is in its cache costs nothing more"


def test_the_very_first_text_may_cost_only_so_much():
    """The model is untried: if its drafts are wrong, the time spent on it is lost."""
    most = TUNABLES.most_balance
    assert drafts_in(catching_up(0.25 * most), request_of(length=LENGTH))
    assert not drafts_in(catching_up(1.1 * most), request_of(length=LENGTH))


@pytest.mark.parametrize("seconds", [1.0, 2.0, 3.0, 5.0])
@pytest.mark.parametrize("num_left", [1, 2, 3, 4, 5, 8])
def test_the_very_first_text_is_caught_up_with_only_where_its_answer_can_pay_for_that(seconds, num_left):
    """If drafts are right, a request with drafts is faster than plain decoding, even if its output is short."""
    driver, who = catching_up(seconds), request_of(length=LENGTH, max_length=LENGTH + num_left)
    has_drafts = False
    while who.finish_reason is None:
        has_drafts |= any(driver.run([who], 1)[0])
    assert not has_drafts or num_left > seconds + 1.0
    assert who.spec.decode_seconds <= who.spec.plain_seconds


def test_the_dearer_a_text_the_more_has_to_be_left_to_say():
    def least_left(seconds: float) -> int:
        lengths = (4, 8, 16, 32, 64, 128, 256)
        found = (
            n for n in lengths if drafts_in(catching_up(seconds), request_of(length=LENGTH, max_length=LENGTH + n), 1)
        )
        return next(found, 10**6)

    least = [least_left(seconds) for seconds in (0.2, 2.0, 5.0, 300.0)]
    assert least == sorted(least) and least[0] < least[-1] == 10**6


def test_two_tokens_that_an_accepted_draft_leaves_are_no_catching_up():
    driver, who = catching_up(5.0), request_of(length=2)
    driver.run([who], 30)
    assert driver.model().num_uncached(who) <= 2
    [plan] = [driver.decision([who]).plan]
    assert plan is None or plan.catch_up_seconds == 0.0


# ---- paid back


def test_catching_up_is_paid_back_by_drafts_that_are_right():
    driver, who = catching_up(1.5), request_of(length=LENGTH)
    driver.run([who], 100)
    assert who.spec.decode_seconds < 0.8 * who.spec.plain_seconds
    assert driver.policy.estimated_speedup is not None and driver.policy.estimated_speedup > 1.25


def test_what_was_caught_up_with_once_is_not_paid_for_again():
    driver, who = catching_up(1.5), request_of(length=LENGTH)
    driver.run([who], 3)
    assert driver.model().num_uncached(who) < 3
    begin, num_before = driver.clock.now, len(who.tokens)
    driver.run([who], 20)
    steps_of_plain = len(who.tokens) - num_before
    assert driver.clock.now - begin < 0.8 * steps_of_plain


@pytest.mark.parametrize("seconds", [0.5, 1.5, 6.0, 12.0, 24.0])
@pytest.mark.parametrize("num_rows", [1, 4])
def test_catching_up_for_drafts_that_are_wrong_loses_no_more_than_the_grants(seconds, num_rows):
    driver = catching_up(seconds, always(False, sure=0.9))
    batch = [request_of(length=LENGTH, max_length=LENGTH + 300) for _ in range(num_rows)]
    driver.run(batch, 290)
    allowed = TUNABLES.request_grant + TUNABLES.engine_grant + (seconds if num_rows == 1 else 0.0)  # one is a trial
    for who in batch:
        lost = who.spec.decode_seconds - who.spec.plain_seconds
        assert lost <= allowed + 0.02 * who.spec.plain_seconds
    assert driver.lost <= allowed + 0.02 * driver.policy.plain_seconds


def test_texts_are_seldom_caught_up_with_where_drafts_are_always_wrong():
    """The model is no better for the next request than for the last; it is tried again now and then."""
    driver, caught_up = catching_up(1.0, always(False, sure=0.9)), list[bool]()
    for _ in range(60):
        who = request_of(length=LENGTH, max_length=LENGTH + 60)
        while who.finish_reason is None:
            driver.step([who])
        caught_up.append(who.id in driver.model().num_cached)
    assert sum(caught_up[-20:]) < 20 / 2
    allowed = TUNABLES.engine_grant + TUNABLES.request_grant + 60 * 0.5 + 0.02 * driver.policy.plain_seconds
    assert driver.lost <= allowed


def test_catching_up_for_a_request_that_ends_in_that_very_step_is_a_loss():
    """A request ends earlier than expected; the loss is charged within about a hundred steps."""
    driver, who = catching_up(1.5), request_of(length=LENGTH)
    driver.accepts = lambda drafted: 0
    while who.id not in driver.model().num_cached:
        driver.step([who])
        assert driver.policy._step < 100
    assert driver.lost > 1.5
    who.finish_reason = "stop"
    driver.policy.release(who)
    budget, other = driver.policy.budget, SessionDriver(FLAT).policy.budget  # one that has lost nothing
    for each in (budget, other):
        for _ in range(100):
            each.earn(1.0)
    assert budget.balance < other.balance - 1.0


def test_catching_up_for_a_request_that_insists_on_drafts_is_nobodys_loss():
    driver = catching_up(50.0)
    insisting = request_of(length=LENGTH, mode="on", method="draft")
    before = driver.policy.budget.balance
    driver.run([insisting], 5)
    driver.policy.release(insisting)
    assert driver.policy.budget.balance >= before and driver.policy.estimated_speedup is None
    assert drafts_in(driver, request_of(length=2)) > 5, "nor does it keep others from drafts"


def test_catching_up_is_learned_apart_from_passes():
    driver, who = catching_up(0.5), request_of(length=LENGTH)
    before = driver.costs.drafts["draft"].seconds(1, 4, 10.0)
    driver.truth.drafts["draft"].catch_up = StepCosts({1: 0.05, LENGTH: 3.0})
    for _ in range(8):
        driver.run([who], 3)
        driver.policy.release(who)
        who = request_of(length=LENGTH)
    assert driver.costs.drafts["draft"].catch_up_seconds(LENGTH) > 0.5
    assert driver.costs.drafts["draft"].seconds(1, 4, 10.0) == pytest.approx(before, rel=0.05)


# ---- not covered, and tried again


def test_in_debt_a_dear_text_is_not_caught_up_with_by_a_model_nothing_is_known_of():
    driver = catching_up(8.0)
    driver.lose(1000.0)
    assert not drafts_in(driver, request_of(length=LENGTH, max_length=LENGTH + 200), 30)


def test_what_is_caught_up_with_in_debt_would_be_with_a_budget_too():
    taken = []
    for seconds in (1.0, 3.0, 6.0, 9.0, 15.0, 30.0):
        rich, broke = catching_up(seconds), catching_up(seconds)
        rich.gain(100.0)
        broke.lose(1000.0)
        who = [request_of(length=LENGTH, max_length=LENGTH + 30) for _ in range(2)]
        taken.append((rich.depths(who[:1])[0] > 0, broke.depths(who[1:])[0] > 0))
    assert all(with_budget or not in_debt for with_budget, in_debt in taken)
    assert sum(with_budget for with_budget, _ in taken) > sum(in_debt for _, in_debt in taken)


def test_in_debt_a_model_that_has_paid_goes_on_for_texts_it_has_followed():
    driver, who = catching_up(3.0), request_of(length=2)
    driver.run([who], 40)
    driver.lose(driver.policy.budget.balance + 10.0)
    assert drafts_in(driver, who, 40) > 30


def test_in_debt_a_new_text_is_caught_up_with_by_a_model_that_has_paid():
    """Otherwise a debt would keep a good model from every new request until plain steps have paid it off."""
    driver = catching_up(1.0)
    driver.run([request_of(length=LENGTH)], 60)
    driver.lose(20.0)
    assert driver.policy.budget.balance < -5.0
    assert drafts_in(driver, request_of(length=LENGTH), 40) > 20


def test_a_text_that_was_refused_for_want_of_a_budget_is_caught_up_with_when_there_is_one():
    driver = catching_up(0.5)
    batch = [request_of(length=LENGTH) for _ in range(4)]  # too many for an untried model
    driver.lose(100.0)
    assert not any(map(any, driver.run(batch, 10)))
    driver.gain(200.0)
    assert any(map(any, driver.run(batch, 4 * TUNABLES.longest_wait)))


def test_a_model_that_was_refused_is_weighed_more_and_more_rarely():
    driver, who = catching_up(300.0), request_of(length=LENGTH)
    driver.run([who], 200)
    reasons = [step.reason for step in list(driver.policy.trace)[-100:]]
    assert reasons.count("idle") > 60


# ---- smaller trials


def test_where_all_texts_are_too_dear_together_the_model_is_tried_for_fewer():
    driver, batch = catching_up(1.0), [request_of(length=LENGTH) for _ in range(8)]
    first = next(depths for depths in driver.run(batch, 40) if any(depths))
    assert 0 < sum(depth > 0 for depth in first) < 8


def test_a_trial_that_fares_well_is_followed_by_drafts_for_all():
    driver, batch = catching_up(1.0), [request_of(length=LENGTH) for _ in range(8)]
    taken = [sum(depth > 0 for depth in depths) for depths in driver.run(batch, 300)]
    assert max(taken[-20:]) == 8
    assert driver.policy.estimated_speedup is not None and driver.policy.estimated_speedup > 1.0


def test_trials_that_fare_badly_lose_no_more_than_the_grants():
    driver = catching_up(1.0, always(False, sure=0.9))
    batch = [request_of(length=LENGTH) for _ in range(8)]
    taken = driver.run(batch, 400)
    assert driver.lost <= TUNABLES.engine_grant + TUNABLES.request_grant + 0.02 * driver.policy.plain_seconds
    assert sum(map(any, taken[-100:])) <= 10

"""The time of steps, by kind, and that of plain ones as the baseline: with prefill in the step, with wrong costs, and
with disturbed passes."""

from __future__ import annotations

from itertools import pairwise
from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.core import StepStats
from outpace.speculation.policy.times import PLAIN, Kind, StepTimes
from outpace.speculation.policy.tunables import TUNABLES
from tests.session_driver import SessionDriver, always, nothing, request_of

COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 101: 11.0, 104: 11.3}  # a prompt of a hundred tokens takes ten steps
DEPTH = 3
EARNED = TUNABLES.engine_share * 0.02  # plain steps, by each plain step


# ---- by kind of step

LOOKUPS = Kind(is_mixed=True)
SHALLOW, DEEP = Kind("head", 2), Kind("head", 4)


def seen(times: StepTimes, kind: Kind, factor: float, *, rows: int = 1, steps: int = 100) -> None:
    """Steps whose costs sum up to two seconds, and which take `factor` times that."""
    for _ in range(steps):
        times.observe(kind, rows, 2.0, 2.0 * factor)


def test_nothing_is_known_before_the_first_step_but_the_sum_of_costs():
    assert [StepTimes().factor(kind, 1) for kind in (PLAIN, LOOKUPS, DEEP)] == [1.0, 1.0, 1.0]


def test_each_kind_and_size_of_a_step_has_a_factor_of_its_own():
    times = StepTimes()
    true = {(PLAIN, 1): 0.8, (PLAIN, 8): 0.7, (LOOKUPS, 1): 1.4, (SHALLOW, 1): 1.1, (DEEP, 1): 0.9, (DEEP, 8): 1.2}
    for (kind, rows), factor in true.items():
        seen(times, kind, factor, rows=rows)
    for (kind, rows), factor in true.items():
        assert times.factor(kind, rows) == pytest.approx(factor, rel=0.01)


def test_a_kind_without_steps_is_like_the_nearest_one_of_the_same_model():
    times = StepTimes()
    seen(times, PLAIN, 0.9)
    seen(times, SHALLOW, 1.1)
    seen(times, Kind("head", 8), 1.3)
    seen(times, Kind("head", 3, is_mixed=True), 1.5)
    seen(times, Kind("draft", 3), 1.7)
    assert times.factor(Kind("head", 3), 1) == times.factor(SHALLOW, 1)
    assert times.factor(Kind("head", 6), 1) == times.factor(Kind("head", 8), 1)
    assert times.factor(SHALLOW, 16) == times.factor(SHALLOW, 1)
    assert times.factor(Kind("draft", 8), 1) == times.factor(Kind("draft", 3), 1)


@pytest.mark.parametrize(("of_plain", "mixed"), [(0.7, 1.0), (1.3, 1.3)])
def test_without_a_similar_kind_a_step_is_like_a_plain_one_but_a_mixed_one_never_better_than_its_costs(of_plain, mixed):
    times = StepTimes()
    seen(times, PLAIN, of_plain)
    assert times.factor(DEEP, 1) == pytest.approx(of_plain, rel=0.01)
    for kind in (LOOKUPS, Kind("head", 3, is_mixed=True)):
        assert times.factor(kind, 1) == pytest.approx(mixed, rel=0.01)


def test_a_guess_is_given_up_when_something_nearer_was_seen():
    times = StepTimes()
    seen(times, SHALLOW, 1.1)
    assert times.factor(Kind("head", 12), 1) == times.factor(SHALLOW, 1)
    seen(times, Kind("head", 8), 1.4)
    assert times.factor(Kind("head", 12), 1) == times.factor(Kind("head", 8), 1)


def test_the_first_step_of_a_kind_is_not_the_whole_truth():
    times = StepTimes()
    times.observe(DEEP, 1, 2.0, 2.2)
    assert 1.0 < times.factor(DEEP, 1) < 1.1


@pytest.mark.parametrize("factor", [50.0, 0.02])
def test_one_step_that_something_disturbed_changes_little(factor):
    fresh, known = StepTimes(), StepTimes()
    seen(known, DEEP, 1.0)
    for times, most in ((fresh, 0.1), (known, 0.01)):
        times.observe(DEEP, 1, 2.0, 2.0 * factor)
        assert times.factor(DEEP, 1) == pytest.approx(1.0, rel=most)


def test_a_kind_that_has_changed_is_followed():
    times = StepTimes()
    seen(times, DEEP, 1.0)
    seen(times, DEEP, 1.15)
    assert times.factor(DEEP, 1) == pytest.approx(1.15, rel=0.01)


@given(st.lists(st.floats(0.9, 1.1), min_size=1, max_size=30), st.sampled_from([PLAIN, LOOKUPS, DEEP]))
def test_of_what_steps_take_each_part_is_learned_once(factors, kind):
    """What the kind's factor does not explain is returned, so that costs can learn that and no more."""
    times = StepTimes()
    for factor in factors:
        rest = times.observe(kind, 1, 2.0, 2.0 * factor)
        assert times.factor(kind, 1) * exp(rest) == pytest.approx(factor)


def test_the_mean_of_many_steps_is_known_better_than_a_single_one():
    times = StepTimes()
    times.observe(DEEP, 1, 2.0, 2.0, num_steps=50)
    times.observe(DEEP, 1, 2.0, 2.2)
    assert times.factor(DEEP, 1) < 1.01


@pytest.mark.parametrize("kind", [LOOKUPS, SHALLOW, DEEP])
def test_only_plain_steps_teach_the_baseline(kind):
    times = StepTimes()
    seen(times, PLAIN, 0.9)
    before = times.factor(PLAIN, 1), times.factor(PLAIN, 8)
    for rows in (1, 8):
        seen(times, kind, 1.3, rows=rows)
    assert (times.factor(PLAIN, 1), times.factor(PLAIN, 8)) == before


@pytest.mark.parametrize("factor", [0.8, 1.4])
def test_what_a_kind_took_is_forgotten_as_plain_steps_pass(factor):
    """The machine may have been busy then; without steps of the kind nothing else would tell."""
    times = StepTimes()
    seen(times, PLAIN, 1.0)
    seen(times, DEEP, factor)
    far = [abs(log(times.factor(DEEP, 1)))]
    for _ in range(5):
        seen(times, PLAIN, 1.0, steps=300)
        far.append(abs(log(times.factor(DEEP, 1))))
    assert all(later < earlier for earlier, later in pairwise(far))
    assert far[1] > 0.05 * far[0] and far[-1] < 0.01
    seen(times, DEEP, factor)
    assert times.factor(DEEP, 1) == pytest.approx(factor, rel=0.02)


# ---- the baseline


def drafting() -> SessionDriver:
    """A fully accepted draft of three tokens, in 1.3 seconds: plain decoding takes four."""
    return SessionDriver(COSTS, suffix=always(length=DEPTH), lookup_seconds=0.0)


def plain(*, begins_ahead: bool = False) -> SessionDriver:
    """Every step has a decision and none has drafts: lookups are free and find nothing."""
    return SessionDriver(COSTS, suffix=nothing, lookup_seconds=0.0, begins_ahead=begins_ahead)


def believed(driver: SessionDriver, num_rows: int = 1) -> float:
    return driver.costs.plain_seconds(num_rows, 10.0) * driver.policy._times.factor(PLAIN, num_rows)


def test_a_step_mixed_with_a_prompt_counts_with_its_share_of_decoding():
    mixed, pure = drafting(), drafting()
    # Beside a prompt the same draft costs less, so it is worth it.
    [beside] = mixed.step([request_of()], num_prefill=100)
    [alone] = pure.step([request_of()])
    assert beside.verdict.num_drafted == alone.verdict.num_drafted == DEPTH
    assert pure.policy.estimated_speedup == pytest.approx(4 / 1.3)
    assert mixed.policy.estimated_speedup == pytest.approx(4 / 1.3)


def test_a_plain_step_beside_a_prompt_neither_gains_nor_loses_however_long_it_took():
    driver, who = plain(), request_of()
    driver.settle(who)
    before = driver.policy.budget.balance
    driver.step([who], num_prefill=100, forward_seconds=30.0)
    driver.settle(who)
    assert driver.policy.budget.balance == pytest.approx(before + EARNED)
    assert who.spec.decode_seconds == pytest.approx(who.spec.plain_seconds)


def test_deciding_beside_a_prompt_is_a_loss_all_the_same():
    driver, who = plain(), request_of()
    driver.settle(who)
    before = driver.policy.budget.balance
    driver.step([who], num_prefill=100, forward_seconds=30.0, policy_seconds=0.2)
    driver.settle(who)
    assert driver.policy.budget.balance == pytest.approx(before + EARNED - 0.2)
    assert who.spec.decode_seconds == pytest.approx(who.spec.plain_seconds + 0.2)


def test_a_plain_step_beside_a_prompt_says_nothing_of_plain_steps():
    driver, who = plain(), request_of()
    for _ in range(20):
        driver.step([who], num_prefill=100, forward_seconds=30.0)
    assert believed(driver) == pytest.approx(1.0)


def test_gains_are_measured_by_plain_steps_as_they_were_where_costs_have_them_wrong():
    """Costs give 1.0, plain steps take 0.9: a step with drafts saves less than the costs suggest."""
    driver, who = plain(), request_of()
    for _ in range(60):
        driver.step([who], forward_seconds=0.9)
    assert believed(driver) == pytest.approx(0.9, rel=0.03)
    driver.proposers["suffix"].script = always(length=DEPTH)
    driver.settle(who)
    before, num_before = who.spec.plain_seconds, who.num_output
    while not driver.step([who], forward_seconds=1.0)[0].verdict.num_drafted:
        driver.settle(who)
        before, num_before = who.spec.plain_seconds, who.num_output
    num_emitted = who.num_output - num_before
    assert num_emitted > 1
    assert who.spec.plain_seconds - before == pytest.approx(num_emitted * 0.9, rel=0.03)


@pytest.mark.parametrize("steps", [7, 200])
def test_steps_with_drafts_that_take_longer_than_their_curve_says_are_no_reason_to_think_so_of_plain_ones(steps):
    """Before the first plain step measures it, and later."""
    driver, who = drafting(), request_of()
    expected, driver.mixed_seconds = believed(driver), 0.7
    taken = driver.run([who], steps)
    assert sum(depth == DEPTH for [depth] in taken) > 0.9 * steps
    assert driver.policy._times.factor(LOOKUPS, 1) > 1.3
    assert believed(driver) == pytest.approx(expected, rel=0.02)


def test_each_number_of_rows_has_a_baseline_of_its_own():
    driver, batch = plain(), [request_of() for _ in range(2)]
    for _ in range(40):
        driver.step(batch, forward_seconds=1.1)
        driver.step(batch[:1], forward_seconds=0.8)
    assert believed(driver, 1) == pytest.approx(0.8, rel=0.05)
    assert believed(driver, 2) == pytest.approx(1.1, rel=0.05)


def test_one_plain_step_that_something_disturbed_hardly_moves_the_baseline():
    driver, who = plain(), request_of()
    for _ in range(20):
        driver.step([who], forward_seconds=1.0)
    driver.step([who], forward_seconds=50.0)
    assert believed(driver) < 1.2


def test_deciding_while_the_device_is_at_work_costs_nothing():
    """A step that is begun ahead ends one second after the step before, whatever the host does meanwhile."""
    waiting, hiding = plain(), plain()
    for _ in range(20):
        waiting.step([request_of()], forward_seconds=0.8, policy_seconds=0.2)
        hiding.step([request_of()], forward_seconds=0.8, policy_seconds=0.2, hidden_seconds=0.2)
    assert waiting.policy.estimated_speedup == pytest.approx(0.8)
    assert hiding.policy.estimated_speedup == pytest.approx(1.0)


def test_deciding_before_a_draft_is_waited_for_even_if_verifying_was_begun_behind_it():
    stats = StepStats(policy_seconds=0.2, draft_seconds=0.5, forward_seconds=0.8, hidden_seconds=0.1)
    assert stats.deciding_seconds == 0.2


def test_a_pass_that_was_disturbed_forbids_nothing_and_is_not_denied():
    driver, who = drafting(), request_of()
    [outcome] = driver.step([who], forward_seconds=50.0)
    assert outcome.verdict.num_drafted == DEPTH
    assert driver.policy.budget.balance > 0.0
    assert driver.policy.estimated_speedup == pytest.approx((1 + DEPTH) / 50, rel=0.15)


def test_drafts_that_cost_what_they_were_meant_to_cost_are_not_excused():
    driver, who = SessionDriver({1: 1.0, 4: 1.9}, suffix=nothing), request_of()
    driver.step([who])
    driver.proposers["suffix"].script = always(False, sure=0.99, length=DEPTH)
    before, num_drafted = driver.policy.budget.balance, 0
    while not num_drafted:
        [[num_drafted]] = driver.run([who], 1)
    assert num_drafted == DEPTH
    assert driver.policy.budget.balance == pytest.approx(before - 0.9, abs=0.2)


def test_a_step_that_did_something_once_is_nobodys_loss():
    """One-time work, for example capturing a graph."""
    driver, who = drafting(), request_of()
    driver.step([who])
    balance, spent, costs = driver.policy.budget.balance, who.spec.decode_seconds, driver.costs.as_dict()
    [outcome] = driver.step([who], forward_seconds=50.0, had_one_time_work=True)
    assert outcome.verdict.num_drafted == DEPTH
    assert driver.policy.budget.balance == balance and driver.policy.spent_seconds == spent
    assert driver.costs.as_dict() == costs
    assert who.spec.decode_seconds == spent


# ---- steps of a kind that take longer than their costs say


@pytest.mark.parametrize("mixed_seconds", [0.0, 0.5, 2.0])
def test_mixed_steps_that_take_longer_than_their_costs_say_are_planned_no_more_and_those_of_the_model_are(
    mixed_seconds,
):
    """One request copies, and the model is right for both. The costs know nothing of what mixing takes."""
    one, other = request_of(length=2), request_of(length=2)
    driver = SessionDriver(
        {1: 1.0, 256: 1.0},
        suffix=lambda request: ([True] * 16, 0.97) if request is one else ([], 0.0),
        draft=always(sure=0.9),
        draft_seconds=0.02,
    )
    driver.mixed_seconds = mixed_seconds
    driver.run([one, other], 200)
    methods = [tuple(row.method for row in step.rows) for step in list(driver.policy.trace)[-60:]]
    usual = ("draft", "draft") if mixed_seconds else ("suffix", "draft")
    assert methods.count(usual) >= 45
    assert driver.policy.estimated_speedup is not None and driver.policy.estimated_speedup > 2.0
    assert believed(driver, 2) == pytest.approx(1.0, rel=0.05), "plain steps took what they always take"


# ---- runners that begin consecutive plain steps ahead


@pytest.mark.parametrize("num_on_end", [0, 60])
def test_where_plain_steps_are_begun_ahead_a_lone_one_that_takes_longer_says_nothing_of_them(num_on_end: int):
    """On a device, consecutive plain steps wait only for the model; one between drafts waits for the host."""
    driver, who = plain(begins_ahead=True), request_of()
    for _ in range(num_on_end):
        driver.step([who], forward_seconds=0.8, hidden_seconds=0.1)
    before = believed(driver)
    assert before == pytest.approx(0.8 if num_on_end else 1.0, rel=0.05)
    for _ in range(40):
        driver.step([who], forward_seconds=1.1)
    assert believed(driver) == pytest.approx(before, rel=0.02)


@pytest.mark.parametrize("seconds", [0.9, 0.7])
def test_where_plain_steps_are_begun_ahead_a_lone_one_that_takes_less_is_believed(seconds):
    """Costs learn from the same steps: the correction must not count twice."""
    driver, who = plain(begins_ahead=True), request_of()
    for _ in range(200):
        driver.step([who], forward_seconds=seconds)
    assert believed(driver) == pytest.approx(seconds, rel=0.04)


# ---- idle steps


def test_idle_steps_that_were_begun_ahead_say_what_a_plain_one_takes():
    """A lookup costs a tenth of a step and finds nothing: most steps are idle."""
    driver, who = SessionDriver(COSTS, suffix=nothing, lookup_seconds=0.1, begins_ahead=True), request_of()
    idle = 0
    for _ in range(400):
        driver.step([who], forward_seconds=0.8, hidden_seconds=0.1)
        idle += driver.policy.trace[-1].reason == "idle"
    assert idle > 200
    assert believed(driver) == pytest.approx(0.8, rel=0.1)


def test_what_idle_steps_took_is_booked_when_something_is_looked_at_again_and_at_the_end():
    driver = SessionDriver(COSTS, suffix=nothing, lookup_seconds=0.1)
    who = request_of(length=3, max_length=103)
    while who.finish_reason is None:
        driver.step([who], policy_seconds=0.01)
    num_lookups = driver.proposers["suffix"].num_asked
    assert num_lookups < 50
    assert who.spec.plain_seconds == pytest.approx(100.0)
    assert who.spec.decode_seconds == pytest.approx(101.0 + 0.1 * num_lookups)
    policy = driver.policy
    assert [policy.spent_seconds, policy.plain_seconds] == pytest.approx([101.0 + 0.1 * num_lookups, 100.0])
    assert policy.budget.balance < TUNABLES.most_balance


def test_an_idle_step_that_did_something_once_is_in_no_figure():
    driver, who = SessionDriver(COSTS, suffix=nothing, lookup_seconds=0.1, begins_ahead=True), request_of()
    driver.run([who], 100)
    for _ in range(40):
        driver.step([who], forward_seconds=50.0, hidden_seconds=0.1, had_one_time_work=True)
    driver.policy.release(who)
    assert driver.policy.spent_seconds < 200.0
    assert believed(driver) == pytest.approx(1.0, rel=0.05)

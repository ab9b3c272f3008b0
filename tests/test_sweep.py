"""The arithmetic of a batch against looking at every choice there is."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outpace.speculation.sweep import Plan, Table, sweep

Floats = NDArray[np.float64]


def survival_of(chances: list[list[float]], width: int) -> Floats:
    """Chances that a token is accepted if those before it were; rows may be shorter than the widest."""
    out = np.zeros((len(chances), width))
    for line, row in zip(out, chances, strict=True):
        line[: len(row)] = np.cumprod(row)
    return out


def speed(table: Table, survival: Floats, depths: tuple[int, ...]) -> float:
    expected = table.expected + sum(float(survival[row, :depth].sum()) for row, depth in enumerate(depths))
    return expected / (float(table.seconds[sum(depths)]) + table.token_seconds * expected)


def best_speed(table: Table, survival: Floats) -> float:
    """Over every vector of depths that fits."""
    choices = product(*(range(int(np.count_nonzero(row)) + 1) for row in survival))
    return max(speed(table, survival, depths) for depths in choices if sum(depths) < table.seconds.size)


CHANCES = st.one_of(st.floats(0.01, 1.0), st.sampled_from([0.5, 1.0]))
BATCHES = st.lists(st.lists(CHANCES, max_size=4), min_size=1, max_size=4)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Anything: rising, falling, with stairs, or with room for a few tokens only."""
    size = draw(st.integers(1, 18))
    if draw(st.booleans()):
        seconds = draw(st.lists(st.floats(0.1, 10.0), min_size=size, max_size=size))
    else:
        stair, first, rise = draw(st.integers(1, 6)), draw(st.floats(0.1, 3.0)), draw(st.floats(0.0, 2.0))
        seconds = [first + rise * (n // stair) for n in range(size)]
    return Table(np.array(seconds), draw(st.floats(1.0, 6.0)), draw(st.sampled_from([0.0, 0.05, 1.0])))


@given(BATCHES, tables())
def test_no_choice_of_depths_is_faster(chances, table):
    survival = survival_of(chances, 4)
    plan = sweep(table, survival)
    assert plan.speed == pytest.approx(best_speed(table, survival))


@given(BATCHES, tables())
def test_the_plan_says_what_its_depths_come_to(chances, table):
    survival = survival_of(chances, 4)
    plan = sweep(table, survival)
    check(plan, table, survival)


def check(plan: Plan, table: Table, survival: Floats) -> None:
    depths = tuple(int(depth) for depth in plan.depths)
    assert plan.speed == pytest.approx(speed(table, survival, depths))
    gains = [float(survival[row, :depth].sum()) for row, depth in enumerate(depths)]
    assert plan.gains.tolist() == pytest.approx(gains)
    expected = table.expected + sum(gains)
    assert plan.seconds == pytest.approx(float(table.seconds[sum(depths)]) + table.token_seconds * expected)
    assert all(depth <= np.count_nonzero(row) for depth, row in zip(depths, survival, strict=True))


@given(BATCHES, tables())
def test_tokens_are_taken_likeliest_first_and_never_without_those_before(chances, table):
    """Depths are counts, so a prefix is taken of every row: it must hold the likeliest tokens of all."""
    survival = survival_of(chances, 4)
    plan = sweep(table, survival)
    taken = [float(s) for row, depth in zip(survival, plan.depths, strict=True) for s in row[:depth]]
    left = [float(s) for row, depth in zip(survival, plan.depths, strict=True) for s in row[depth:] if s > 0]
    assert len(taken) == plan.count
    assert not taken or not left or min(taken) >= max(left)


def test_equal_chances_keep_the_order_of_the_draft():
    plan = sweep(Table(np.array([1.0, 1.0, 1.0, 9.0]), 2.0), np.ones((2, 3)))
    assert plan.count == 2 and plan.depths.sum() == 2


def test_free_tokens_are_all_taken_and_dear_ones_left():
    survival = survival_of([[0.3] * 4], 4)
    assert sweep(Table(np.ones(5), 1.0), survival).depths.tolist() == [4]
    assert sweep(Table(np.arange(1.0, 6.0), 1.0), survival).depths.tolist() == [0]


def test_a_step_up_is_not_the_end_of_the_stairs():
    """The second token costs as much as two steps; up to the eighth no more is paid, and together they are worth it."""
    table = Table(np.array([1.0, 1.9, 1.9, 1.9, 1.9, 1.9, 1.9, 1.9, 9.0]), 1.0)
    assert sweep(table, survival_of([[0.85] * 8], 8)).depths.tolist() == [7]
    assert sweep(table, survival_of([[0.4] * 8], 8)).depths.tolist() == [0]


def test_no_more_is_taken_than_there_is_room_for():
    assert sweep(Table(np.ones(3), 2.0), np.ones((2, 4))).count == 2
    assert sweep(Table(np.ones(1), 2.0), np.ones((2, 4))).count == 0


def test_no_guess_is_a_plain_step():
    table = Table(np.ones(9), 2.0, 0.1)
    plan = sweep(table, np.zeros((2, 4)))
    assert plan.count == 0 and plan.speed == table.plain_speed == pytest.approx(2.0 / 1.2)
    assert plan.gains.tolist() == [0.0, 0.0] and plan.slot_seconds == 0.0


def test_what_has_to_be_done_first_is_part_of_every_size():
    table = Table(np.array([1.0, 1.5]), 1.0, 0.1)
    later = table.after(0.5)
    assert later.seconds.tolist() == [1.5, 2.0] and (later.expected, later.token_seconds) == (1.0, 0.1)
    assert table.seconds.tolist() == [1.0, 1.5]


def test_a_slots_price_is_what_the_last_tokens_cost():
    plan = sweep(Table(np.array([1.0, 1.1, 1.2, 1.3, 1.4]), 2.0), np.full((2, 2), 1.0))
    assert plan.count == 4 and plan.slot_seconds == pytest.approx(0.1)


# ---- giving rows more, and taking all back


@given(BATCHES, tables(), st.data())
def test_raised_rows_get_what_they_need_and_the_others_keep_theirs(chances, table, data):
    survival = survival_of(chances, 4)
    plan = sweep(table, survival)
    rows = np.array(data.draw(st.lists(st.booleans(), min_size=len(chances), max_size=len(chances))))
    wanted = np.array(data.draw(st.lists(st.floats(0.0, 4.0), min_size=len(chances), max_size=len(chances))))
    before, speed_before = plan.depths.copy(), plan.speed
    if not plan.raise_to(rows, wanted):
        assert plan.depths.tolist() == before.tolist() and plan.speed == speed_before, "no room, nothing changed"
        return
    check(plan, table, survival)
    assert (plan.depths[~rows] == before[~rows]).all() and (plan.depths >= before).all()
    most = np.count_nonzero(survival, axis=1)
    for row in np.flatnonzero(rows & (plan.depths > before)):
        depth = int(plan.depths[row])
        assert survival[row, : depth - 1].sum() < wanted[row], "no deeper than needed"
    enough = (plan.gains >= wanted - 1e-9) | (plan.depths == most)
    assert enough[rows].all()


@given(BATCHES, tables(), st.floats(0.05, 12.0))
def test_within_takes_the_best_smaller_count_that_keeps_to_the_time(chances, table, limit):
    survival = survival_of(chances, 4)
    plan = sweep(table, survival)
    assume(plan.count > 0)
    # The greedy plans of every count: what a smaller plan may look like.
    order = np.sort(survival[survival > 0])[::-1]
    expected = table.expected + np.concatenate([[0.0], np.cumsum(order)])
    seconds = table.seconds[: plan.count] + table.token_seconds * expected[: plan.count]
    allowed = [n for n in range(plan.count) if seconds[n] <= limit]
    before = plan.count
    plan.within(limit)
    assert plan.count < before
    check(plan, table, survival)
    if allowed:
        assert plan.speed == pytest.approx(max(expected[n] / seconds[n] for n in allowed))
        assert plan.seconds <= limit + 1e-9
    else:
        assert plan.count == 0 and not plan.depths.any()

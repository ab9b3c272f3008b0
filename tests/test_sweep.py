"""The arithmetic of a batch against looking at every choice there is."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outpace.speculation.sweep import Plan, Table, survival

Survival = list[list[float]]  # of each row, the chance that each of its tokens is reached and accepted


def survivals(chances: list[list[float]]) -> Survival:
    """From chances that a token is accepted if those before it were."""
    return [survival(row) for row in chances]


def speed(table: Table, rows: Survival, depths: tuple[int, ...]) -> float:
    expected = table.expected + sum(sum(row[:depth]) for row, depth in zip(rows, depths, strict=True))
    return expected / (table.seconds[sum(depths)] + table.token_seconds * expected)


def best_speed(table: Table, rows: Survival) -> float:
    """Over every vector of depths that fits."""
    choices = product(*(range(len(row) + 1) for row in rows))
    return max(speed(table, rows, depths) for depths in choices if sum(depths) < len(table.seconds))


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
    return Table(seconds, draw(st.floats(1.0, 6.0)), draw(st.sampled_from([0.0, 0.05, 1.0])))


@given(BATCHES, tables())
def test_no_choice_of_depths_is_faster(chances, table):
    rows = survivals(chances)
    plan = Plan(table, rows)
    assert plan.speed == pytest.approx(best_speed(table, rows))


@given(BATCHES, tables())
def test_the_plan_says_what_its_depths_come_to(chances, table):
    rows = survivals(chances)
    plan = Plan(table, rows)
    check(plan, table, rows)


def check(plan: Plan, table: Table, rows: Survival) -> None:
    assert plan.speed == pytest.approx(speed(table, rows, tuple(plan.depths)))
    gains = [sum(row[:depth]) for row, depth in zip(rows, plan.depths, strict=True)]
    assert plan.gains == pytest.approx(gains)
    assert plan.most_gains == pytest.approx([sum(row) for row in rows])
    expected = table.expected + sum(gains)
    assert plan.seconds == pytest.approx(table.seconds[sum(plan.depths)] + table.token_seconds * expected)
    assert all(depth <= len(row) for depth, row in zip(plan.depths, rows, strict=True))


@given(BATCHES, tables())
def test_tokens_are_taken_likeliest_first_and_never_without_those_before(chances, table):
    """Depths are counts, so a prefix is taken of every row: it must hold the likeliest tokens of all."""
    rows = survivals(chances)
    plan = Plan(table, rows)
    taken = [chance for row, depth in zip(rows, plan.depths, strict=True) for chance in row[:depth]]
    left = [chance for row, depth in zip(rows, plan.depths, strict=True) for chance in row[depth:]]
    assert len(taken) == plan.count
    assert not taken or not left or min(taken) >= max(left)


def test_equal_chances_keep_the_order_of_the_draft():
    plan = Plan(Table([1.0, 1.0, 1.0, 9.0], 2.0), [[1.0] * 3] * 2)
    assert plan.count == 2 and sum(plan.depths) == 2


def test_free_tokens_are_all_taken_and_dear_ones_left():
    rows = survivals([[0.3] * 4])
    assert Plan(Table([1.0] * 5, 1.0), rows).depths == [4]
    assert Plan(Table([1.0, 2.0, 3.0, 4.0, 5.0], 1.0), rows).depths == [0]


def test_a_step_up_is_not_the_end_of_the_stairs():
    """The second token costs as much as two steps; up to the eighth no more is paid, and together they are worth it."""
    table = Table([1.0, *[1.9] * 7, 9.0], 1.0)
    assert Plan(table, survivals([[0.85] * 8])).depths == [7]
    assert Plan(table, survivals([[0.4] * 8])).depths == [0]


def test_no_more_is_taken_than_there_is_room_for():
    assert Plan(Table([1.0] * 3, 2.0), [[1.0] * 4] * 2).count == 2
    assert Plan(Table([1.0], 2.0), [[1.0] * 4] * 2).count == 0


@pytest.mark.parametrize("rows", [[[], []], [[0.0] * 4] * 2], ids=["none", "hopeless"])
def test_no_guess_is_a_plain_step(rows):
    table = Table([1.0] * 9, 2.0, 0.1)
    plan = Plan(table, rows)
    assert plan.count == 0 and plan.speed == table.plain_speed == pytest.approx(2.0 / 1.2)
    assert plan.gains == [0.0, 0.0] and plan.slot_seconds == 0.0


def test_what_has_to_be_done_first_is_part_of_every_size():
    table = Table([1.0, 1.5], 1.0, 0.1)
    later = table.after(0.5)
    assert [later.total(count, 1.0) for count in (0, 1)] == pytest.approx([1.6, 2.1])
    assert (later.expected, later.token_seconds) == (1.0, 0.1)
    assert list(table.seconds) == [1.0, 1.5]


def test_a_slots_price_is_what_the_last_tokens_cost():
    plan = Plan(Table([1.0, 1.1, 1.2, 1.3, 1.4], 2.0), [[1.0] * 2] * 2)
    assert plan.count == 4 and plan.slot_seconds == pytest.approx(0.1)


# ---- giving rows more, and taking all back


@given(BATCHES, tables(), st.data())
def test_raised_rows_get_what_they_need_and_the_others_keep_theirs(chances, table, data):
    rows = survivals(chances)
    plan = Plan(table, rows)
    wanted = data.draw(st.dictionaries(st.sampled_from(range(len(rows))), st.floats(0.0, 4.0)))
    before, speed_before = list(plan.depths), plan.speed
    if not plan.raise_to(wanted):
        assert plan.depths == before and plan.speed == speed_before, "no room, nothing changed"
        return
    check(plan, table, rows)
    for row, (depth, depth_before) in enumerate(zip(plan.depths, before, strict=True)):
        if row not in wanted:
            assert depth == depth_before
            continue
        assert depth >= depth_before
        assert depth == len(rows[row]) or plan.gains[row] >= wanted[row] - 1e-9
        if depth > depth_before:
            assert sum(rows[row][: depth - 1]) < wanted[row], "no deeper than needed"


@given(BATCHES, tables(), st.floats(0.05, 12.0))
def test_within_takes_the_best_smaller_count_that_keeps_to_the_time(chances, table, limit):
    rows = survivals(chances)
    plan = Plan(table, rows)
    assume(plan.count > 0)
    # The greedy plans of every count: what a smaller plan may look like.
    likeliest = sorted((chance for row in rows for chance in row), reverse=True)
    expected = [table.expected + sum(likeliest[:count]) for count in range(plan.count)]
    seconds = [table.total(count, expected[count]) for count in range(plan.count)]
    allowed = [count for count in range(plan.count) if seconds[count] <= limit]
    before = plan.count
    plan.within(limit)
    assert plan.count < before
    check(plan, table, rows)
    if allowed:
        assert plan.speed == pytest.approx(max(expected[count] / seconds[count] for count in allowed))
        assert plan.seconds <= limit + 1e-9
    else:
        assert plan.count == 0 and not any(plan.depths)


def test_a_plan_without_tokens_has_nothing_to_give_back():
    plan = Plan(Table([1.0, 9.0], 1.0), [[0.5]])
    plan.within(0.5)
    assert plan.count == 0 and plan.depths == [0] and plan.seconds == 1.0

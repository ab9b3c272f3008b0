"""Cost curves: measured sizes are kept, and observed steps correct them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.speculation.costs.curves import Costs, DraftCosts, StepCosts
from outpace.speculation.costs.timing import DraftTiming

POINTS = st.dictionaries(st.integers(1, 300), st.floats(1e-4, 10.0), min_size=1, max_size=8)


# ---- the curve


def test_measured_sizes_cost_what_was_measured():
    costs = StepCosts({1: 1.0, 2: 1.5, 4: 1.6})
    assert [costs.seconds(1, n) for n in (1, 2, 4)] == [1.0, 1.5, 1.6]


def test_sizes_between_lie_on_a_straight_line():
    costs = StepCosts({1: 1.0, 4: 4.0, 8: 6.0})
    assert [costs.seconds(1, n) for n in (2, 3, 5, 6, 7)] == pytest.approx([2.0, 3.0, 4.5, 5.0, 5.5])


def test_sizes_beyond_go_on_as_the_last_line_went():
    costs = StepCosts({1: 100.0, 4: 4.0, 8: 6.0})
    assert [costs.seconds(1, n) for n in (9, 10, 108)] == pytest.approx([6.5, 7.0, 56.0])


def test_more_tokens_are_never_cheaper_beyond_what_was_measured():
    costs = StepCosts({4: 6.0, 8: 5.0})
    assert [costs.seconds(1, n) for n in (8, 9, 100)] == [5.0, 5.0, 5.0]


def test_fewer_tokens_than_measured_cost_as_much_as_the_fewest_measured():
    assert StepCosts({2: 1.5, 4: 3.0}).seconds(1, 1) == 1.5


def test_one_measured_size_stands_for_all():
    costs = StepCosts({4: 2.0})
    assert [costs.seconds(1, n) for n in (1, 4, 9)] == [2.0, 2.0, 2.0]


def test_a_staircase_stays_a_staircase():
    stairs = {n: float(-(-n // 8)) for n in range(1, 33)}
    costs = StepCosts(stairs)
    assert [costs.seconds(1, n) for n in range(1, 33)] == list(stairs.values())
    assert costs.by_tokens(1, 1, 32) == list(stairs.values())
    for _ in range(20):  # observations confirm the curve
        for n in (7, 8, 9, 16, 17):
            costs.observe(1, n, 0.0, stairs[n])
    assert [costs.seconds(1, n) for n in range(1, 33)] == pytest.approx(list(stairs.values()))


def test_a_step_up_inside_a_measured_stretch_is_found_by_running_there():
    """Calibration measured 8 and 16 tokens; steps of 9 tokens show that these already cost as much as 16."""
    costs = StepCosts({1: 1.0, 8: 1.0, 16: 2.0})
    for _ in range(200):
        costs.observe(1, 9, 0.0, 2.0)
        for known, seconds in ((1, 1.0), (8, 1.0), (16, 2.0)):
            costs.observe(1, known, 0.0, seconds)
    assert costs.seconds(1, 9) == pytest.approx(2.0, rel=0.05)
    assert costs.seconds(1, 8) == pytest.approx(1.0, rel=0.05), "its neighbours are as they were"


def test_rows_and_context_add_to_the_curve():
    costs = StepCosts(
        {1: 1.0, 8: 8.0},
        row_seconds=0.5,
        context_seconds=0.02,
        row_context_seconds=0.01,
        token_context_seconds=0.001,
    )
    assert costs.seconds(1, 4) == pytest.approx(4.0), "the first row and an empty cache are part of the curve"
    assert costs.seconds(3, 4) == pytest.approx(4.0 + 2 * 0.5)
    assert costs.seconds(3, 4, 100.0) == pytest.approx(5.0 + 100 * (0.02 + 3 * 0.01 + 4 * 0.001))


@given(POINTS, st.integers(1, 8), st.integers(1, 40), st.integers(0, 40), st.floats(0, 500))
def test_all_sizes_at_once_are_the_sizes_one_by_one(points, rows, least, further, context):
    costs = StepCosts(
        points, row_seconds=0.1, context_seconds=1e-2, row_context_seconds=1e-3, token_context_seconds=1e-4
    )

    def one_by_one() -> list[float]:
        return [costs.seconds(rows, n, context) for n in range(least, least + further + 1)]

    assert costs.by_tokens(rows, least, least + further, context) == pytest.approx(one_by_one())
    costs.observe(rows, least, context, 0.5)
    assert costs.by_tokens(rows, least, least + further, context) == pytest.approx(one_by_one(), rel=0.03)
    for _ in range(15):
        costs.observe(rows, least, context, 0.5)
    assert costs.by_tokens(rows, least, least + further, context) == pytest.approx(one_by_one()), "in the long run too"


@pytest.mark.parametrize("tokens", [4, 5])
def test_what_one_size_was_found_to_cost_reaches_all_sizes_at_once_before_long(tokens):
    costs = StepCosts({1: 1.0, 4: 1.0, 8: 1.0})
    before = costs.by_tokens(1, 1, 8)
    for _ in range(40):
        costs.observe(1, tokens, 0.0, 3.0 * costs.seconds(1, 1))
        costs.observe(1, 1, 0.0, costs.seconds(1, 8))
    after = costs.by_tokens(1, 1, 8)
    assert after[tokens - 1] / after[0] > 1.3 * before[tokens - 1] / before[0]


def test_nothing_measured_is_no_curve():
    with pytest.raises(AssertionError, match="nothing has been measured"):
        StepCosts({})


# ---- correction


def test_a_machine_that_became_slower_is_slower_at_every_size():
    costs = StepCosts({1: 1.0, 8: 2.0, 64: 9.0})
    for _ in range(100):
        for n, seconds in ((1, 1.0), (8, 2.0)):
            costs.observe(1, n, 0.0, 1.5 * seconds)
    assert [costs.seconds(1, n) for n in (1, 8)] == pytest.approx([1.5, 3.0], rel=0.02)
    assert costs.seconds(1, 64) == pytest.approx(13.5, rel=0.1), "also where no step ran since"


def test_drift_is_noticed_within_some_steps():
    costs = StepCosts({1: 1.0, 8: 2.0})
    needed = 0
    while costs.seconds(1, 1) < 1.2:
        costs.observe(1, 1, 0.0, 1.3)
        needed += 1
        assert needed < 50
    assert needed > 1, "one step proves nothing"


def test_one_size_that_was_measured_wrong_is_corrected_alone():
    costs = StepCosts({1: 1.0, 4: 3.0, 8: 2.0, 16: 3.0})
    truth = {1: 1.0, 4: 1.5, 8: 2.0, 16: 3.0}
    for _ in range(300):
        for n, seconds in truth.items():
            costs.observe(1, n, 0.0, seconds)
    assert [costs.seconds(1, n) for n in truth] == pytest.approx(list(truth.values()), rel=0.03)


def test_a_step_disturbed_by_something_else_moves_little():
    costs = StepCosts({1: 1.0, 8: 2.0})
    costs.observe(1, 1, 0.0, 1000.0)
    disturbed = costs.seconds(1, 1)
    assert disturbed < 1.2
    twice = StepCosts({1: 1.0, 8: 2.0})
    twice.observe(1, 1, 0.0, 2.0)
    assert disturbed == pytest.approx(twice.seconds(1, 1)), "a factor of 1000 has no more effect than a factor of 2"


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_clock_that_stood_still_says_nothing(seconds):
    costs = StepCosts({1: 1.0, 8: 2.0})
    costs.observe(1, 1, 0.0, seconds)
    assert costs.points == {1: 1.0, 8: 2.0}


def test_a_prompts_chunk_becomes_no_point_of_the_curve():
    costs = StepCosts({1: 1.0, 8: 2.0})
    costs.observe(1, 4000, 0.0, costs.seconds(1, 4000))
    assert set(costs.points) == {1, 8}


def test_costs_do_not_share_the_points_they_were_made_of():
    points = {1: 1.0}
    StepCosts(points).observe(1, 1, 0.0, 1.9)
    assert points == {1: 1.0}


# ---- a whole step


def whole() -> Costs:
    passes = StepCosts({1: 0.2, 16: 0.5}, row_seconds=0.01, context_seconds=1e-3, row_context_seconds=1e-4)
    return Costs(
        target=StepCosts({1: 1.0, 16: 4.0}, row_seconds=0.1),
        drafts={
            "draft": DraftCosts(passes, StepCosts({1: 0.2, 64: 0.6}), draw_seconds=0.003),
            "head": DraftCosts(passes, first=StepCosts({1: 0.3})),
            "other": DraftCosts(StepCosts({1: 0.3, 16: 0.4}), one_pass=True),
            "suffix": DraftCosts(lookup_seconds=2e-5),
            "ngram": DraftCosts(lookup_seconds=1e-5),
        },
        token_seconds=0.02,
        schedule_seconds=0.05,
    )


def test_a_plain_step_is_the_models_part_and_the_hosts():
    costs = whole()
    assert costs.plain_seconds(4, 30.0) == pytest.approx(costs.target.seconds(4, 4, 30.0) + 0.05 + 4 * 0.02)


def test_drafting_is_one_pass_for_every_token():
    draft = whole().drafts["draft"]
    assert draft.passes is not None
    each = draft.passes.seconds(3, 3, 30.0)
    assert draft.seconds(3, 1, 30.0) == pytest.approx(each + 3 * 0.003)
    assert draft.seconds(3, 4, 30.0) == pytest.approx(4 * each + 12 * 0.003)


def test_drafting_in_one_pass_is_one_over_all_tokens():
    draft = whole().drafts["other"]
    assert draft.passes is not None
    for depth in (1, 4):
        assert draft.seconds(3, depth, 30.0) == pytest.approx(draft.passes.seconds(3, 3 * depth, 30.0))


def test_a_lookup_costs_the_same_for_each_request_however_deep():
    lookup = whole().drafts["suffix"]
    assert lookup.seconds(3, 1, 30.0) == lookup.seconds(3, 16, 900.0) == pytest.approx(3 * 2e-5)
    assert lookup.catch_up_seconds(500) == 0.0


def test_catching_up_is_priced_by_its_own_curve():
    """A verifying pass needs the logits of every token, a catch-up pass only the last ones."""
    passes, catch_up = StepCosts({1: 1.0, 101: 21.0}), StepCosts({1: 1.0, 101: 6.0})
    assert DraftCosts(passes, catch_up).catch_up_seconds(100) == pytest.approx(5.0)
    assert DraftCosts(passes, catch_up).catch_up_seconds(90, 11) == pytest.approx(4.5), "beside eleven of other rows"
    assert DraftCosts(passes).catch_up_seconds(100) == pytest.approx(20.0), "the best that is known"
    assert DraftCosts(passes, catch_up).catch_up_seconds(0) == 0.0


def test_the_first_sight_of_a_host_cost_sets_it_and_later_ones_move_it():
    costs = Costs(target=StepCosts({1: 1.0}), drafts={"suffix": DraftCosts(), "draft": DraftCosts(StepCosts({1: 1.0}))})
    suffix, draft = costs.drafts["suffix"], costs.drafts["draft"]
    suffix.observe_lookups(4, 0.8)
    draft.observe(DraftTiming(draw_seconds=0.4, num_drawn=2))
    costs.observe_host(schedule_seconds=0.3, verify_seconds=0.6, num_emitted=3)
    assert (suffix.lookup_seconds, draft.draw_seconds) == pytest.approx((0.2, 0.2))
    assert (costs.schedule_seconds, costs.token_seconds) == pytest.approx((0.3, 0.2))
    suffix.observe_lookups(1, 0.3)
    draft.observe(DraftTiming(draw_seconds=0.3, num_drawn=1))
    assert 0.2 < suffix.lookup_seconds < 0.3 and 0.2 < draft.draw_seconds < 0.3


def test_one_interrupted_moment_does_not_set_a_host_cost():
    costs = Costs(target=StepCosts({1: 1.0}), drafts={"suffix": DraftCosts(lookup_seconds=1e-5)}, schedule_seconds=1e-4)
    costs.drafts["suffix"].observe_lookups(1, 10.0)
    costs.observe_host(schedule_seconds=10.0, verify_seconds=0.0, num_emitted=0)
    assert costs.drafts["suffix"].lookup_seconds < 2e-5 and costs.schedule_seconds < 2e-4


# ---- the timing of a draft


def test_passes_and_catching_up_are_learned_apart():
    draft = DraftCosts(StepCosts({1: 1.0, 16: 1.0}), StepCosts({1: 1.0, 100: 2.0}))
    for _ in range(60):
        draft.observe(DraftTiming(forwards=[(1, 1, 0.0, 1.5)] * 4))
    assert draft.seconds(1, 4, 0.0) == pytest.approx(4 * 1.5, rel=0.02)
    assert draft.catch_up_seconds(99) == pytest.approx(1.0)
    for _ in range(60):
        draft.observe(DraftTiming(catch_up_seconds=4.0, num_caught_up=100))
    assert draft.catch_up_seconds(99) > 1.5
    assert draft.seconds(1, 4, 0.0) == pytest.approx(4 * 1.5, rel=0.02)


def test_a_first_pass_of_its_own_is_priced_once_and_learned_with_the_others():
    """The time of such a draft is known as a whole: first pass and others keep their ratio."""
    draft = DraftCosts(StepCosts({1: 1.0}), first=StepCosts({1: 3.0}))
    assert [draft.seconds(1, depth, 0.0) for depth in (1, 2, 4)] == [3.0, 4.0, 6.0]
    for _ in range(60):
        for depth in (1, 4):
            draft.observe(DraftTiming(forwards=[(1, 1, 0.0, 2 * (2.0 + depth) / depth)] * depth))
    assert [draft.seconds(1, depth, 0.0) for depth in (1, 2, 4)] == pytest.approx([6.0, 8.0, 12.0], rel=0.02)


def test_a_lookup_has_no_passes_to_learn_of():
    lookup = DraftCosts(lookup_seconds=1e-5)
    before = lookup.as_dict()
    lookup.observe(DraftTiming(forwards=[(1, 1, 0.0, 1.5)], draw_seconds=1.0, num_drawn=1))
    assert lookup.as_dict() == before


def test_what_catching_up_in_one_go_took_is_what_its_passes_do_not_usually_take():
    timing = DraftTiming(undivided=(8, 3, 100.0, 1.0), num_caught_up=500)
    assert timing.divide(lambda rows, tokens, context: 0.1) == pytest.approx(0.1)
    assert timing.catch_up_seconds == pytest.approx(1.0 - 3 * 0.1)
    assert timing.divide(lambda rows, tokens, context: 0.1) == 0.0
    assert timing.catch_up_seconds == pytest.approx(0.7)


def test_passes_that_were_faster_than_usual_leave_nothing_for_catching_up():
    timing = DraftTiming(undivided=(8, 4, 100.0, 0.2), num_caught_up=500)
    assert timing.divide(lambda rows, tokens, context: 0.1) == pytest.approx(0.05)
    assert timing.catch_up_seconds == pytest.approx(0.0)


# ---- saved on disk


def test_saved_costs_come_back_as_they_were():
    costs = whole()
    for n in (1, 3, 5):
        costs.target.observe(1, n, 12.0, 1.7)
    back = Costs.from_dict(json.loads(json.dumps(costs.as_dict())))
    for rows, tokens, context in ((1, 1, 0.0), (2, 7, 100.0), (4, 40, 512.0)):
        seconds = costs.target.seconds(rows, tokens, context)
        assert back.target.seconds(rows, tokens, context) == pytest.approx(seconds, rel=0.03), (
            "sizes between follow late"
        )
    assert back.target.points == pytest.approx(costs.target.points)
    assert back.plain_seconds(4, 10.0) == pytest.approx(costs.plain_seconds(4, 10.0))
    assert back.drafts.keys() == costs.drafts.keys()
    for name, draft in costs.drafts.items():
        assert back.drafts[name].seconds(2, 3, 10.0) == pytest.approx(draft.seconds(2, 3, 10.0))
        assert back.drafts[name].catch_up_seconds(50) == pytest.approx(draft.catch_up_seconds(50))


def test_costs_without_proposers_come_back_without_any():
    costs = Costs(target=StepCosts({1: 1.0}))
    assert Costs.from_dict(json.loads(json.dumps(costs.as_dict()))).drafts == {}


def damaged(path: str, value: Any) -> dict[str, Any]:
    saved: dict[str, Any] = json.loads(json.dumps(whole().as_dict()))
    *parents, last = path.split(".")
    place = saved
    for name in parents:
        place = place[name]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return saved


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("target", KeyError),
        ("target", None),
        ("target.points", {}),
        ("target.points", [1.0, 2.0]),
        ("target.points.1", 0.0),
        ("target.points.1", -1.0),
        ("target.points.1", math.nan),
        ("target.points.1", math.inf),
        ("target.points.1", "quick"),
        ("target.points.1", None),
        ("target.points.0", 1.0),
        ("target.points.one", 1.0),
        ("target.points.1000000000000", 1.0),
        ("target.row_seconds", -0.1),
        ("target.row_seconds", KeyError),
        ("target.context_seconds", -0.1),
        ("target.context_seconds", KeyError),
        ("target.token_context_seconds", math.nan),
        ("drafts", KeyError),
        ("drafts", None),
        ("drafts.draft", None),
        ("drafts.draft.passes", KeyError),
        ("drafts.draft.passes.points.1", -1.0),
        ("drafts.head.first.points.1", math.nan),
        ("drafts.draft.catch_up", KeyError),
        ("drafts.draft.catch_up.points.1", math.nan),
        ("drafts.draft.one_pass", KeyError),
        ("drafts.draft.draw_seconds", math.inf),
        ("drafts.suffix.lookup_seconds", None),
        ("drafts.suffix.lookup_seconds", -1.0),
        ("drafts.suffix.lookup_seconds", math.nan),
        ("drafts.suffix.lookup_seconds", KeyError),
        ("token_seconds", "quick"),
        ("schedule_seconds", KeyError),
    ],
    ids=str,
)
def test_damaged_costs_are_refused(path, value):
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        Costs.from_dict(damaged(path, value))


def test_what_rows_add_is_corrected_by_steps_of_many_rows():
    """Calibrated rows are four times too expensive: steps of 32 rows correct that and nothing else."""
    truth = StepCosts({1: 1.0, 32: 1.2, 160: 1.6}, row_seconds=0.002, row_context_seconds=1e-6)
    costs = StepCosts({1: 1.0, 32: 1.2, 160: 1.6}, row_seconds=0.008, row_context_seconds=4e-6)
    for _ in range(60):
        costs.observe(32, 32, 300.0, truth.seconds(32, 32, 300.0))
    assert costs.seconds(32, 160, 300.0) == pytest.approx(truth.seconds(32, 160, 300.0), rel=0.03)
    assert costs.seconds(1, 1, 300.0) == pytest.approx(truth.seconds(1, 1, 300.0), rel=0.05)

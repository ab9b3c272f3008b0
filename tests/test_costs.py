"""What a step costs: straight lines between what was measured, never cheaper for more beyond it, and no trace left."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from outpace.backends.base import Capacity
from outpace.config import SamplingParams
from outpace.core import StepPlan
from outpace.speculation import costs
from outpace.speculation.costs import CALIBRATED_SIZES, CostCurve
from tests.fakes import FakeModel, FakeRunner, fake_engine, runner_of


def fake_runner(*, max_context: int = 64, max_step_tokens: int = 64) -> FakeRunner:
    return FakeRunner(FakeModel(), Capacity(4, 64, max_context, max_step_tokens))


class Clock:
    """Time that passes only inside a forward pass: a second for each, and a tenth for every token in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, runner: FakeRunner, *, extra: dict[int, float]) -> None:
        self.now = 0.0
        self._forward, self._extra, self._num = runner.forward, extra, 0
        monkeypatch.setattr(runner, "forward", self.forward)
        monkeypatch.setattr(costs, "perf_counter", lambda: self.now)

    def forward(self, plan: StepPlan) -> NDArray[np.float32]:
        self.now += 1.0 + 0.1 * plan.num_tokens + self._extra.get(self._num, 0.0)
        self._num += 1
        return self._forward(plan)


def test_measured_sizes_cost_what_was_measured():
    curve = CostCurve({1: 1.0, 2: 1.5, 4: 1.6})
    assert [curve.seconds(n) for n in (1, 2, 4)] == [1.0, 1.5, 1.6]


def test_sizes_between_lie_on_a_straight_line():
    curve = CostCurve({1: 1.0, 4: 4.0, 8: 6.0})
    assert [curve.seconds(n) for n in (2, 3, 5, 6, 7)] == pytest.approx([2.0, 3.0, 4.5, 5.0, 5.5])


def test_sizes_beyond_go_on_as_the_last_line_went():
    curve = CostCurve({1: 100.0, 4: 4.0, 8: 6.0})
    assert [curve.seconds(n) for n in (9, 10, 108)] == pytest.approx([6.5, 7.0, 56.0])


def test_more_tokens_are_never_cheaper_beyond_what_was_measured():
    curve = CostCurve({4: 6.0, 8: 5.0})
    assert [curve.seconds(n) for n in (8, 9, 100)] == [5.0, 5.0, 5.0]


def test_fewer_tokens_than_measured_cost_as_much_as_the_fewest_measured():
    assert CostCurve({2: 1.5, 4: 3.0}).seconds(1) == 1.5


def test_one_measured_size_stands_for_all():
    curve = CostCurve({4: 2.0})
    assert [curve.seconds(n) for n in (1, 4, 9)] == [2.0, 2.0, 2.0]


def test_a_size_seen_for_the_first_time_counts_whole_and_a_known_one_a_tenth():
    curve = CostCurve({1: 1.0})
    curve.observe(3, 2.0)
    assert curve.seconds(3) == 2.0
    curve.observe(3, 12.0)
    assert curve.seconds(3) == pytest.approx(3.0)
    assert curve.seconds(1) == 1.0


def test_a_machine_that_became_slower_is_believed_after_some_steps():
    curve = CostCurve({1: 1.0})
    for _ in range(50):
        curve.observe(1, 2.0)
    assert curve.seconds(1) == pytest.approx(2.0, abs=0.01)


def test_a_curve_does_not_share_the_points_it_was_made_of():
    points = {1: 1.0}
    CostCurve(points).observe(1, 99.0)
    assert points == {1: 1.0}


def test_nothing_measured_is_known_to_be_nothing():
    assert not CostCurve().is_known
    assert CostCurve({1: 1.0}).is_known
    with pytest.raises(AssertionError, match="nothing has been measured"):
        CostCurve().seconds(1)


def test_measuring_takes_the_fastest_of_each_size_and_not_the_first_pass(monkeypatch):
    runner = fake_runner()
    # Pass 0 warms up; 1 to 3 are of one token, 4 to 6 of two: the first pass and one of each size are disturbed.
    Clock(monkeypatch, runner, extra={0: 50.0, 2: 9.0, 4: 9.0})
    curve = CostCurve.measure(runner)
    assert [curve.seconds(n) for n in CALIBRATED_SIZES] == pytest.approx([1.1, 1.2, 1.4, 1.8, 2.6])


def test_measuring_leaves_no_trace():
    runner = fake_runner()
    CostCurve.measure(runner)
    assert runner.num_forwards > 0
    assert runner.sequences == {} and runner.num_cells == 0


@pytest.mark.parametrize(
    ("room", "sizes"), [({"max_step_tokens": 5}, {1, 2, 4}), ({"max_context": 5}, {1, 2}), ({"max_context": 2}, {1})]
)
def test_measuring_stays_within_the_runners_capacity(room, sizes):
    runner = fake_runner(**room)
    CostCurve.measure(runner)
    assert {sum(step) for step in runner.steps} == sizes


def test_an_engine_measures_once_and_before_its_first_request_only():
    engine = fake_engine(speculation="auto")
    assert not engine.costs.is_known
    engine.submit([97] * 20, SamplingParams(max_tokens=4))
    num_forwards = runner_of(engine).num_forwards
    assert engine.costs.is_known and num_forwards == 1 + 3 * len(CALIBRATED_SIZES)
    engine.submit([97] * 20, SamplingParams(max_tokens=4))
    assert runner_of(engine).num_forwards == num_forwards


def test_an_engine_with_speculation_off_measures_nothing():
    engine = fake_engine(speculation="off")
    engine.submit([97] * 20, SamplingParams(max_tokens=4))
    assert runner_of(engine).num_forwards == 0


def test_an_interrupted_measurement_leaves_no_trace(monkeypatch):
    runner = fake_runner()

    def interrupted(plan: StepPlan) -> NDArray[np.float32]:
        forward(plan)
        raise KeyboardInterrupt

    forward = runner.forward
    monkeypatch.setattr(runner, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        CostCurve.measure(runner)
    assert runner.num_cells == 0

"""Whether a run can have a verdict is said before it; a run that can, has one."""

from __future__ import annotations

from collections import Counter

import pytest

from outpace.bench.forecast import forecast
from outpace.bench.loads import Closed, Load, Open
from outpace.bench.plan import CellPlan, Plan, grid
from outpace.bench.session import Session
from outpace.bench.settings import AUTO, PLAIN, fixed
from outpace.bench.verdict import MIN_UNITS
from outpace.bench.workloads import Prompt
from tests.bench_helper import engine_target

BOTH = (PLAIN, AUTO)


def plan(*loads: Load, blocks: int = 12, budget: float = 40.0, temperatures: tuple[float, ...] = (0.0, 1.0)) -> Plan:
    cells = grid(temperatures, loads, BOTH, lambda load: blocks)
    sweep = CellPlan(0.0, loads[0], (*BOTH, fixed("suffix", 2)), 6, "sweep")
    return Plan((sweep, *cells), {"made": 1.0}, budget)


def test_a_budget_that_is_enough_needs_no_note_and_covers_all_cells_evenly():
    expected = forecast(plan(Closed(1), Closed(4)), 0.5, 40.0)
    assert expected.is_feasible and expected.note is None
    assert Counter(i for i, _ in expected.first) == {1: 2, 2: 2, 3: 2, 4: 2}, "the sweep is no part of the verdict"


def test_a_short_budget_takes_the_cheapest_cells_first_and_says_so():
    """Eight blocks over all cells take 24 s, those of one request at a time 16 s."""
    expected = forecast(plan(Closed(1), Closed(4)), 1.0, 20.0)
    assert expected.is_feasible and {i for i, _ in expected.first} == {1, 3}
    assert expected.note == (
        "the time budget of 40 s is short, so these cells come first: temperature 0, 1 at once; "
        "temperature 1, 1 at once"
    )


def test_a_budget_that_is_too_short_is_said_with_one_that_is_not():
    made = plan(Closed(1), budget=10.0)
    expected = forecast(made, 2.0, 9.0)
    assert not expected.is_feasible
    assert expected.note == (
        "there will be no verdict: it needs 8 paired blocks of requests, which take about 32 s here, and 9 s of the "
        "time budget are left; --time-budget 48 or a smaller --max-tokens gives one"
    )
    assert forecast(made, 2.0, 48.0).is_feasible


@pytest.mark.parametrize(("load", "requests"), [(Closed(1), 8), (Closed(4), 64), (Open(2.0), 128)])
def test_too_few_planned_requests_are_said_with_how_many_would_do(load, requests):
    few = plan(load, blocks=3, temperatures=(0.0,))
    note = forecast(few, 0.001, 1e6).note
    assert note is not None and note.endswith(f"--requests {requests} or more gives one")
    enough = plan(load, blocks=requests // load.block_size, temperatures=(0.0,))
    assert forecast(enough, 0.001, 1e6).is_feasible


def test_plain_decoding_alone_has_no_verdict():
    note = forecast(Plan(tuple(grid((0.0,), (Closed(1),), (PLAIN,), lambda load: 20)), {}, 40.0), 0.1, 40.0).note
    assert note is not None and "only plain decoding is measured" in note


# ---- a session over a fake engine, on a clock that advances by a fixed time per request


class SlowTarget:
    """Runs requests on the fake engine, and says that each takes so many seconds."""

    drafting = None

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float, later: float) -> None:
        self._real, self._seconds, self._later, self._now, self.num_runs = engine_target(), seconds, later, 0.0, 0
        self.name, self.jobs, self.describe = "slow", self._real.jobs, self._real.describe
        monkeypatch.setattr("outpace.bench.session.perf_counter", lambda: self._now)

    def warm_up(self, job, settings):
        pass

    def run(self, jobs, setting, load, seed=0):
        self.num_runs += 1
        self._now += (self._seconds if self.num_runs == 1 else self._later) * len(jobs)
        return self._real.run(jobs, setting, load, seed)

    @property
    def now(self) -> float:
        return self._now


def measured(
    monkeypatch: pytest.MonkeyPatch, made: Plan, *, seconds: float, later: float
) -> tuple[int, float, list[str]]:
    """Paired blocks of the grid, seconds and notes of a session whose first request takes `seconds`."""
    target, notes = SlowTarget(monkeypatch, seconds, later), list[str]()
    prompts = [Prompt([{"role": "user", "content": f"abcabc{i}"}], "made", max_tokens=6) for i in range(12)]
    session = Session(target, made, {"made": prompts}, on_note=notes.append)
    session.measure()
    units = sum(cell.paired.num_blocks for cell in session.cells if cell.plan.purpose == "grid")
    return units, target.now, notes


def test_a_budget_for_a_few_blocks_is_spent_on_those_of_the_verdict(monkeypatch):
    """In turn with the sweep, there would be six blocks of the grid after 38 s."""
    units, seconds, notes = measured(monkeypatch, plan(Closed(1)), seconds=2.0, later=2.0)
    assert units >= MIN_UNITS and seconds <= 40.0 and notes == []


def test_a_run_that_is_slower_than_expected_gets_more_time_for_its_verdict(monkeypatch):
    units, seconds, notes = measured(monkeypatch, plan(Closed(1)), seconds=2.0, later=3.0)
    assert units == MIN_UNITS and 40.0 < seconds < 60.0 and notes == []


def test_a_budget_that_is_a_little_short_still_gives_a_verdict(monkeypatch):
    units, seconds, [note] = measured(monkeypatch, plan(Closed(1)), seconds=3.0, later=3.0)
    assert units == MIN_UNITS and 40.0 < seconds < 60.0
    assert note.startswith("the time budget of 40 s is short, so these cells come first")


def test_a_run_that_was_said_to_have_no_verdict_ends_with_its_budget(monkeypatch):
    units, seconds, [note] = measured(monkeypatch, plan(Closed(1)), seconds=5.0, later=5.0)
    assert 0 < units < MIN_UNITS and seconds <= 40.0 + 10.0
    assert note.startswith("there will be no verdict: it needs 8 paired blocks")


def test_a_run_that_is_far_slower_than_expected_ends_after_half_its_budget_more(monkeypatch):
    units, seconds, _ = measured(monkeypatch, plan(Closed(1)), seconds=1.0, later=10.0)
    assert units < MIN_UNITS and 60.0 <= seconds <= 80.0

"""Open-loop arrivals, and latency that counts from the due time."""

from __future__ import annotations

import statistics

import pytest

from outpace.bench import engine_load
from outpace.bench.engine_load import run_load
from outpace.bench.loads import Closed, Open, arrival_times
from outpace.errors import UsageError
from tests.bench_helper import Clock, make
from tests.fakes import fake_engine


def gaps(load: Open) -> list[float]:
    times = arrival_times(load, 4000, seed=1)
    return [after - before for before, after in zip([0.0, *times], times, strict=False)]


def test_poisson_gaps_have_the_rate_and_the_spread_they_should():
    found = gaps(Open(5.0))
    assert statistics.mean(found) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(found) / statistics.mean(found) == pytest.approx(1.0, rel=0.06)


def test_bursty_gaps_have_the_same_rate_and_more_spread():
    found = gaps(Open(5.0, "bursty"))
    assert statistics.mean(found) == pytest.approx(0.2, rel=0.12)
    assert statistics.stdev(found) / statistics.mean(found) > 2.0


def test_arrivals_are_the_same_for_every_setting_and_other_for_another_seed():
    assert arrival_times(Open(2.0), 50, seed=3) == arrival_times(Open(2.0), 50, seed=3)
    assert arrival_times(Open(2.0), 50, seed=3) != arrival_times(Open(2.0), 50, seed=4)


def test_latency_counts_from_the_intended_arrival_through_a_stall(monkeypatch):
    """Requests are due while the engine hangs for two seconds. Latency from the time they could be sent would hide
    that."""
    due = [0.0, 0.5, 1.0, 1.5, 2.0]
    monkeypatch.setattr(engine_load, "arrival_times", lambda load, count, seed: due)
    engine = fake_engine(max_sequences=4, speculation="off")
    clock = Clock(monkeypatch)
    clock.stalls[2] = 2.0
    run = run_load(engine, make(5, max_tokens=3), Open(2.0))
    # The first: 0.1 for its prompt and first token, the stall, 0.1 more. The others were due during the stall.
    first, *others = run.trials
    assert first.time_to_first_token == pytest.approx(0.1)
    assert first.end_to_end == pytest.approx(2.2)
    for trial, moment in zip(others, due[1:], strict=True):
        sent_at = 2.1
        assert trial.end_to_end > sent_at - moment
        assert trial.time_to_first_token >= sent_at - moment
    assert others[0].time_to_first_token > others[-1].time_to_first_token


def test_an_idle_system_waits_for_the_next_arrival(monkeypatch):
    monkeypatch.setattr(engine_load, "arrival_times", lambda load, count, seed: [1.0, 5.0])
    engine = fake_engine(speculation="off")
    Clock(monkeypatch)
    run = run_load(engine, make(2, max_tokens=2), Open(0.5))
    assert [trial.end_to_end for trial in run.trials] == pytest.approx([0.2, 0.2])
    assert run.seconds == pytest.approx(5.2)


def test_a_closed_loop_counts_from_when_there_was_room(monkeypatch):
    engine = fake_engine(speculation="off")
    Clock(monkeypatch)
    run = run_load(engine, make(4, max_tokens=4), Closed(1))
    assert [trial.end_to_end for trial in run.trials] == pytest.approx([0.4] * 4)
    assert run.seconds == pytest.approx(1.6)


def test_a_block_holds_its_load_for_a_while():
    assert Closed(1).block_size == 1
    assert Closed(8).block_size == 16
    assert Open(4.0).block_size == 32
    assert Open(0.1).block_size == 8


def test_loads_that_cannot_be_meant():
    with pytest.raises(UsageError, match="at least 1"):
        Closed(0)
    with pytest.raises(UsageError, match="above 0"):
        Open(0.0)

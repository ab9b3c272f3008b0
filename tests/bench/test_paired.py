"""The paired runner with a fake engine: every setting gets the same requests and empty caches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outpace.bench.engine_load import run_closed
from outpace.bench.loads import Closed
from outpace.bench.paired import interleaved, measure
from outpace.bench.settings import AUTO, PLAIN, fixed, fixed_settings, parse_setting
from outpace.engine.engine import Engine
from outpace.errors import UsageError
from tests.bench_helper import engine_target, make
from tests.fakes import fake_engine, runner_of

SETTINGS = [PLAIN, AUTO, fixed("suffix", 4), fixed("draft", 3)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_setting_runs_every_request_and_says_the_same(temperature):
    paired = measure(engine_target(), make(8, temperature), SETTINGS, Closed(2))
    assert paired.num_blocks == 2
    for setting in SETTINGS:
        trials = paired.trials(setting.name)
        assert [trial.prompt_id for trial in trials] == list(range(8))
        assert all(trial.num_output == 24 and trial.finish_reason == "length" for trial in trials)
        assert paired.num_unequal(setting.name) == 0
    assert all(trial.counts.num_drafted == 0 for trial in paired.trials("off"))
    assert all(trial.counts.num_drafted > 0 for trial in paired.trials("draft:3"))
    assert (
        paired.decode_ratio("off").value == paired.throughput_ratio("off").value == paired.speedup("off").value == 1.0
    )
    assert paired.estimated_speedup("off") is None
    estimated = paired.estimated_speedup("draft:3")
    assert estimated is not None and estimated > 0


def test_no_more_than_the_concurrency_runs_at_once_and_no_less_while_there_is_work():
    for concurrency in (1, 3):
        engine = fake_engine()
        engine.calibrate()
        steps = runner_of(engine).steps
        steps.clear()
        run_closed(engine, make(7), concurrency)
        rows = [len(step) for step in steps]
        assert max(rows) == concurrency
        draining = rows[rows.index(max(rows)) :]
        assert draining[: len(draining) // 2] == [concurrency] * (len(draining) // 2)


def test_decoding_is_counted_without_the_steps_that_read_prompts():
    run = run_closed(fake_engine(), make(1, max_tokens=10), 1)
    assert run.num_tokens == 10
    assert run.decode_tokens == 9, "the first token comes with the prompt"
    assert 0 < run.decode_seconds < run.seconds
    trial = run.trials[0]
    assert trial.time_per_output_token == pytest.approx((trial.end_to_end - trial.time_to_first_token) / 9)


def test_a_setting_finds_nothing_of_what_another_left():
    """The suffix proposer drafts the same in any order of the settings: it has no answers from other runs."""
    drafted = set()
    for seed in range(4):
        target = engine_target()
        target.warm_up(make(1)[0], SETTINGS)
        runs = {setting.name: run for setting, run in interleaved(target, make(3), SETTINGS, Closed(1), seed)}
        drafted.add(tuple(trial.counts.num_drafted for trial in runs["suffix:4"].trials))
        target.llm.engine.forget()
        assert target.llm.engine.scheduler._cache.num_open_sequences == 0
    assert len(drafted) == 1


def test_settings_run_in_changing_order():
    orders = set()
    for block in range(4):
        runs = interleaved(engine_target(), make(1), SETTINGS, Closed(1), block)
        orders.add(tuple(setting.name for setting, _ in runs))
    assert len(orders) > 1
    assert all(sorted(order) == sorted(setting.name for setting in SETTINGS) for order in orders)


def test_an_interrupt_keeps_the_finished_blocks_and_leaves_a_clean_engine(monkeypatch):
    target = engine_target()
    engine = target.llm.engine
    calls = 0
    step = Engine.step

    def interrupted(self):
        nonlocal calls
        calls += 1
        if calls == 500:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    paired = measure(target, make(40), [PLAIN, AUTO], Closed(1))
    assert 0 < paired.num_blocks < 40
    assert len(paired.trials("off")) == len(paired.trials("auto")) == paired.num_blocks
    assert not engine.has_requests
    engine.scheduler.check_integrity()


def test_an_interrupt_before_the_first_block_is_an_interrupt(monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(engine_target(), make(2), [PLAIN], Closed(1))


def test_settings_are_written_as_they_are_named():
    for setting in [PLAIN, AUTO, *fixed_settings(["ngram", "suffix"], [2, 8])]:
        assert parse_setting(setting.name) == setting
    for wrong in ("on", "suffix", "suffix:0", "suffix:x", "none:2"):
        with pytest.raises(UsageError, match="a setting is off, auto, or METHOD:DEPTH"):
            parse_setting(wrong)


def test_a_request_the_engine_refuses_is_a_failure_among_the_others():
    jobs = make(3)
    jobs[1] = replace(jobs[1], tokens=[97] * 400)
    run = run_closed(fake_engine(), jobs, 2)
    assert [bool(trial.error) for trial in run.trials] == [False, True, False]
    assert "the context holds 256" in str(run.trials[1].error)
    assert run.num_tokens == 48

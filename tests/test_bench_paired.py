"""The paired runner over a fake engine: the same requests under every setting, none profiting from another."""

from __future__ import annotations

import pytest

from outpace.bench.closed_loop import Job, run_closed
from outpace.bench.paired import default_block_size, interleaved, measure
from outpace.bench.settings import AUTO, PLAIN, fixed, fixed_settings, parse_setting
from outpace.config import SamplingParams
from outpace.engine.engine import Engine
from outpace.errors import UsageError
from tests.fakes import fake_engine, runner_of

SETTINGS = [PLAIN, AUTO, fixed("suffix", 4), fixed("draft", 3)]


def make(count: int, temperature: float = 0.0, max_tokens: int = 24) -> list[Job]:
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens, ignore_eos=True) for i in range(count)
    ]
    return [Job(i, "made", [97 + i % 6, 98, 99, 97 + i % 5] * 6, each) for i, each in enumerate(params)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_setting_runs_every_request_and_says_the_same(temperature):
    paired = measure(fake_engine(), make(6, temperature), SETTINGS, concurrency=2, block_size=3)
    assert paired.num_blocks == 2
    for setting in SETTINGS:
        trials = paired.trials(setting.name)
        assert [trial.prompt_id for trial in trials] == list(range(6))
        assert all(trial.num_output == 24 and trial.finish_reason == "length" for trial in trials)
        assert paired.num_unequal(setting.name) == 0
        assert paired.decode_rate(setting.name) > 0
    assert all(trial.counts.num_drafted == 0 for trial in paired.trials("off"))
    assert all(trial.counts.num_drafted > 0 for trial in paired.trials("draft:3"))
    assert paired.decode_ratio("off").value == 1.0 and paired.total_ratio("off").value == 1.0
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
    """Under any order of the settings, the suffix proposer drafts the same: it never saw the other runs' answers."""
    drafted = set()
    for order_seed in range(4):
        engine = fake_engine()
        paired = measure(engine, make(3), SETTINGS, concurrency=1, order_seed=order_seed)
        drafted.add(tuple(trial.counts.num_drafted for trial in paired.trials("suffix:4")))
        engine.forget()
        assert engine.scheduler._cache.num_open_sequences == 0
    assert len(drafted) == 1


def test_settings_run_in_changing_order():
    orders = set()
    for block in range(4):
        runs = interleaved(fake_engine(), make(1), SETTINGS, 1, order_seed=block)
        orders.add(tuple(setting.name for setting, _ in runs))
    assert len(orders) > 1
    assert all(sorted(order) == sorted(setting.name for setting in SETTINGS) for order in orders)


def test_an_interrupt_keeps_the_finished_blocks_and_leaves_a_clean_engine(monkeypatch):
    engine = fake_engine()
    calls = 0
    step = Engine.step

    def interrupted(self):
        nonlocal calls
        calls += 1
        if calls == 500:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    paired = measure(engine, make(40), [PLAIN, AUTO], concurrency=1)
    assert 0 < paired.num_blocks < 40
    assert len(paired.trials("off")) == len(paired.trials("auto")) == paired.num_blocks
    assert not engine.has_requests
    engine.scheduler.check_integrity()


def test_an_interrupt_before_the_first_block_is_an_interrupt(monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    engine = fake_engine()
    engine.calibrate()
    monkeypatch.setattr(Engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(engine, make(2), [PLAIN], concurrency=1)


def test_settings_are_written_as_they_are_named():
    for setting in [PLAIN, AUTO, *fixed_settings(["ngram", "suffix"], [2, 8])]:
        assert parse_setting(setting.name) == setting
    for wrong in ("on", "suffix", "suffix:0", "suffix:x", "none:2"):
        with pytest.raises(UsageError, match="a setting is off, auto, or METHOD:DEPTH"):
            parse_setting(wrong)


def test_a_block_holds_the_load_for_a_while():
    assert default_block_size(1) == 1
    assert default_block_size(8) == 16

"""Calibration stays within its budget and leaves sequences empty; saved costs are reused only if they match."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outpace.backends.base import Capacity, DraftedTokens, HeadTask, LoadedModel
from outpace.config import SamplingParams, SpeculationParams
from outpace.core import MeasuredAcceptance, Row, StepPlan
from outpace.engine.engine import Engine
from outpace.kv.entries import HeadEntries
from outpace.speculation.costs import calibration
from outpace.speculation.costs import file as kept
from outpace.speculation.costs.calibration import measure, measure_head, measure_steps, warm_up_head
from outpace.speculation.costs.curves import SIZES, Costs, DraftCosts, StepCosts
from outpace.speculation.costs.file import CostFile
from outpace.speculation.proposers.base import DraftAsk
from outpace.speculation.proposers.draft_model import DraftModelProposer
from outpace.speculation.proposers.suffix import SuffixProposer
from tests.fakes import ByteTokenizer, FakeModel, FakeRunner, draft_runner_of, fake_config, fake_engine, runner_of
from tests.requests_helper import make_request

ROOMY = Capacity(max_sequences=16, cache_tokens=4096, max_context=2048, max_step_tokens=512)
FITTING = [size for size in SIZES if size <= 16 * ROOMY.max_sequences]


class TimedRunner(FakeRunner):
    """A runner with a virtual clock: `law` gives the seconds of a pass by rows, tokens and mean context."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        law: Callable[[int, int, float], float],
        capacity: Capacity = ROOMY,
        *,
        can_rewind: bool = True,
        disturbed: dict[int, float] | None = None,
    ) -> None:
        super().__init__(FakeModel(), capacity, can_rewind=can_rewind)
        self.now = 0.0
        self.peak_cells = 0
        self.entries = HeadEntries(capacity.max_sequences)  # of a head, which loses what the target loses
        self._law, self._disturbed = law, disturbed or {}
        monkeypatch.setattr(calibration, "perf_counter", lambda: self.now)

    def forward(self, plan: StepPlan) -> NDArray[np.float32]:
        context = sum(row.start for row in plan.rows) / len(plan.rows)
        self.now += self._law(len(plan.rows), plan.num_tokens, context) + self._disturbed.get(self.num_forwards, 0.0)
        logits = super().forward(plan)
        self.peak_cells = max(self.peak_cells, self.num_cells)
        return logits

    def truncate(self, seq: int, num_tokens: int) -> None:
        super().truncate(seq, num_tokens)
        self.entries.truncate(seq, num_tokens)

    def free(self, seq: int) -> None:
        super().free(seq)
        self.entries.free(seq)


def fast(rows: int, tokens: int, context: float) -> float:
    return 1e-4 + 1e-6 * tokens


# ---- measuring


def test_what_was_measured_is_what_passes_take(monkeypatch):
    runner = TimedRunner(monkeypatch, lambda rows, tokens, context: 1e-3 + 1e-4 * tokens + 5e-5 * (rows - 1))
    costs = measure_steps(runner, 10.0)
    assert set(costs.points) == set(FITTING)
    assert costs.seconds(1, 1) == pytest.approx(1.1e-3)
    assert costs.seconds(1, 100) == pytest.approx(11e-3)
    assert costs.seconds(8, 24) == pytest.approx(1e-3 + 24e-4 + 7 * 5e-5)


def context_law(step: float, row: float, token: float) -> Callable[[int, int, float], float]:
    """Steps are timed on sequences that hold a token, so one token of context is included."""
    return lambda rows, tokens, context: 1e-3 + 1e-4 * tokens + context * (step + rows * row + tokens * token)


@pytest.mark.parametrize(
    "extras",
    [(0.0, 2e-6, 3e-7), (2e-7, 2.6e-8, 0.0), (3e-7, 0.0, 1e-7), (0.0, 0.0, 4e-7), (1e-6, 1e-7, 1e-7), (0.0, 0.0, 0.0)],
    ids=str,
)
def test_what_context_adds_is_told_apart_by_step_row_and_token(monkeypatch, extras):
    runner = TimedRunner(monkeypatch, context_law(*extras))
    costs = measure_steps(runner, 10.0)
    found = (costs.context_seconds, costs.row_context_seconds, costs.token_context_seconds)
    assert found == pytest.approx(extras, rel=0.02, abs=1e-10)
    law = context_law(*extras)
    for rows, tokens, context in ((1, 1, 900.0), (4, 12, 700.0), (16, 16, 300.0)):
        assert costs.seconds(rows, tokens, context) == pytest.approx(law(rows, tokens, context), rel=0.01)


def test_what_noise_could_have_told_apart_is_given_to_rows_and_tokens(monkeypatch):
    law = context_law(1e-6, 2e-6, 3e-6)
    costs = measure_steps(TimedRunner(monkeypatch, law), 10.0)
    assert costs.context_seconds == 0.0
    for rows, tokens, context in ((1, 1, 900.0), (4, 12, 700.0), (8, 8, 300.0)):
        assert costs.seconds(rows, tokens, context) == pytest.approx(law(rows, tokens, context), rel=0.1)


def test_many_rows_attended_to_at_once_are_not_said_to_cost_as_many_times_one(monkeypatch):
    """As on a GPU, a single row is bound by latency: its context costs a third of the context of 32 rows."""
    capacity = Capacity(max_sequences=64, cache_tokens=16384, max_context=2048, max_step_tokens=512)

    def law(rows: int, tokens: int, context: float) -> float:
        return 5e-3 + 1e-5 * tokens + context * max(2e-7, rows * 2.6e-8)

    costs = measure_steps(TimedRunner(monkeypatch, law, capacity), 1.4)
    for rows in (1, 16, 32):
        assert costs.seconds(rows, rows, 300.0) == pytest.approx(law(rows, rows, 300.0), rel=0.02)


def test_a_context_too_dear_for_many_rows_is_measured_in_one(monkeypatch):
    runner = TimedRunner(monkeypatch, lambda rows, tokens, context: 2e-3 * tokens + context * (rows * 2e-6))
    costs = measure_steps(runner, 1.4)
    assert costs.context_seconds == 0.0
    assert costs.row_context_seconds == pytest.approx(2e-6, rel=0.02)
    assert costs.token_context_seconds == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("slower", [0.5, 2.0])
def test_a_machine_that_changes_its_speed_half_way_is_not_said_to_have_dear_rows(monkeypatch, slower):
    """The costs of rows and context are measured against the same step without them."""

    def law(rows: int, tokens: int, context: float) -> float:
        speed = slower if runner.num_forwards > 3 * len(FITTING) else 1.0
        return speed * (1e-3 + 1e-4 * tokens + 5e-5 * (rows - 1) + context * rows * 2e-6)

    runner = TimedRunner(monkeypatch, law)
    costs = measure_steps(runner, 10.0)
    assert costs.row_seconds == pytest.approx(5e-5, rel=0.05)
    assert costs.seconds(8, 8, 300.0) == pytest.approx(1e-3 + 8e-4 + 7 * 5e-5 + 300 * 8 * 2e-6, rel=0.02)


class OpeningRunner(TimedRunner):
    """Starting a sequence takes extra time, as on backends that allocate pages and tables for it."""

    def forward(self, plan: StepPlan) -> NDArray[np.float32]:
        self.now += 3e-5 * sum(row.start == 0 for row in plan.rows)
        return super().forward(plan)


def test_beginning_a_sequence_is_no_cost_of_a_running_one(monkeypatch):
    costs = measure_steps(OpeningRunner(monkeypatch, lambda rows, tokens, context: 1e-3 + 1e-5 * tokens), 10.0)
    assert costs.row_seconds == pytest.approx(0.0, abs=1e-9)
    assert costs.seconds(1, 1) == pytest.approx(1.01e-3)
    assert costs.seconds(16, 16) == pytest.approx(1.16e-3)


def test_the_fastest_of_each_size_counts_and_the_first_pass_does_not(monkeypatch):
    """Pass 0 starts a sequence and pass 1 warms up; then sizes take turns, so that noise affects all of them."""
    noisy = {1: 1.0, 2: 0.5, 4: 0.5, len(FITTING) + 3: 0.5}
    runner = TimedRunner(monkeypatch, fast, disturbed=noisy)
    assert measure_steps(runner, 1e6).points == pytest.approx({n: fast(1, n, 0.0) for n in FITTING})


def test_a_staircase_is_measured_as_one(monkeypatch):
    runner = TimedRunner(monkeypatch, lambda rows, tokens, context: 1e-3 * -(-tokens // 4))
    costs = measure_steps(runner, 100.0)
    assert [costs.seconds(1, n) for n in (1, 2, 3, 4, 5, 8)] == pytest.approx([1e-3] * 4 + [2e-3] * 2)


def test_a_row_is_never_said_to_cost_less_than_nothing(monkeypatch):
    """Rows together may take less than one row of as many tokens; a negative cost would promise free requests."""
    runner = TimedRunner(monkeypatch, lambda rows, tokens, context: (1e-3 + 1e-4 * tokens) / rows)
    costs = measure_steps(runner, 10.0)
    assert costs.row_seconds == 0.0
    assert min(costs.context_seconds, costs.row_context_seconds, costs.token_context_seconds) >= 0.0


class CapturingRunner(TimedRunner):
    """Captures steps of up to 16 rows of up to 16 tokens on first use; other steps are slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, law: Callable[[int, int, float], float]) -> None:
        super().__init__(monkeypatch, law, Capacity(40, 4096, 2048, 512))
        self.capabilities = replace(self.capabilities, captured=(16, 16))
        self._seen: set[tuple[int, int]] = set()

    def forward(self, plan: StepPlan) -> NDArray[np.float32]:
        shape = (len(plan.rows), max(len(row.tokens) for row in plan.rows))
        if max(shape) > 16:
            self.now += 0.05
        elif shape not in self._seen:
            self._seen.add(shape)
            self.now += 0.5
        return super().forward(plan)


def test_steps_that_are_captured_are_measured_as_requests_make_them_and_after_their_capture(monkeypatch):
    runner = CapturingRunner(monkeypatch, lambda rows, tokens, context: 4e-3 + 2e-5 * tokens + 1e-5 * (rows - 1))
    costs = measure_steps(runner, 1.4)
    sizes = {size for size in SIZES if size <= 16 * runner.capacity.max_sequences}
    assert set(costs.points) == sizes, "captures are not part of the budget"
    assert costs.row_seconds == pytest.approx(1e-5)
    for rows, tokens in ((1, 1), (1, 8), (8, 40), (16, 256), (4, 64)):
        assert costs.seconds(rows, tokens) == pytest.approx(4e-3 + 2e-5 * tokens + 1e-5 * (rows - 1))


LAWS: dict[str, Callable[[int, int, float], float]] = {
    "small": lambda rows, tokens, context: 4e-3 + 7e-4 * tokens,
    "steep": lambda rows, tokens, context: 9e-3 * tokens,
    "large": lambda rows, tokens, context: 0.06 + 0.02 * tokens,
    "long context": lambda rows, tokens, context: 5e-3 + 1e-3 * tokens + 2e-5 * rows * context,
}


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
@pytest.mark.parametrize("budget", [0.6, 1.4])
def test_measuring_keeps_about_to_its_budget(monkeypatch, law, budget):
    runner = TimedRunner(monkeypatch, law)
    costs = measure_steps(runner, budget)
    assert runner.now < 2 * budget
    assert {1, 2} <= set(costs.points), "the sizes that every decision needs"


def test_a_model_slower_than_the_budget_is_measured_at_one_token_and_no_more(monkeypatch):
    runner = TimedRunner(monkeypatch, lambda rows, tokens, context: 3.0 * tokens)
    costs = measure_steps(runner, 1.4)
    assert costs.points == pytest.approx({1: 3.0})
    assert {sum(step) for step in runner.steps} == {1}


@pytest.mark.parametrize(
    ("capacity", "largest"),
    [
        (Capacity(4, 64, 64, 64), 48),
        (Capacity(4, 64, 64, 5), 5),
        (Capacity(4, 64, 5, 64), 4),
        (Capacity(4, 3, 3, 64), 2),
        (Capacity(4, 8, 64, 64), 4),
        (Capacity(4, 7, 64, 64), 6),
        (Capacity(8, 64, 64, 2), 2),
        (Capacity(16, 200, 100, 64), 64),
        (Capacity(2, 2048, 2048, 512), 32),
        (Capacity(1, 2048, 2048, 512), 16),
        (Capacity(1, 2, 2, 2), 1),
        (Capacity(1, 1, 1, 1), 1),
    ],
    ids=str,
)
def test_measuring_stays_within_the_runners_capacity(monkeypatch, capacity, largest):
    """FakeRunner itself raises for a step, context or cache that is too large."""
    runner = TimedRunner(monkeypatch, fast, capacity)
    costs = measure_steps(runner, 1e6)
    assert max(costs.points) == largest
    assert runner.peak_cells <= capacity.cache_tokens
    assert runner.sequences == {}


def test_a_backend_that_cannot_rewind_is_measured_without_rewinding(monkeypatch):
    """FakeRunner raises on a rewind. Each step starts new sequences, and the cost of context is not measured."""
    runner = TimedRunner(monkeypatch, context_law(1e-6, 2e-6, 3e-6), can_rewind=False)
    costs = measure_steps(runner, 1e6)
    assert costs.seconds(8, 24) == pytest.approx(1e-3 + 24e-4)
    assert (costs.context_seconds, costs.row_context_seconds, costs.token_context_seconds) == (0.0, 0.0, 0.0)
    assert runner.sequences == {}


def test_measuring_leaves_no_trace():
    target, draft = FakeRunner(FakeModel(), ROOMY), FakeRunner(FakeModel(), ROOMY)
    proposer = DraftModelProposer(LoadedModel(draft, ByteTokenizer(), "fake", 0, 0), target.vocab_size)
    costs = measure(target, [proposer], make_request([0]))
    assert costs.drafts["draft"].passes is not None and costs.drafts["draft"].catch_up is not None
    for runner in (target, draft):
        assert runner.num_forwards > 0
        assert runner.sequences == {} and runner.num_cells == 0


class TimedHead:
    """A head on the runner's clock: `pass_seconds` per draft token, `token_seconds` per uncached token, and `capture`
    once for every number of rows and depth."""

    size_bytes = 0
    measured: MeasuredAcceptance | None = None
    stops_early = False
    has_trees = False

    def __init__(self, runner: TimedRunner, pass_seconds: float, token_seconds: float, capture: float) -> None:
        self._runner, self._seconds, self._token, self._capture = runner, pass_seconds, token_seconds, capture
        self._captured: set[tuple[int, int]] = set()

    def num_uncached(self, seq: int, num_tokens: int) -> int:
        return self._runner.entries.num_uncached(seq, num_tokens)

    def draft(self, tasks: Sequence[HeadTask]) -> list[DraftedTokens]:
        shape = len(tasks), tasks[0].depth
        self._runner.now += 0.0 if shape in self._captured else self._capture
        self._captured.add(shape)
        for task in tasks:
            seq, length = task.request.seq, len(task.request.tokens)
            assert seq is not None and task.request.num_computed == len(self._runner.sequences[seq]) == length - 1
            self._runner.now += self._token * (length - self._runner.entries.take(seq, length))
        self._runner.now += tasks[0].depth * self._seconds
        return [DraftedTokens([0] * task.depth, [0.5] * task.depth) for task in tasks]


@pytest.mark.parametrize(
    ("seconds_per_token", "sizes"), [(1e-6, {1, 16, 64, 128, 256, 512, 1024}), (3e-4, {1, 16, 64, 128, 256, 512})]
)
def test_a_heads_catching_up_is_measured_as_far_as_it_is_quick(monkeypatch, seconds_per_token, sizes):
    """One-time work of the first draft of a kind must not look like slow catching up."""
    runner = TimedRunner(monkeypatch, lambda rows, tokens, context: seconds_per_token * tokens)
    costs = measure_head(runner, TimedHead(runner, 1e-4, 1e-6, capture=2.0), make_request([0]))
    assert costs.catch_up is not None and set(costs.catch_up.points) == sizes
    assert costs.catch_up_seconds(200) == pytest.approx(2e-4, rel=0.1)


def test_the_first_pass_of_a_head_also_takes_in_what_the_last_step_emitted(monkeypatch):
    """Three tokens, in every row; the price of a shallow draft contains that as well."""
    runner = TimedRunner(monkeypatch, fast)
    costs = measure_head(runner, TimedHead(runner, 1e-4, 1e-5, capture=2.0), make_request([0]))
    assert costs.passes is not None and costs.passes.seconds(4, 4) == pytest.approx(1e-4)
    for rows in (1, 4, 16):
        for depth in (1, 2, 4, 8):
            assert costs.seconds(rows, depth, 0.0) == pytest.approx(depth * 1e-4 + 3 * rows * 1e-5)


def test_a_head_is_warmed_up_by_one_draft_that_leaves_nothing(monkeypatch):
    runner = TimedRunner(monkeypatch, fast)
    head = TimedHead(runner, 1e-4, 1e-6, capture=2.0)
    warm_up_head(runner, head, make_request([0]))
    assert head._captured == {(1, 1)}
    assert runner.sequences == {} and runner.num_cells == 0


@pytest.mark.parametrize("number", [0, 1, 30, 56, 58, 59, 62, 66, 72, 80, 90, 105])
def test_an_interrupted_measurement_leaves_no_trace(monkeypatch, number):
    """Interrupted at any point: while it measures sizes, rows or context."""
    runner = TimedRunner(monkeypatch, fast)
    forward = runner.forward

    def interrupted(plan: StepPlan) -> NDArray[np.float32]:
        logits = forward(plan)
        if runner.num_forwards > number:
            raise KeyboardInterrupt
        return logits

    monkeypatch.setattr(runner, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_steps(runner, 1e6)
    assert runner.sequences == {} and runner.num_cells == 0


def test_what_a_lookup_was_timed_on_is_no_text_it_learned_from():
    proposer, scratch = SuffixProposer(4096), make_request([0])
    costs = measure(FakeRunner(FakeModel(), ROOMY), [proposer], scratch)
    assert costs.drafts["suffix"].lookup_seconds > 0 and costs.drafts["suffix"].passes is None
    assert scratch.tokens == [0]
    other = make_request([1, 2, 3, 4, 5])  # the timed text counts up
    assert proposer.propose([DraftAsk(other, 4)])[0].tokens == []


# ---- an engine


def test_an_engine_measures_once_and_before_its_first_request_only():
    engine = fake_engine(speculation="auto")
    engine.submit([97] * 20, SamplingParams(max_tokens=4))
    assert engine.costs is None and runner_of(engine).num_forwards == 0, "submitting a request does not wait for it"
    engine.step()
    num_forwards = runner_of(engine).num_forwards
    assert engine.costs is not None and num_forwards > len(SIZES)
    assert engine.costs.drafts.keys() - {"none"} == {"grammar", "ngram", "suffix", "prediction", "draft"}
    assert [name for name, draft in engine.costs.drafts.items() if draft.passes is not None] == ["draft"]
    engine.submit([97] * 20, SamplingParams(max_tokens=4))
    engine.step()
    assert runner_of(engine).num_forwards == num_forwards + 1


def test_an_engine_with_speculation_off_measures_nothing():
    engine = fake_engine(speculation="off")
    engine.submit([97] * 20, SamplingParams(max_tokens=4))
    engine.step()
    assert runner_of(engine).num_forwards == 1 and engine.costs is None


def test_an_engine_with_speculation_off_measures_for_the_first_request_that_turns_it_on():
    engine = fake_engine(speculation="off")
    engine.submit([97] * 20, SamplingParams(max_tokens=4, speculation=SpeculationParams(mode="auto")))
    engine.step()
    assert engine.costs is not None


def test_measuring_again_beside_kept_prefixes_disturbs_no_later_request():
    engine = fake_engine(speculation="auto")
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    first = finish(engine, [97, 98, 99] * 8, params)
    engine.calibrate(again=True)
    assert runner_of(engine).num_cells == 0
    assert finish(engine, [97, 98, 99] * 8, params) == first
    engine.scheduler.check_integrity()


def finish(engine: Engine, prompt: list[int], params: SamplingParams) -> list[int]:
    request = engine.submit(prompt, params)
    while engine.has_requests:
        engine.step()
    return request.tokens


def test_what_steps_taught_is_kept_for_the_next_start(tmp_path):
    engine = fake_engine(speculation="auto")
    engine.cost_file = CostFile.for_config(fake_config(draft="fake"), tmp_path)
    finish(engine, [97, 98, 99] * 8, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    engine.keep_costs()
    assert engine.costs is not None
    again = fake_engine(speculation="auto")
    again.cost_file = engine.cost_file
    again.calibrate()
    assert runner_of(again).num_forwards == 0, "nothing was measured"
    draft = draft_runner_of(again)
    assert draft.num_forwards == 1, "its first pass is the slowest: no request has to wait for it"
    assert draft.forward(StepPlan([Row(0, 0, [97], 1)])) is not None, "and has left nothing behind"
    assert again.costs is not None and again.costs.target.points == pytest.approx(engine.costs.target.points)


def test_costs_that_were_measured_with_other_proposers_are_measured_again(tmp_path):
    engine = fake_engine(speculation="auto")
    engine.cost_file = CostFile.for_config(fake_config(draft="fake"), tmp_path)
    engine.cost_file.save(Costs(target=StepCosts({1: 9.0}), drafts={"suffix": DraftCosts(lookup_seconds=1e-5)}))
    engine.calibrate()
    assert runner_of(engine).num_forwards > 0
    assert engine.costs is not None
    assert engine.costs.drafts.keys() - {"none"} == {"grammar", "ngram", "suffix", "prediction", "draft"}


# ---- the file


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


def cost_file(model: Path, **options: Any) -> CostFile:
    return CostFile.for_config(replace(fake_config(), model=str(model), **options), model.parent / "cache")


def some_costs() -> Costs:
    drafts = {"suffix": DraftCosts(lookup_seconds=1e-5), "draft": DraftCosts(StepCosts({1: 0.1}), draw_seconds=1e-4)}
    return Costs(target=StepCosts({1: 1.0, 8: 2.0}), drafts=drafts, schedule_seconds=1e-4)


def logged(caplog: pytest.LogCaptureFixture, level: int, *words: str) -> bool:
    return any(r.levelno == level and all(word in r.getMessage() for word in words) for r in caplog.records)


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="outpace.costs")


def test_saved_costs_are_loaded_next_time(model, caplog):
    cost_file(model).save(some_costs())
    loaded = cost_file(model).load()
    assert loaded is not None and loaded.as_dict() == some_costs().as_dict()
    assert not caplog.records


def test_a_file_that_is_not_there_is_nothing_to_mention(model, caplog):
    assert cost_file(model).load() is None
    assert not caplog.records


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b"{}",
        b'{"fingerprint": null, "costs": {}}',
        b'{"fingerprint": [], "costs": {}}',
        b"\x00" * 4096,
    ],
    ids=repr,
)
def test_a_corrupt_file_is_measured_again_with_a_warning(model, caplog, content):
    file = cost_file(model)
    file.save(some_costs())
    file.path.write_bytes(content)
    assert file.load() is None
    assert logged(caplog, logging.WARNING, "cannot be used", "measuring again", str(file.path))


def test_a_file_cut_short_anywhere_is_measured_again(model, caplog):
    file = cost_file(model)
    file.save(some_costs())
    text = file.path.read_bytes()
    for length in range(0, len(text) - 2, 7):
        file.path.write_bytes(text[:length])
        caplog.clear()
        assert file.load() is None
        assert logged(caplog, logging.WARNING, "measuring again")


def rewritten(file: CostFile, change: Callable[[dict[str, Any]], None]) -> None:
    saved = json.loads(file.path.read_text())
    change(saved)
    file.path.write_text(json.dumps(saved))


@pytest.mark.parametrize("value", [-1.0, float("nan"), None, "fast", 0.0], ids=repr)
def test_costs_that_no_machine_has_are_measured_again(model, caplog, value):
    file = cost_file(model)
    file.save(some_costs())
    rewritten(file, lambda saved: saved["costs"]["target"]["points"].update({"1": value}))
    assert file.load() is None
    assert logged(caplog, logging.WARNING, "measuring again")


def test_another_format_is_measured_again(model, caplog):
    file = cost_file(model)
    file.save(some_costs())
    rewritten(file, lambda saved: saved["fingerprint"].update(format=-1))
    assert file.load() is None
    assert logged(caplog, logging.INFO, "another format", "measuring again")


def test_another_machine_is_measured_again(model, caplog, monkeypatch):
    cost_file(model).save(some_costs())
    monkeypatch.setattr(kept, "_processor", lambda: "some other processor")
    assert cost_file(model).load() is None
    assert logged(caplog, logging.INFO, "another machine", "measuring again")


def test_other_cores_are_another_machine(model, caplog, monkeypatch):
    cost_file(model).save(some_costs())
    monkeypatch.setattr(kept, "usable_cores", lambda: 999)
    assert cost_file(model).load() is None
    assert logged(caplog, logging.INFO, "another machine")


def test_another_release_is_measured_again(model, caplog, monkeypatch):
    cost_file(model).save(some_costs())
    monkeypatch.setattr("outpace.__version__", "0.0.0")
    assert cost_file(model).load() is None
    assert logged(caplog, logging.INFO, "another outpace")


def test_a_model_that_was_replaced_is_measured_again(model, caplog):
    cost_file(model).save(some_costs())
    model.write_bytes(b"other weights")
    assert cost_file(model).load() is None
    assert logged(caplog, logging.INFO, "another model", "measuring again")


def test_a_model_written_again_at_the_same_size_is_measured_again(model, caplog):
    cost_file(model).save(some_costs())
    status = model.stat()
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))
    assert cost_file(model).load() is None
    assert logged(caplog, logging.INFO, "another model")


def test_a_draft_that_was_replaced_is_measured_again(model, caplog):
    draft = model.with_name("draft.gguf")
    draft.write_bytes(b"small")
    cost_file(model, draft=str(draft)).save(some_costs())
    assert cost_file(model, draft=str(draft)).load() is not None
    draft.write_bytes(b"smaller")
    assert cost_file(model, draft=str(draft)).load() is None
    assert logged(caplog, logging.INFO, "another draft")


@pytest.mark.parametrize("other", [{"threads": 77}, {"backend": "native"}, {"max_sequences": 3}, {"draft": "d"}])
def test_other_settings_have_a_file_of_their_own(model, other):
    file = cost_file(model)
    file.save(some_costs())
    assert cost_file(model, **other).path != file.path
    assert cost_file(model, **other).load() is None
    assert file.load() is not None


def test_a_folder_that_cannot_be_used_is_a_warning_and_no_more(model, caplog):
    """A file in place of the folder: reading and writing fail even for root."""
    (model.parent / "cache").write_text("in the way")
    file = cost_file(model)
    assert file.load() is None
    assert logged(caplog, logging.WARNING, "measuring again")
    file.save(some_costs())
    assert logged(caplog, logging.WARNING, "could not be saved")


def test_a_folder_without_rights_is_a_warning_and_no_more(model, caplog, monkeypatch):
    file = cost_file(model)
    file.save(some_costs())

    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError("not yours")

    monkeypatch.setattr(Path, "read_text", denied)
    monkeypatch.setattr(Path, "write_text", denied)
    assert file.load() is None
    file.save(some_costs())
    assert logged(caplog, logging.WARNING, "not yours", "measuring again")
    assert logged(caplog, logging.WARNING, "could not be saved", "not yours")


def test_a_write_that_fails_half_way_leaves_the_old_file_whole(model, caplog, monkeypatch):
    file = cost_file(model)
    file.save(some_costs())

    def full(self: Path, text: str, **_: Any) -> int:
        with self.open("w") as half:
            half.write(text[: len(text) // 2])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    file.save(Costs(target=StepCosts({1: 9.0})))
    monkeypatch.undo()
    assert logged(caplog, logging.WARNING, "no space left")
    loaded = file.load()
    assert loaded is not None and loaded.target.points == some_costs().target.points


def test_a_reader_never_sees_half_a_file(model, monkeypatch):
    """The new file is moved into place; until then the old one stays."""
    file = cost_file(model)
    file.save(some_costs())
    seen: list[Costs | None] = []
    replace_path = Path.replace

    def watched(self: Path, target: Path) -> Path:
        seen.append(file.load())
        return replace_path(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    file.save(Costs(target=StepCosts({1: 9.0})))
    assert [costs.target.points for costs in seen if costs is not None] == [some_costs().target.points]
    loaded = file.load()
    assert loaded is not None and loaded.target.points == {1: 9.0}
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]


def test_a_write_that_fails_leaves_nothing_beside_the_file(model, monkeypatch):
    file = cost_file(model)
    file.save(some_costs())

    def busy(self: Path, target: Path) -> Path:
        raise OSError("in use")

    monkeypatch.setattr(Path, "replace", busy)
    file.save(some_costs())
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]


def test_an_engine_measures_again_where_the_file_cannot_be_used(tmp_path, caplog):
    engine = fake_engine(speculation="auto")
    file = engine.cost_file = CostFile.for_config(fake_config(draft="fake"), tmp_path)
    file.path.parent.mkdir(parents=True)
    file.path.write_text("{")
    engine.calibrate()
    assert runner_of(engine).num_forwards > 0 and engine.costs is not None
    assert logged(caplog, logging.WARNING, "measuring again")
    assert file.load() is not None, "and remakes it"

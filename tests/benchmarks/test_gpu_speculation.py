"""The GPU experiment with a tiny model on the CPU: in float32, every setting emits the tokens of plain decoding."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")
pytest.importorskip("safetensors", reason="safetensors is not installed; pip install outpace[torch]")

import torch

from benchmarks import gpu_experiment, gpu_models, gpu_padded_model, gpu_speculation, gpu_trees
from benchmarks.gpu_cells import first_difference, run
from benchmarks.gpu_experiment import Experiment, Report
from benchmarks.gpu_padded_model import PaddedModel, Small
from benchmarks.gpu_summary import summary
from outpace.backends.base import Capacity
from outpace.core import StepStats
from outpace.speculation.costs.curves import Costs, DraftCosts, StepCosts
from outpace.speculation.policy.decision import Decision
from outpace.speculation.policy.state import Outcome
from tests.benchmarks.small_model import DRAFT_VOCABULARY, LARGE, LARGE_CONFIG, write_small
from tests.tiny_gguf import VOCAB_SIZE

SETTINGS = ("plain", "ngram:2", "suffix:2", "head:3", "auto")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads do not speed up tiny matrix products."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    return write_small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def small(files) -> Small:
    model, head = files
    return Small.load(model, head, torch.device("cpu"))


@pytest.fixture(scope="module")
def models(small) -> PaddedModel:
    room = Capacity(max_sequences=3, cache_tokens=256, max_context=96, max_step_tokens=64)
    return PaddedModel.start(small, torch.float32, LARGE, DRAFT_VOCABULARY, room)


def random_prompts(count: int, length: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for _ in range(count)]


@pytest.fixture
def experiment(models, tmp_path) -> Experiment:
    found = Experiment(models, random_prompts(6, 12), Report(tmp_path, {}), 8, SETTINGS)
    found.calibrate(2)
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_setting_says_what_plain_decoding_says(experiment, tmp_path, temperature):
    """At temperature 0. Requests above it have no seed, so drafts that are verified by rejection change their texts."""
    experiment.block(2, temperature, 0)
    experiment.summarise()
    figures = json.loads((tmp_path / "gpu_speculation.json").read_text())
    rows = {row["setting"]: row for row in figures["rows"]}
    assert set(rows) == set(SETTINGS)
    for row in rows.values():
        assert row["num_texts"] == 8
        if temperature == 0.0 or row["setting"] == "plain":
            assert row["num_equal"] == 8
            assert not row["gaps"]
        assert row["tokens"] >= 2 * 8
    assert rows["head:3"]["drafted_per_position"][0] > 0
    assert rows["head:3"]["accepted_per_position"][0] > 0, "a draft that is never right tests nothing"
    assert rows["head:3"]["tokens_per_step_and_request"] > 1
    assert rows["plain"]["speedup"] == 1.0
    assert not rows["plain"]["drafts_by_method"]
    assert "8 of 8" in (tmp_path / "gpu_speculation.txt").read_text()


def test_the_whole_command_runs_on_a_cpu(files, tmp_path, monkeypatch, capsys):
    """As on a GPU, with all settings and the embedded head's way through its file; only the shape is small."""
    monkeypatch.setitem(gpu_models.SHAPES, gpu_padded_model.SHAPE, LARGE_CONFIG)
    monkeypatch.setattr(gpu_padded_model, "DRAFT_VOCABULARY", DRAFT_VOCABULARY)
    monkeypatch.setattr(gpu_speculation, "CONTEXT", 96)
    monkeypatch.setattr(gpu_speculation, "STEP_TOKENS", 64)
    monkeypatch.setattr(gpu_experiment, "PREPARED", ("head:1",))  # a CPU captures no graphs
    model, head = files
    tokens, out = tmp_path / "tokens.json", tmp_path / "out"
    tokens.write_text(json.dumps({"prompts": random_prompts(7, 12), "source": "random"}))
    arguments = ["run", str(model), str(tokens), str(out), "--head", str(head), "--device", "cpu", "--concurrency", "1",
                 "2", "--blocks", "1", "--new-tokens", "6", "--traces", str(tmp_path / "traces")]  # fmt: skip
    assert gpu_speculation.main(arguments) == 0
    figures = json.loads((out / "gpu_speculation.json").read_text())
    assert not figures["missing"]
    cells = {(c["concurrency"], c["temperature"], c["setting"]): c for c in figures["summary"]["cells"]}
    assert cells.keys() == {(n, t, s) for n in (1, 2) for t in (0.0, 1.0) for s in gpu_experiment.SETTINGS}
    assert all(cell["blocks"] == 1 for cell in cells.values())
    greedy = [cell for (_, temperature, _), cell in cells.items() if temperature == 0.0]
    assert all(cell["num_equal"] == cell["num_texts"] for cell in greedy)
    assert all(cells[2, 1.0, f"head:{depth}"]["tokens_per_step_and_request"] > 1 for depth in (2, 3, 5, 7))
    assert len(figures["summary"]["passes"]) == 4
    assert [(each["concurrency"], each["asked"]) for each in figures["summary"]["promises"]] == [(1, 1.9), (1, 1.3)]
    assert figures["models"].keys() == {model.name, head.name}
    assert figures["padding"]["padded_drafts"] == 1.0
    text = (out / "gpu_speculation.txt").read_text()
    assert "a pass of the head, 2 at once, temperature 1" in text
    assert "auto over plain, 1 at once, temperature 0" in capsys.readouterr().out


def test_trees_beside_chains_on_a_cpu(files, tmp_path, monkeypatch):
    monkeypatch.setitem(gpu_models.SHAPES, gpu_padded_model.SHAPE, LARGE_CONFIG)
    monkeypatch.setattr(gpu_padded_model, "DRAFT_VOCABULARY", DRAFT_VOCABULARY)
    monkeypatch.setattr(gpu_speculation, "CONTEXT", 96)
    monkeypatch.setattr(gpu_speculation, "STEP_TOKENS", 64)
    model, head = files
    tokens, out = tmp_path / "tokens.json", tmp_path / "out"
    tokens.write_text(json.dumps({"prompts": random_prompts(7, 12), "source": "random"}))
    arguments = [str(model), str(tokens), str(out), "--head", str(head), "--device", "cpu", "--concurrency", "2",
                 "--blocks", "2", "--new-tokens", "12"]  # fmt: skip
    assert gpu_trees.main(arguments) == 0
    figures = json.loads((out / "gpu_speculation.json").read_text())
    assert not figures["missing"]
    rows = [row for row in figures["rows"] if row["setting"] == gpu_trees.TREE]
    assert all(row["num_equal"] == row["num_texts"] for row in rows if row["temperature"] == 0)
    assert all(set(row["drafts_by_method"]) == {"tree"} and len(row["drafted_per_position"]) == 4 for row in rows)
    cells = json.loads((out / "gpu_trees.json").read_text())["cells"]
    assert [(cell["concurrency"], cell["temperature"], cell["blocks"]) for cell in cells] == [(2, 0, 2), (2, 1, 2)]
    assert "2 at once, temperature 1" in (out / "gpu_trees.txt").read_text()


def test_trees_are_compared_with_the_better_chain():
    speeds = {"head:3": (10.0, 12.0, 10.0), "head:4": (11.0, 11.0, 11.0), "tree:4": (12.1, 13.2, 9.9)}
    rows = [
        {"concurrency": 1, "temperature": 0.0, "setting": setting, "block": block, "tokens_per_s": speed,
         "tokens_per_step_and_request": 2.0, "ms_per_step": 1.0, "speedup": 1.0}
        for setting, of_blocks in speeds.items() for block, speed in enumerate(of_blocks)
    ]  # fmt: skip
    [cell] = gpu_trees.compare(rows)
    assert cell["chain"] == "head:4"
    assert (cell["ratio"], cell["lowest"], cell["highest"]) == pytest.approx((1.1, 0.9, 1.2))
    assert "1.100 (0.900-1.200) of head:4" in gpu_trees.as_text([cell])[1]


def test_what_was_not_measured_is_said(experiment, tmp_path, monkeypatch):
    experiment.attempt(2, 0.0, 1, seconds=0.0)

    def fails(*_: object, **__: object) -> None:
        runner = experiment.pair.runners[0]
        runner.reserve(0, 0, 5)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(experiment, "run", fails)
    experiment.settings = ("plain",)
    experiment.attempt(2, 1.0, 1, seconds=1e6)
    missing = json.loads((tmp_path / "gpu_speculation.json").read_text())["missing"]
    assert missing == [
        "block 1, concurrency 2, temperature 0: the time is over",
        "block 1, concurrency 2, temperature 1: FAILED: RuntimeError('out of memory')",
    ]
    monkeypatch.undo()
    experiment.attempt(2, 1.0, 1, seconds=1e6)
    assert len(experiment.report.figures["rows"]) == 1, "the failed block left the runner's sequences in use"


def test_traces_say_what_every_step_took_and_why(models, experiment, tmp_path):
    traces = tmp_path / "traces.jsonl"
    traced = Experiment(models, experiment.prompts, Report(tmp_path, {}), 8, ("plain", "auto"), traces)
    traced.costs = experiment.costs
    traced.block(2, 0.0, 0)
    [auto] = (json.loads(line) for line in traces.read_text().splitlines())
    assert auto["setting"] == "auto"
    decoding = [step for step in auto["steps"] if not step["prefill"]]
    assert sum(step["emitted"] for step in decoding) >= 2 * 8
    assert all(step["ms"] >= sum(step["ms_in"].values()) for step in decoding)
    decided = [step["policy"] for step in auto["steps"] if step["rows"]]
    assert all(step["reason"] and len(step["rows"]) <= 2 for step in decided)


def test_the_padded_model_is_compared_with_the_small_one(experiment):
    experiment.check_padding()
    found = experiment.report.figures["padding"]
    assert found["small_error"] == 0.0
    assert 0 < found["padded_error"] < 1e-4
    assert found["padded_argmax"] == 1.0
    assert found["drafted"] == 4 * 6
    assert found["small_drafts"] == found["padded_drafts"] == 1.0


def test_a_text_that_parts_from_plain_is_weighed_by_both_tokens_logits(experiment):
    plain = experiment.run("plain", 2, 0.0, 0)
    first, *others = plain["texts"]
    other = plain | {"texts": [[first[0], (first[1] + 1) % VOCAB_SIZE], *others]}
    num_equal, gaps = experiment._compare(plain, other)
    assert num_equal == 7
    assert len(gaps) == 1
    assert gaps[0] > 0
    assert first_difference([1, 2, 3], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 4]) == 1


def test_the_summary_takes_medians_and_says_what_was_asked():
    def row(setting, speedup, block=0, drafting=0.0):
        return {
            "concurrency": 1, "temperature": 0.0, "setting": setting, "block": block, "speedup": speedup,
            "tokens_per_s": 100 * speedup, "ms_per_step": 4.0, "tokens_per_step_and_request": 1.5, "num_texts": 4,
            "num_equal": 3, "gaps": [0.01], "drafted_per_position": [10, 5], "accepted_per_position": [8, 1],
            "ms_per_step_in": {"draft": drafting},
        }  # fmt: skip

    autos = [row("auto", speedup, i) for i, speedup in enumerate((1.0, 2.5, 2.0))]
    fixed = [row("plain", 1.0), row("head:2", 1.5, drafting=0.6), row("head:7", 1.5, drafting=1.6)]
    found = summary([*autos, *fixed], {(1, 0.0): 1.9, (8, 0.0): 1.6})
    cell = found["cells"][0]
    assert cell["speedup"] == 2.0
    assert cell["speedup_range"] == [1.0, 2.5]
    assert cell["acceptance_per_position"] == [0.8, 0.2]
    assert (cell["num_equal"], cell["num_texts"]) == (9, 12)
    assert found["promises"] == [{"concurrency": 1, "temperature": 0.0, "asked": 1.9, "found": 2.0}]
    [cost] = found["passes"]
    assert cost["ms_per_pass"] == pytest.approx(0.2)
    assert cost["of_plain_step"] == pytest.approx(0.05)
    assert found["widest_gap"] == 0.01
    assert any("required 1.9, met" in line for line in found["lines"])


class Unchanging(StepCosts):
    """Costs that ignore the measured times of this CPU."""

    def observe(self, rows: int, tokens: int, context: float, seconds: float, num_passes: int = 1) -> None:
        pass


def test_auto_uses_a_head_where_steps_cost_what_they_do_on_a_gpu(small, monkeypatch):
    """Drafts made in one launch on the device carry no confidence; the policy learns from their outcomes alone.

    The head's trees take as long as its chains here, and are nearly as cheap to verify."""
    room = Capacity(max_sequences=2, cache_tokens=1024, max_context=256, max_step_tokens=256)
    pair = PaddedModel.start(small, torch.float32, LARGE, DRAFT_VOCABULARY, room).pair
    drafts = {name: DraftCosts(lookup_seconds=1e-5) for name in ("ngram", "suffix")}
    for name in ("head", "tree"):
        drafts[name] = DraftCosts(Unchanging({1: 0.3e-3, 16: 0.4e-3, 256: 0.7e-3}))
    costs = Costs(Unchanging({1: 4.0e-3, 16: 4.5e-3, 64: 5.2e-3}), drafts)
    engine = pair.engine(1, costs)
    engine.policy.use_costs(costs)
    learn, spent = engine.policy.learn, list[float]()

    def booked(
        decision: Decision, outcomes: Sequence[Outcome], stats: StepStats, catch_up_seconds: float, **options: Any
    ) -> None:
        [outcome] = outcomes
        drafting = 0.3e-3 * outcome.verdict.depth * (outcome.choice.method in ("head", "tree"))
        catching_up = 0.7e-3 * (catch_up_seconds > 0)
        forward = costs.target.seconds(1, 1 + outcome.verdict.num_drafted)
        spent.append(forward + drafting + catching_up)
        taken = StepStats(
            num_emitted=stats.num_emitted, forward_seconds=forward, draft_seconds=drafting + catching_up
        )  # fmt: skip
        learn(decision, outcomes, taken, catching_up, **options)

    engine.policy.learn = booked  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(DraftCosts, "observe", lambda self, timing: timing.divide(self.passes.seconds))
    found = run(pair, engine, "auto", random_prompts(4, 60), 1, 1.0, 60)
    assert found.methods is not None
    assert found.methods["head"] + found.methods.get("tree", 0) > found.num_steps / 2
    assert found.num_tokens * 4.0e-3 / sum(spent) > 1.3, "plain decoding would have been as fast"

"""The GPU experiment with a tiny model on the CPU: in float32, every setting emits the tokens of plain decoding."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence

import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")
pytest.importorskip("safetensors", reason="safetensors is not installed; pip install outpace[torch]")

import torch

from benchmarks import gpu_padded_pair, gpu_rounding
from benchmarks.gpu_cells import first_difference, run
from benchmarks.gpu_padded_pair import PaddedPair
from benchmarks.gpu_rounding import Rounding
from benchmarks.gpu_speculation import Experiment, Report
from benchmarks.gpu_summary import summary
from outpace.backends.base import Capacity
from outpace.core import StepStats
from outpace.speculation.costs.curves import Costs, DraftCosts, StepCosts
from outpace.speculation.policy.decision import Decision
from outpace.speculation.policy.state import Outcome
from tests.benchmarks.test_gpu_padding import LARGE, SMALL, random_weights

SETTINGS = {2: ("plain", "ngram:2", "suffix:2", "draft:3", "auto")}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads do not speed up tiny matrix products."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models() -> PaddedPair:
    room = Capacity(max_sequences=3, cache_tokens=256, max_context=96, max_step_tokens=64)
    return PaddedPair.start(SMALL, random_weights(), torch.float32, (LARGE, LARGE), Rounding(4, 16), room)


@pytest.fixture
def experiment(models, tmp_path) -> Experiment:
    rng = random.Random(0)
    prompts = [[rng.randrange(90) for _ in range(12)] for _ in range(6)]
    found = Experiment(models, prompts, Report(tmp_path, {}), 8, SETTINGS)
    found.calibrate()
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_setting_says_what_plain_decoding_says(experiment, tmp_path, temperature):
    experiment.block(2, temperature, 0)
    experiment.summarise()
    figures = json.loads((tmp_path / "gpu_speculation.json").read_text())
    rows = {row["setting"]: row for row in figures["rows"]}
    assert set(rows) == set(SETTINGS[2])
    for row in rows.values():
        assert row["texts_like_plain"] == 1.0
        assert not row["gaps"]
        assert row["tokens"] >= 2 * 8
    assert rows["draft:3"]["drafted_per_position"][0] > 0
    assert rows["draft:3"]["accepted_per_position"][0] > 0, "a draft that is never right tests nothing"
    assert rows["draft:3"]["tokens_per_step_and_request"] > 1
    assert rows["plain"]["speedup"] == 1.0
    assert not rows["plain"]["drafts_by_method"]
    assert "auto over plain: at least" in (tmp_path / "gpu_speculation.txt").read_text()


def test_traces_say_what_every_step_took_and_why(models, experiment, tmp_path):
    traces = tmp_path / "traces.jsonl"
    traced = Experiment(models, experiment.prompts, Report(tmp_path, {}), 8, {2: ("plain", "auto")}, traces)
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


def test_drafts_made_in_one_go_are_compared_with_single_steps(experiment):
    experiment.settings = {1: ("plain",)}
    experiment.check_drafts()
    assert experiment.report.figures["drafts_like_single_steps"] == 1.0


def test_a_text_that_parts_from_plain_is_weighed_by_both_tokens_logits(experiment):
    plain = experiment.run("plain", 2, 0.0, 0)
    first, *others = plain["texts"]
    other = plain | {"texts": [[first[0], (first[1] + 1) % 90], *others]}
    share, gaps = experiment._compare(plain, other)
    assert share == 0.75
    assert len(gaps) == 1
    assert gaps[0] > 0
    assert first_difference([1, 2, 3], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 4]) == 1


def test_the_summary_takes_medians_and_says_what_was_asked():
    def row(setting, speedup, block):
        return {
            "concurrency": 1, "temperature": 0.0, "setting": setting, "block": block, "speedup": speedup,
            "tokens_per_s": 100 * speedup, "ms_per_step": 4.0, "tokens_per_step_and_request": 1.5,
            "texts_like_plain": 1.0, "gaps": [0.01], "drafted_per_position": [10, 5], "accepted_per_position": [8, 1],
        }  # fmt: skip

    found = summary([row("auto", speedup, i) for i, speedup in enumerate((1.0, 2.5, 2.0))], 0.98, 2.0)
    [cell] = found["cells"]
    assert cell["speedup"] == 2.0
    assert cell["speedup_range"] == [1.0, 2.5]
    assert cell["acceptance_per_position"] == [0.8, 0.2]
    assert found["promises"]["alone"] == {"asked": 2.0, "found": 2.0}
    assert found["promises"]["widest_gap"] == 0.01


def test_transformers_runs_on_the_same_weights(experiment):
    pytest.importorskip("transformers", reason="transformers, the peer, is not installed")
    experiment.beside_transformers(1, 6)
    rows = experiment.report.figures["transformers"]
    assert [row["temperature"] for row in rows] == [0.0, 1.0]
    assert rows[0]["same_texts"] == 1
    assert all(row["assisted_tokens_per_s"] > 0 for row in rows)


def test_a_draft_learns_its_rounding_from_what_the_model_says(monkeypatch):
    for module in (gpu_padded_pair, gpu_rounding):
        monkeypatch.setattr(module, "NUM_ANSWER_TOKENS", 6)
    monkeypatch.setattr(gpu_padded_pair, "HELD_OUT", 3)
    room = Capacity(max_sequences=2, cache_tokens=256, max_context=96, max_step_tokens=64)
    prompts = [[i + 1, 2, 3] for i in range(6)]
    settings = Rounding(steps=6, batch=2)
    found = PaddedPair.start(SMALL, random_weights(), torch.float32, (LARGE, LARGE), settings, room, prompts)
    assert found.agreement.keys() == {"nearest", "learned"}
    assert 0 < found.agreement["nearest"] < 1
    assert 0 <= found.agreement["learned"] <= 1


class Unchanging(StepCosts):
    """Costs that ignore the measured times of this CPU."""

    def observe(self, rows: int, tokens: int, context: float, seconds: float) -> None:
        pass


def test_auto_uses_a_draft_model_where_steps_cost_what_they_do_on_a_gpu(monkeypatch):
    """Drafts made in one launch on the device carry no confidence; the policy learns from their outcomes alone."""
    room = Capacity(max_sequences=2, cache_tokens=1024, max_context=256, max_step_tokens=256)
    pair = PaddedPair.start(SMALL, random_weights(), torch.float32, (LARGE, LARGE), Rounding(8, 16), room).pair
    drafts = {name: DraftCosts(lookup_seconds=1e-5) for name in ("ngram", "suffix")}
    drafts["draft"] = DraftCosts(Unchanging({1: 0.9e-3, 16: 1.4e-3, 256: 2.1e-3}))
    costs = Costs(Unchanging({1: 4.0e-3, 16: 4.5e-3, 64: 5.2e-3}), drafts)
    engine = pair.engine(1, costs)
    engine.policy.use_costs(costs)
    learn, spent = engine.policy.learn, list[float]()

    def booked(decision: Decision, outcomes: Sequence[Outcome], stats: StepStats, catch_up_seconds: float) -> None:
        [outcome] = outcomes
        is_drafted = outcome.choice.method == "draft"
        drafting = 0.9e-3 * outcome.choice.depth * is_drafted
        catching_up = 2.1e-3 * (catch_up_seconds > 0)
        forward = costs.target.seconds(1, 1 + outcome.verdict.num_drafted)
        spent.append(forward + drafting + catching_up)
        taken = StepStats(
            num_emitted=stats.num_emitted, forward_seconds=forward, draft_seconds=drafting + catching_up
        )  # fmt: skip
        learn(decision, outcomes, taken, catching_up)

    engine.policy.learn = booked  # type: ignore[method-assign]
    monkeypatch.setattr(DraftCosts, "observe", lambda self, timing: timing.divide(self.passes.seconds))
    rng = random.Random(0)
    prompts = [[rng.randrange(90) for _ in range(60)] for _ in range(4)]
    found = run(pair, engine, "auto", prompts, 1, 0.0, 60)
    assert found.methods is not None
    assert found.methods["draft"] > found.num_steps / 2
    assert found.num_tokens * 4.0e-3 / sum(spent) > 1.4, "plain decoding would have been as fast"

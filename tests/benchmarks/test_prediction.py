"""The benchmark of predictions, over a fake model."""

from __future__ import annotations

import pytest

from benchmarks.edit_tasks import CHANGES, edit_tasks
from benchmarks.prediction import RUNS, Edit, measure, report
from outpace.config import SamplingParams
from outpace.llm import LLM
from tests.fakes import FakeModel
from tests.test_llm import use_fakes


def test_an_edit_changes_its_request_and_has_no_code():
    tasks = edit_tasks(1000)
    assert len({(task.first, task.second) for task in tasks}) == len(tasks) == 16 * len(CHANGES)
    assert {task.change for task in edit_tasks(len(CHANGES))} == set(CHANGES)
    for task in tasks:
        assert task.first != task.second and "def " not in task.second
        if task.change != "rename":
            assert task.second == f"{task.first} {CHANGES[task.change]}"


@pytest.fixture
def edits(monkeypatch) -> list[Edit]:
    use_fakes(monkeypatch, FakeModel(sharpness=30.0))
    made = [Edit(number, task) for number, task in enumerate(edit_tasks(3))]
    with LLM(prefix_reuse=False) as llm:
        measure(llm, made, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    return made


def test_every_edit_runs_in_every_way_and_says_the_same(edits):
    for edit in edits:
        assert set(edit.runs) == set(RUNS) and edit.is_same
        counts = {name: run.trials[0].counts for name, run in edit.runs.items()}
        assert counts["off"].num_drafted == 0
        assert all(counts[name].accepted_prediction_tokens == 0 for name in ("off", "auto"))
        assert all("prediction" not in counts[name].proposers for name in ("off", "auto"))
        assert 0.0 <= edit.kept("old") <= 1.0


def test_a_different_answer_is_noticed(edits):
    edits[0].runs["old"].trials[0].token_ids[-1] += 1
    assert [edit.is_same for edit in edits] == [False, True, True]


def test_the_report_compares_speeds_of_decoding(edits, capsys):
    results = report(edits)
    assert "3 edits; the same tokens in every run: 3" in capsys.readouterr().out
    everything = results["rows"]["all"]
    fast, slow = (edits[0].runs[name] for name in ("old", "auto"))
    assert everything["edits"] == 3 and everything["tokens_per_step"]["off"] == 1.0
    fast.decode_seconds, slow.decode_seconds = 1.0, 3.0
    assert report(edits[:1])["rows"]["all"]["ratios"]["old/auto"]["value"] == pytest.approx(
        3.0 * fast.decode_tokens / slow.decode_tokens
    )

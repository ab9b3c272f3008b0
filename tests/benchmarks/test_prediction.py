"""The benchmark of predictions, over a fake model."""

from __future__ import annotations

import pytest

from benchmarks.edit_tasks import KINDS, edit_tasks, frequent_name, old_code
from benchmarks.prediction import RUNS, Edit, measure, report
from outpace.config import SamplingParams
from outpace.llm import LLM
from tests.fakes import FakeModel
from tests.test_llm import use_fakes

CODE = "".join(f"line {i} of the code\n" for i in range(12))
OTHER = "".join(f"other {i}\n" for i in range(12))


def test_every_task_is_edited_in_every_way_and_no_request_has_code():
    tasks = edit_tasks(1000)
    assert len({(task.kind, task.first) for task in tasks}) == len(tasks) == 16 * len(KINDS)
    assert {task.kind for task in edit_tasks(len(KINDS))} == set(KINDS)
    for task in tasks:
        assert (task.first != task.second) == (task.kind == "again") and "def " not in task.second


def test_an_edit_is_undone_in_the_old_code():
    new = CODE.splitlines()
    old = {kind: old_code(kind, CODE, OTHER).splitlines() for kind in KINDS}
    assert old["insert"] == new[:4] + new[7:8] + new[10:]
    assert old["delete"] == [*new[:4], "other 6", "other 7", "other 8", *new[4:8], "other 9", "other 10", *new[8:]]
    assert old["replace"] == [*new[:3], "other 6", *new[4:6], "other 7", *new[7:9], "other 8", *new[10:]]
    assert old["again"] == new and frequent_name("for self in table: total = total + 1") == "total"
    assert [line.replace("former_line", "line") for line in old["rename"]] == new != old["rename"]


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

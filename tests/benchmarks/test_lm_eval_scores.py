"""lm-eval's results with speculation on and off are compared to the last digit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import lm_eval_scores


def write(folder: Path, score: float, texts: list[str]) -> str:
    """Files as lm-eval names and fills them."""
    inside = folder / "model"
    inside.mkdir(parents=True)
    results = {"results": {"facts": {"name": "facts", "acc,none": score, "acc_stderr,none": 0.1}}}
    (inside / "results_2026-01-01.json").write_text(json.dumps(results))
    lines = [json.dumps({"doc_id": i, "resps": [[text]]}) for i, text in enumerate(texts)]
    (inside / "samples_facts_2026-01-01.jsonl").write_text("\n".join(reversed(lines)))
    return str(folder)


@pytest.mark.parametrize(
    ("score", "texts", "status", "num_different"),
    [(0.75, ["a", "b"], 0, 0), (0.7500001, ["a", "b"], 1, 0), (0.75, ["a", "c"], 1, 1)],
)
def test_one_digit_or_one_answer_that_differs_fails(tmp_path, monkeypatch, capsys, score, texts, status, num_different):
    off, on = write(tmp_path / "off", 0.75, ["a", "b"]), write(tmp_path / "on", score, texts)
    monkeypatch.setattr("sys.argv", ["lm_eval_scores", on, off])
    assert lm_eval_scores.main() == status
    assert f"{num_different} of 2 answers differ" in capsys.readouterr().out

"""The command `outpace batch`: what it prints, its exit status, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outpace.cli import main
from tests.test_llm import use_fakes


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    use_fakes(monkeypatch)
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": "abc", **body}}
        for name, body in (("good", {"max_tokens": 3}), ("bad", {"max_tokens": -1}))
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(source), str(tmp_path / "out.jsonl")


def test_counts_failures_and_the_exit_status(files, capsys):
    assert main(["batch", *files, "--speculation", "off", "--json"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out.splitlines()[-1])
    assert (found["lines"], found["completed"], found["failed"], found["left"]) == (2, 1, 1, 0)
    assert found["this_run"]["output_tokens"] == 3
    assert "outpace: bad: max_tokens" in err and "2 of 2 lines have a result, 1 of them an error" in err
    assert main(["batch", *files, "--speculation", "off"]) == 1
    assert "in this run 0 lines" in capsys.readouterr().err
    Path(files[0]).write_text(Path(files[0]).read_text().splitlines()[0] + "\n")
    assert main(["batch", *files, "--overwrite", "--speculation", "off"]) == 0


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--retry-failed", "--overwrite"], "give one of them"),
        (["--threads", "0"], "threads must be a whole number at least 1"),
        (["--request-timeout", "0"], "request-timeout must be above 0"),
    ],
)
def test_wrong_usage_is_one_sentence_before_anything_is_written(files, capsys, more, sentence):
    assert main(["batch", *files, *more]) == 2
    assert sentence in capsys.readouterr().err
    assert not Path(files[1]).exists() or Path(files[1]).read_bytes() == b""


def test_a_missing_input_is_named(files, capsys):
    assert main(["batch", files[0] + "x", files[1]]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_ray_is_asked_for_by_name(files, capsys, monkeypatch):
    monkeypatch.setattr("outpace.ray.installed.find_spec", lambda _: None)
    assert main(["batch", *files, "--ray"]) == 2
    assert "--ray needs Ray, which is not installed" in capsys.readouterr().err

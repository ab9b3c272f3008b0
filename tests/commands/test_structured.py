"""`outpace run` with a schema, a regex, choices or a grammar."""

from __future__ import annotations

import json
import re

import pytest

from outpace.cli import main
from tests.test_llm import use_fakes


@pytest.fixture
def fakes(monkeypatch):
    use_fakes(monkeypatch)


@pytest.mark.parametrize(
    ("option", "value", "pattern"),
    [
        ("--regex", "[ab]{3}[0-9]", "[ab]{3}[0-9]"),
        ("--choice", "yes,no", "yes|no"),
        ("--json-schema", '{"type": "integer", "minimum": 10, "maximum": 99}', "[1-9][0-9]"),
        ("--grammar", 'start: "<" ("x" | "y") ">"', "<[xy]>"),
    ],
)
def test_the_answer_has_the_form_that_was_asked_for(fakes, capsys, tmp_path, option, value, pattern):
    if option in ("--json-schema", "--grammar"):
        (tmp_path / "form").write_text(value)
        value = str(tmp_path / "form")
    assert main(["run", "abc", option, value, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert re.fullmatch(pattern, found["text"]) and found["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--json-schema", "no/such/file"], "--json-schema no/such/file cannot be read: No such file"),
        (["--choice", "yes,"], "a choice must be a non-empty string"),
        (["--regex", "a", "--choice", "b"], "not allowed with argument"),
    ],
)
def test_wrong_usage_is_a_sentence_before_a_model_is_looked_for(capsys, arguments, words):
    status: object
    try:
        status = main(["run", "abc", *arguments])
    except SystemExit as exit:
        status = exit.code
    assert status == 2 and words in capsys.readouterr().err


def test_what_cannot_be_compiled_is_wrong_usage(fakes, capsys):
    assert main(["run", "abc", "--regex", "["]) == 2
    assert "this regex cannot be used: unclosed character class" in capsys.readouterr().err

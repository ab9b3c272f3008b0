"""Every snippet of docs/structured.md runs, over the fake model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from outpace.cli import main
from tests.fakes import ByteTokenizer, fake_engine
from tests.server_helper import live
from tests.test_llm import use_fakes

PAGE = (Path(__file__).parents[1] / "docs" / "structured.md").read_text(encoding="utf-8")


def snippets(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_python_snippet_prints_what_was_asked_for(monkeypatch, capsys):
    use_fakes(monkeypatch)
    code = snippets("python")[0]
    exec(compile(code, "structured.md", "exec"), {"__name__": "snippet"})
    as_json, colour = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r'\{"city": "(Paris|Rome)", "year": (19|20|21)\d\d\}', as_json)
    assert colour in ("red", "green")


@pytest.mark.parametrize("line", snippets("sh")[0].splitlines())
def test_the_command_lines_run(line, monkeypatch, capsys, tmp_path):
    use_fakes(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.json").write_text('{"enum": ["a", "b"]}')
    (tmp_path / "form.lark").write_text('start: "it" | "that"')
    program, *arguments = shlex.split(line)
    assert program == "outpace" and main(arguments) == 0
    assert re.search(r"^(yes|no|\d{4}|\"[ab]\"|it|that)$", capsys.readouterr().out.strip())


def test_the_clients_snippet_runs_against_a_server(capsys):
    code = snippets("python")[1]
    engine = fake_engine(max_context=256, cache_tokens=2048)
    engine.calibrate()
    with live(engine, ByteTokenizer(), 256, model_names=("outpace",)) as server:
        exec(
            compile(code.replace("http://127.0.0.1:8000", server.url), "structured.md", "exec"), {"__name__": "snippet"}
        )
    parsed, text = capsys.readouterr().out.splitlines()
    assert parsed in ("is_true=True", "is_true=False") and text in ("yes", "no")

"""Every snippet of docs/programs.md and every example of programs runs, over the fake model."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.fakes import ByteTokenizer, fake_engine
from tests.server_helper import live
from tests.test_llm import use_fakes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "programs.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_every_snippet_runs_in_the_order_of_the_page(monkeypatch, capsys):
    use_fakes(monkeypatch)
    names: dict[str, object] = {"__name__": "snippet"}
    engine = fake_engine(max_context=256, cache_tokens=2048)
    engine.calibrate()
    printed = []
    with live(engine, ByteTokenizer(), 256, model_names=("fake",)) as server:
        for code in SNIPPETS:
            exec(compile(code.replace("http://127.0.0.1:8000", server.url), "programs.md", "exec"), names)
            printed.append(capsys.readouterr().out)
    reviews, idea, cities, errors, served = printed
    assert len(re.findall(r"^ (?:un)?happy \{'food': ' [a-z]{3,12}', 'mood': ' (?:un)?happy'\}$", reviews, re.M)) == 2
    assert idea.strip("\n") and len(eval(cities)) == 2
    assert errors == "['NoneType', 'ZeroDivisionError']\n"
    assert eval(served) == eval(cities)


@pytest.mark.parametrize("name", ["extract", "judge", "tree_of_thought", "agent"])
def test_an_example_runs(name, monkeypatch, capsys):
    use_fakes(monkeypatch)
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr("sys.argv", [name])
    module.main()
    out = capsys.readouterr().out
    expected = {
        "extract": r"(\{'customer': .*, 'product': .*, 'days': .*, 'outcome': '(refund|repair|replacement)'\}\n){3}",
        "judge": r"better: .* \(log odds [+-]\d+\.\d\d for the first\)\n",
        "tree_of_thought": r"Problem: (.|\n)*So it arrives at \d{1,2}:\d\d\n",
        "agent": r"(.|\n)*assistant: \{\"tool\": \"(.|\n)*",
    }
    assert re.fullmatch(expected[name], out), out

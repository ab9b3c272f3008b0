"""The benchmark of stricter and laxer rules: its bounds are the policy's own, and all of them are changed."""

from __future__ import annotations

import importlib
import json
import signal
import sys

import pytest

from benchmarks import policy_frontier
from benchmarks.policy_frontier import BOUNDS
from outpace.bench.simulation.records import ORACLE, OURS


def test_every_bound_is_one_of_the_policys(monkeypatch):
    modules = [importlib.import_module(f"outpace.speculation.{module}") for module, _ in BOUNDS]
    before = [getattr(module, name) for module, (_, name) in zip(modules, BOUNDS, strict=True)]
    assert all(isinstance(value, float) and value > 0.0 for value in before)
    for module, (_, name), value in zip(modules, BOUNDS, before, strict=True):
        monkeypatch.setattr(module, name, value)  # put back when the test ends
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    policy_frontier._begin(0.5)
    after = [getattr(module, name) for module, (_, name) in zip(modules, BOUNDS, strict=True)]
    assert after == pytest.approx([0.5 * value for value in before])


def test_the_table_has_a_line_for_every_factor(tmp_path, monkeypatch, capsys):
    path = tmp_path / "frontier.json"
    arguments = ["--factors", "0.25", "1", "--only", "stairs-of-8 c8 text 0.95", "--jobs", "1", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["policy_frontier.py", *arguments])
    assert policy_frontier.main() == 0
    rows = json.loads(path.read_text())["factors"]
    assert [row["factor"] for row in rows] == [0.25, 1.0]
    assert all(row["num_scenarios"] == 1 and row["geometric_mean"].keys() == {OURS, ORACLE} for row in rows)
    strict, usual = rows
    assert strict["worst"]["p99_tpot_ratio"] < usual["worst"]["p99_tpot_ratio"], "the factor has reached the simulation"
    assert len(capsys.readouterr().out.splitlines()) == 5

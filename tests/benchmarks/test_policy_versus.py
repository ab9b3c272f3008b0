"""The benchmark of two versions: its figures, its table, the options it rejects, and the worker's answers."""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path

import pytest

import outpace
from benchmarks import policy_versus
from benchmarks.policy_versus import check_apart, check_block, figures, groups, print_table, run_block
from tests.bench_helper import engine_target

T_2 = 4.302652730  # Student's quantiles of 0.975, by degrees of freedom
T_4 = 2.776445105


def sums(tokens_per_second: float, sha256: str = "same") -> dict[str, object]:
    return {
        "decode_seconds": 2.0,
        "decode_tokens": 2 * tokens_per_second,
        "num_drafted": 10,
        "num_accepted": 5,
        "idle_cpu_seconds": 0.0005,
        "sha256": sha256,
        "error": None,
    }


def made(*speeds: tuple[float, float, float]) -> list[dict[str, dict[str, object]]]:
    return [{"plain": sums(plain), "old": sums(old), "new": sums(new)} for plain, old, new in speeds]


def spread(middle: float, step: float) -> list[dict[str, dict[str, object]]]:
    """Three blocks: new/old is `middle` as a geometric mean, and its logarithm has the standard deviation `step`."""
    return made(*((100.0, 100.0, 100.0 * middle * math.exp(way * step)) for way in (-1, 0, 1)))


def made_results() -> dict[str, object]:
    blocks = {"chat/0/4": spread(1.2, 0.1), "story/0/4": spread(0.9, 0.1), "story/1/8": made((100.0, 110.0, 121.0))}
    cells = {name: {"blocks": each, "figures": figures(each)} for name, each in blocks.items()}
    version = {"version": "1.0", "commit": "abcdef", "python": "3.11"}
    return {
        "measured": {"models": ["made.gguf"], "backend": "native", "block_size": None, "max_tokens": 32},
        "versions": {"new": version, "old": version},
        "provenance": {"cpu": "made", "cores": 2},
        "cells": cells,
        "groups": groups(cells),
    }


def test_a_cell_has_the_geometric_mean_of_its_blocks_and_students_interval():
    ratios = figures(spread(1.2, 0.1))["ratios"]
    factor = math.exp(T_2 * 0.1 / math.sqrt(3))
    expected = {"value": 1.2, "low": 1.2 / factor, "high": 1.2 * factor, "num_units": 3}
    assert ratios["new/old"] == pytest.approx(expected)
    assert ratios["new/plain"] == pytest.approx(expected)
    assert ratios["old/plain"] == pytest.approx({"value": 1.0, "low": 1.0, "high": 1.0, "num_units": 3})


def test_blocks_are_paired():
    """The machine is half as fast in the second block and twice as fast in the third; the intervals stay exact."""
    found = figures(made((100.0, 110.0, 121.0), (50.0, 55.0, 60.5), (200.0, 220.0, 242.0)))
    assert found["ratios"]["new/old"] == pytest.approx({"value": 1.1, "low": 1.1, "high": 1.1, "num_units": 3})
    assert found["ratios"]["new/plain"]["value"] == pytest.approx(1.21)
    assert found["decode_tokens_per_second"] == pytest.approx({"plain": 350 / 3, "old": 385 / 3, "new": 423.5 / 3})
    assert found["num_unequal"] == 0


def test_two_blocks_have_no_interval_and_answers_of_one_token_have_no_ratio():
    two = figures(spread(1.2, 0.0)[:2])["ratios"]["new/old"]
    assert two["value"] == pytest.approx(1.2) and two["low"] is None and two["high"] is None
    short = made((1.0, 1.0, 1.0))
    for each in short[0].values():
        each.update(decode_seconds=0.0, decode_tokens=0)
    found = figures(short)
    assert math.isnan(found["ratios"]["new/old"]["value"])
    cells = {"chat/0/1": {"blocks": short}, "story/0/1": {"blocks": spread(1.2, 0.1)}}
    assert groups(cells)["1"]["ratios"]["new/old"] == pytest.approx(figures(spread(1.2, 0.1))["ratios"]["new/old"])


def test_cells_of_a_group_count_alike():
    found = groups({"chat/0/4": {"blocks": spread(1.2, 0.1)}, "story/0/4": {"blocks": spread(0.9, 0.1)}})
    assert found.keys() == {"4"} and found["4"]["num_cells"] == 2
    value = math.sqrt(1.2 * 0.9)
    factor = math.exp(T_4 * math.sqrt(2 * 0.1**2 / 3) / 2)
    expected = {"value": value, "low": value / factor, "high": value * factor, "num_units": 6}
    assert found["4"]["ratios"]["new/old"] == pytest.approx(expected)

    one_is_sure = groups({"chat/0/4": {"blocks": spread(1.2, 0.1)}, "story/0/4": {"blocks": spread(0.9, 0.0)}})
    factor = math.exp(T_2 * math.sqrt(0.1**2 / 3) / 2)
    assert one_is_sure["4"]["ratios"]["new/old"]["low"] == pytest.approx(value / factor)

    one_is_short = groups({"chat/0/4": {"blocks": spread(1.2, 0.1)}, "story/0/4": {"blocks": spread(0.9, 0.1)[:2]}})
    assert one_is_short["4"]["ratios"]["new/old"]["low"] is None


def test_the_same_folder_twice_is_refused(tmp_path, monkeypatch):
    check_apart(tmp_path / "one", tmp_path / "two")
    with pytest.raises(SystemExit, match="both versions are the same folder"):
        check_apart(tmp_path / "one", tmp_path / "two" / ".." / "one")
    # Whatever this interpreter has installed, `other` imports the package that is tested here.
    package, other = Path(outpace.__file__).resolve().parents[1], tmp_path / "python"
    other.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(package))} exec {shlex.quote(sys.executable)} "$@"\n')
    other.chmod(0o755)
    monkeypatch.setattr(sys, "argv", ["policy_versus.py", "--other", str(other), "--json", str(tmp_path / "file")])
    with pytest.raises(SystemExit, match="both versions are the same folder"):
        policy_versus.main()


def test_what_is_no_python_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["policy_versus.py", "--other", str(tmp_path / "python")])
    with pytest.raises(SystemExit, match="cannot be run"):
        policy_versus.main()


def test_other_tokens_end_the_measurement_where_the_backend_is_exact():
    block = {"plain": sums(100.0), "old": sums(100.0), "new": sums(100.0, "another")}
    assert figures([block])["num_unequal"] == 1
    check_block(block, "chat/0/1 block 1", is_exact=False)
    with pytest.raises(SystemExit, match="'new' gave other tokens"):
        check_block(block, "chat/0/1 block 1", is_exact=True)


def test_the_table_shows_cells_groups_and_lower_bounds(tmp_path, monkeypatch, capsys):
    path = tmp_path / "versus.json"
    path.write_text(json.dumps(made_results()))
    monkeypatch.setattr(sys, "argv", ["policy_versus.py", "--table", str(path)])
    assert policy_versus.main() == 0
    lines = capsys.readouterr().out.splitlines()
    chat = next(line for line in lines if line.startswith("chat/0/4"))
    assert chat.split()[:5] == ["chat/0/4", "3", "100.0", "100.0", "120.4"]  # 120 (1 + 2 cosh 0.1) / 3
    assert "1.200 (0.936 .. 1.538)" in chat
    assert "1.100 (no interval)" in next(line for line in lines if line.startswith("story/1/8"))
    assert "1.039 (0.928 .. 1.164)" in next(line for line in lines if line.startswith("2 cells at 4"))
    assert "  all cells at 4: new/old 0.928, new/plain 0.928, old/plain 1.000" in lines
    assert "  all cells at 8: new/old -, new/plain -, old/plain -" in lines
    assert "  lowest of a cell, new/old: 0.702 in story/0/4" in lines
    assert lines[-1].endswith("at most 0.5 ms of CPU time")


def test_a_file_without_blocks_has_a_table(capsys):
    print_table({**made_results(), "cells": {}, "groups": {}})
    assert capsys.readouterr().out.splitlines()[-1] == "no block is done"


def test_the_worker_runs_the_same_requests_under_both_settings():
    target = engine_target()
    cell = {"workload": "chat", "temperature": 0.7, "concurrency": 4}
    command = {"cell": cell, "index": 0, "block_size": 4, "max_tokens": 8}
    plain, auto = (run_block(target, {**command, "setting": setting}) for setting in ("off", "auto"))
    assert plain["error"] is None and plain["num_drafted"] == 0
    assert 0 < plain["decode_tokens"] <= plain["num_tokens"] <= 32
    assert plain["sha256"] == auto["sha256"]
    later = run_block(target, {**command, "index": 1, "setting": "off"})
    assert later["sha256"] != plain["sha256"]

"""What is published is what the results files hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import results_page

ROOT = Path(__file__).parents[2]
CHECKED = ("docs/gpu.md", "docs/speculation.md")  # tables in which figures are quoted a second time
COMMIT = re.compile(r"commit ([0-9a-f]{7})\b")


def test_the_results_page_and_the_readme_are_up_to_date():
    assert results_page.PAGE.read_text(encoding="utf-8") == results_page.page()
    assert results_page.README.read_text(encoding="utf-8") == results_page.readme()


def test_a_figure_that_was_changed_by_hand_is_found(tmp_path, monkeypatch):
    changed = tmp_path / "README.md"
    changed.write_text(results_page.readme().replace("| measured |", "| measured here |"), encoding="utf-8")
    monkeypatch.setattr(results_page, "README", changed)
    assert results_page.readme() != changed.read_text(encoding="utf-8")


def test_the_readme_is_short():
    assert len(results_page.README.read_text(encoding="utf-8").splitlines()) <= 110


@pytest.mark.parametrize("name", CHECKED)
def test_figures_quoted_in_tables_stand_in_the_files_they_are_said_to_come_from(name: str):
    """Every number with decimals in a table below a line that names a results file and its commit."""
    source, commit, num_checked = "", "", 0
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        named = re.findall(r"`(?:benchmarks/results/)?(\w+)\.txt`", line)
        if named:
            files = [ROOT / "benchmarks" / "results" / f"{each}.txt" for each in named]
            source = "\n".join(file.read_text(encoding="utf-8") for file in files)
            quoted = COMMIT.search(line)
            commit = quoted[1] if quoted is not None else ""
            assert not commit or commit in source, f"{named[0]} is of another commit than {name} says"
        elif line.startswith("#"):
            source = ""
        elif line.startswith("|") and source and commit:
            for figure in re.findall(r"\b\d+\.\d+\b", line):
                num_checked += 1
                assert is_in(figure, source), f"{figure} in {name} is not in its results file"
    assert num_checked > 10


def is_in(figure: str, source: str) -> bool:
    """Whether the file has the figure, or one that rounds to it."""
    digits = len(figure.partition(".")[2])
    return any(round(float(found), digits) == float(figure) for found in re.findall(r"\d+\.\d+", source))

"""Figures, JSON, text and HTML from synthetic runs; the HTML also in a browser, if there is one."""

from __future__ import annotations

import json
import re
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest

from outpace.bench import compare, results, terminal
from outpace.bench.charts import Point, Series, bar_chart, line_chart
from outpace.bench.html import as_html, write_html
from outpace.errors import UsageError
from tests.bench_results import PLAIN_SECONDS, cell, flat, made_results
from tests.browser import CHROMIUM

CLASSES = ("chat", "code_edit", "json")


@pytest.fixture(scope="module")
def made():
    cells = [
        cell(flat(CLASSES, auto=1.5, suffix_4=1.4), CLASSES, temperature=t, concurrency=c, num_blocks=6, seed=i)
        for i, (t, c) in enumerate([(0.0, 1), (0.0, 4), (1.0, 1), (1.0, 4)])
    ]
    cells.append(cell(flat(CLASSES, auto=1.5, suffix_2=1.3, suffix_8=1.6), CLASSES, purpose="sweep"))
    return made_results(cells)


def test_figures_are_what_was_put_in(made):
    first = made["cells"][0]["settings"]
    assert first["off"]["time_to_first_token"]["p50"] == pytest.approx(0.1)
    assert first["auto"]["speedup"]["value"] == pytest.approx(1.5, rel=0.03)
    assert first["off"]["speedup"]["value"] == 1.0
    assert first["off"]["acceptance"] is None
    assert first["auto"]["acceptance"]["rate"] == pytest.approx(0.6)
    assert first["auto"]["acceptance"]["per_request"]["histogram"] == [0, 0, 0, 0, 0, 0, 6, 0, 0, 0]
    assert first["auto"]["draft_share"] == pytest.approx(0.1)
    assert first["auto"]["num_unequal"] == 0
    assert 0.5 * PLAIN_SECONDS < first["off"]["time_per_output_token"]["p50"] < 2 * PLAIN_SECONDS
    assert set(made["cells"][0]["classes"]) == set(CLASSES)


def test_json_is_whole_strict_and_read_back(made, tmp_path):
    made["memory"]["odd"] = float("nan")
    path = tmp_path / "deep" / "results.json"
    results.save(path, made)
    text = path.read_text()
    assert "NaN" not in text and {"verdict", "cells", "provenance"} <= set(json.loads(text))
    assert results.load(path)["verdict"]["decision"] == "use"


@pytest.mark.parametrize(
    ("content", "words"), [("{", "not JSON"), ("[]", "not written by"), ('{"format": 1}', "not written by")]
)
def test_other_files_are_refused(tmp_path, content, words):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=words):
        results.load(path)
    with pytest.raises(UsageError, match="cannot read"):
        results.load(tmp_path / "none.json")


def test_the_text_begins_with_the_verdict_and_has_every_cell(made):
    text = terminal.as_text(made)
    assert text.startswith("Use it: with auto")
    for each in made["cells"]:
        assert each["name"] in text
    assert "outpace serve" in text


def test_comparing_two_runs_shows_what_surely_changed(made):
    slower = made_results([cell(flat(CLASSES, auto=1.1, suffix_4=1.4), CLASSES, num_blocks=12)])
    text = compare.as_text(made, slower)
    assert "1.5" in text and "WORSE" in text
    assert "measured only before: temperature 0, 4 at once" in text
    other = slower | {"provenance": slower["provenance"] | {"cpu": "another CPU"}}
    assert "cpu differs" in compare.as_text(slower, other)


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def test_the_page_has_every_picture_and_asks_for_nothing(made):
    html = as_html(made)
    page = Page()
    page.feed(html)
    assert page.tags.count("svg") == 11, "temperature, load, class, depth, four CDFs, tail, two of acceptance"
    assert page.references == [] and "script" not in page.tags and "link" not in page.tags
    assert "@import" not in html and "url(" not in html
    assert "viewport" in html and "@media print" in html
    assert "NaN" not in html and "None" not in re.sub(r"<dd>.*?</dd>", "", html)


def test_text_from_outside_is_escaped(made):
    spoiled = made | {"target": made["target"] | {"model": "<script>alert(1)</script>"}}
    assert "<script>" not in as_html(spoiled)


def test_a_report_of_very_little_still_opens():
    little = made_results([cell(flat(("chat",), auto=1.2), ("chat",), num_blocks=1)])
    html = as_html(little)
    assert "Not known yet" in html and html.count("<svg") >= 4


def test_charts_of_nothing_and_of_one_value():
    assert line_chart("x", [], x_label="a", y_label="b") == ""
    assert bar_chart("x", [], [], x_label="a", y_label="b") == ""
    flat_line = line_chart("x", [Series("s", [Point(1.0, 0.0)], "#000")], x_label="a", y_label="b")
    assert "nan" not in flat_line and "<circle" in flat_line


def test_a_place_that_cannot_be_written_is_named(made, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        write_html(tmp_path / "file" / "report.html", made)
    with pytest.raises(UsageError, match="cannot write"):
        results.save(tmp_path / "file" / "report.json", made)


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1100, 390])
def test_every_picture_is_drawn_in_a_browser_without_the_network(made, tmp_path, width):
    path, image, log = tmp_path / "report.html", tmp_path / "shot.png", tmp_path / "net.json"
    write_html(path, made)
    height = 4200 if width > 600 else 9000
    subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}", f"--window-size={width},{height}",
         f"--screenshot={image}", path.as_uri()],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    asked = re.findall(r'"url":\s*"(https?://[^"]+)"', log.read_text())
    assert [url for url in asked if "google" not in url and "gvt1" not in url] == [], "the page asked the network"
    pixels = np.asarray(pytest.importorskip("PIL.Image").open(image).convert("RGB"))
    assert pixels.shape[1] == width
    # Charts draw lines or bars in the colour of `auto`: count the bands of it down the page.
    blue = np.all(abs(pixels.astype(int) - [0x1D, 0x4E, 0xD8]) < 40, axis=2)
    rows = blue[:, : width // 2 if width > 600 else width].any(axis=1)
    bands = int((np.diff(rows.astype(int)) == 1).sum())
    assert bands >= 6, "pictures are missing"

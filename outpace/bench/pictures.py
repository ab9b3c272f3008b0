"""The charts of a report, and where in the results their numbers are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outpace.bench.charts import COLOURS, Point, Series, bar_chart, line_chart
from outpace.bench.figures import HISTOGRAM_BINS
from outpace.bench.findings import grid_cells

Results = Mapping[str, Any]
Cell = Mapping[str, Any]


def pictures(results: Results) -> list[str]:
    """Every chart that has numbers."""
    colours = _colours(results)
    found = [
        _by_temperature(results, colours),
        _by_load(results, colours),
        _by_class(results, colours),
        _depths(results),
        *_cdfs(results, colours),
        _tail_by_load(results, colours),
        _acceptance_histogram(results, colours),
        _acceptance_by_position(results),
    ]
    return [picture for picture in found if picture]


def _colours(results: Results) -> dict[str, str]:
    """Plain decoding is always grey and `auto` always blue."""
    names = ["off", "auto", *(name for cell in results["cells"] for name in cell["settings"])]
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(dict.fromkeys(names))}


def _by_temperature(results: Results, colours: Mapping[str, str]) -> str:
    cells = grid_cells(results)
    line = [cell for cell in cells if cell["load"] == cells[0]["load"]] if cells else []
    names = [f"{cell['temperature']:g}" for cell in line]
    where = line[0]["load"]["name"] if line else ""
    return line_chart(
        f"Speedup by temperature, {where}",
        _speedup_series(line, colours),
        x_label="temperature",
        y_label="times plain decoding",
        x_names=names,
        reference=1.0,
    )


def _by_load(results: Results, colours: Mapping[str, str]) -> str:
    line = _first_temperature(results)
    where = f"{line[0]['temperature']:g}" if line else ""
    return line_chart(
        f"Speedup by load, temperature {where}",
        _speedup_series(line, colours),
        x_label="load",
        y_label="times plain decoding",
        x_names=[cell["load"]["name"] for cell in line],
        reference=1.0,
    )


def _first_temperature(results: Results) -> list[Cell]:
    cells = grid_cells(results)
    return [cell for cell in cells if cell["temperature"] == cells[0]["temperature"]] if cells else []


def _speedup_series(cells: Sequence[Cell], colours: Mapping[str, str]) -> list[Series]:
    names = [name for name in (cells[0]["settings"] if cells else ()) if name != "off"]
    series = []
    for name in names:
        points = [
            _point(float(i), cell["settings"][name]["speedup"])
            for i, cell in enumerate(cells)
            if cell["settings"].get(name, {}).get("speedup")
        ]
        if points:
            series.append(Series(name, points, colours[name]))
    return series


def _point(x: float, estimate: Mapping[str, Any]) -> Point:
    return Point(x, estimate["value"], estimate["low"], estimate["high"])


def _by_class(results: Results, colours: Mapping[str, str]) -> str:
    overall = {name: each for name, each in results["overall"].items() if name != "off"}
    if not overall:
        return ""
    first = next(iter(overall.values()))
    classes = [name for name in first if name != "all" and all(each.get(name) for each in overall.values())]
    series = [
        Series(name, [_point(0.0, each[category]) for category in classes], colours[name])
        for name, each in overall.items()
    ]
    return bar_chart(
        "Speedup by class, all loads and temperatures",
        classes,
        series,
        x_label="class of request",
        y_label="times plain decoding",
        reference=1.0,
    )


def _depths(results: Results) -> str:
    """The sweep: one line per proposer over its depths, and `auto` as a horizontal line."""
    cell = next((cell for cell in results["cells"] if cell["purpose"] == "sweep"), None)
    if cell is None:
        return ""
    fixed = {name: f["speedup"] for name, f in cell["settings"].items() if ":" in name and f["speedup"]}
    depths = sorted({int(name.split(":")[1]) for name in fixed})
    methods = dict.fromkeys(name.split(":")[0] for name in fixed)
    series = [
        Series(
            method,
            [_point(float(i), fixed[f"{method}:{d}"]) for i, d in enumerate(depths) if f"{method}:{d}" in fixed],
            COLOURS[2 + number],
        )
        for number, method in enumerate(methods)
    ]
    auto = cell["settings"].get("auto", {}).get("speedup")
    if auto and depths:
        level = [Point(float(i), auto["value"]) for i in range(len(depths))]
        series.append(Series("auto", level, COLOURS[1], dashed=True))
    return line_chart(
        f"Speedup by depth, temperature {cell['temperature']:g}, {cell['load']['name']}",
        series,
        x_label="draft tokens per step",
        y_label="times plain decoding",
        x_names=[str(depth) for depth in depths],
        reference=1.0,
    )


def _cdfs(results: Results, colours: Mapping[str, str]) -> Iterator[str]:
    """Latency by setting, for the lightest and the heaviest load."""
    line = _first_temperature(results)
    for cell in {cell["name"]: cell for cell in (line[:1] + line[-1:])}.values():
        for key, label, scale in (
            ("end_to_end", "seconds to the end of the answer", 1.0),
            ("time_per_output_token", "milliseconds per output token", 1e3),
        ):
            what = "Whole answer" if key == "end_to_end" else "Per token"
            series = [
                Series(name, _cdf_points(figures["cdf"][key], scale), colours[name])
                for name, figures in cell["settings"].items()
                if figures["cdf"][key]
            ]
            yield line_chart(
                f"{what}: {cell['name']}", series, x_label=label, y_label="share of requests", markers=False
            )


def _cdf_points(values: Sequence[float], scale: float) -> list[Point]:
    last = max(len(values) - 1, 1)
    return [Point(scale * value, i / last) for i, value in enumerate(values)]


def _tail_by_load(results: Results, colours: Mapping[str, str]) -> str:
    line = _first_temperature(results)
    series: list[Series] = []
    for name in line[0]["settings"] if line else ():
        for percent, dashed in (("p50", False), ("p99", True)):
            times = [cell["settings"][name]["time_per_output_token"][percent] for cell in line]
            points = [Point(float(i), 1e3 * time) for i, time in enumerate(times) if time is not None]
            if points:
                series.append(Series(name, points, colours[name], dashed, in_legend=not dashed))
    return line_chart(
        "Time per output token by load: P50, and P99 dashed",
        series,
        x_label="load",
        y_label="milliseconds",
        x_names=[cell["load"]["name"] for cell in line],
    )


def _acceptance_histogram(results: Results, colours: Mapping[str, str]) -> str:
    groups = [f"{i / HISTOGRAM_BINS:.1f}" for i in range(HISTOGRAM_BINS)]
    series = []
    for name in results["overall"]:
        counts = [0] * HISTOGRAM_BINS
        for cell in grid_cells(results):
            acceptance = cell["settings"].get(name, {}).get("acceptance")
            if acceptance:
                counts = [a + b for a, b in zip(counts, acceptance["per_request"]["histogram"], strict=True)]
        if any(counts):
            series.append(Series(name, [Point(0.0, float(count)) for count in counts], colours[name]))
    return bar_chart(
        "Acceptance per request",
        groups,
        series,
        x_label="share of draft tokens accepted (lower edge)",
        y_label="requests",
    )


def _acceptance_by_position(results: Results) -> str:
    """Only fixed settings: their positions mean the same in every step. One line per temperature."""
    cells = grid_cells(results)
    series: list[Series] = []
    for cell in cells:
        if cell["load"] != cells[0]["load"]:
            continue
        for name, figures in cell["settings"].items():
            rates = (figures["acceptance"] or {}).get("per_position") or []
            if name == "auto" or not rates:
                continue
            points = [Point(float(i), rate) for i, rate in enumerate(rates) if rate is not None]
            label = f"{name} at {cell['temperature']:g}"
            series.append(Series(label, points, COLOURS[1 + len(series) % (len(COLOURS) - 1)]))
    depth = max((len(each.points) for each in series), default=0)
    return line_chart(
        "Acceptance by position in the draft",
        series,
        x_label="position",
        y_label="share of drafted tokens accepted",
        x_names=[str(i + 1) for i in range(depth)],
    )

"""Draws charts as inline SVG: lines with intervals, distribution curves, bars. `pictures.py` chooses their contents.

All reports use it; `web/style.css` gives the colours and is part of every `web.documents.document`. The live charts of
the server's page change in the browser, so `web/page/charts.js` draws them, in the same styles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 36, 70
_TALLEST = 1.6  # times the largest value: higher intervals are cut off
_PALETTE = ("#6b7280", "#1d4ed8", "#c2410c", "#047857", "#7e22ce", "#b91c1c", "#0e7490", "#a16207", "#be185d")
# Those of web/style.css, which has others for dark; where a chart stands without it, ours.
COLOURS = tuple(f"var(--series-{i}, {colour})" for i, colour in enumerate(_PALETTE))


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[Point]
    colour: str
    dashed: bool = False
    in_legend: bool = True


@dataclass(frozen=True, slots=True)
class _Axis:
    """From values to pixels."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        span = self.high - self.low or 1.0
        return round(self.begin + (value - self.low) / span * (self.end - self.begin), 2)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values, about `count` of them."""
        rough = (self.high - self.low) / count or 1.0
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(i * step, 10) for i in range(first, last + 1)]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    x_names: Sequence[str] | None = None,
    reference: float | None = None,
    from_zero: bool = True,
    markers: bool = True,
) -> str:
    """With `x_names`, points have x = 0, 1, 2 ... and these names as ticks."""
    points = [point for each in series for point in each.points]
    if not points:
        return ""
    tops = [*_tops(points), reference or 0.0]
    bottoms = [point.low if point.low is not None else point.y for point in points]
    y = _y_axis(0.0 if from_zero else min([*bottoms, reference or math.inf]), max(tops))
    xs = [point.x for point in points]
    margin = 0.25 if x_names else 0.0
    x = _Axis(min(xs) - margin, max(xs) + margin, _LEFT, WIDTH - _RIGHT)
    parts = [_y_grid(y), _reference(y, reference), _x_ticks(x, x_names), _labels(x_label, y_label)]
    spread = 5.0 if markers and len(series) > 1 else 0.0  # so that intervals at one place do not cover each other
    for index, each in enumerate(series):
        shift = (index - (len(series) - 1) / 2) * spread
        parts.append(_line(each, x, y, shift, markers))
    return _figure(title, parts, _legend(series))


def bar_chart(
    title: str,
    groups: Sequence[str],
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    reference: float | None = None,
) -> str:
    """One bar per group and series; a series' i-th point belongs to the i-th group, and x is not used."""
    points = [point for each in series for point in each.points]
    if not points:
        return ""
    y = _y_axis(0.0, max([*_tops(points), reference or 0.0]))
    slot = (WIDTH - _LEFT - _RIGHT) / max(len(groups), 1)
    width = min(slot * 0.8 / max(len(series), 1), 34.0)
    parts = [_y_grid(y), _labels(x_label, y_label)]
    for i, name in enumerate(groups):
        middle = _LEFT + slot * (i + 0.5)
        parts.append(_text(middle, HEIGHT - _BOTTOM + 15, name, size=9 if len(groups) > 6 else 10))
        for j, each in enumerate(series):
            if i < len(each.points):
                left = middle + (j - len(series) / 2) * width
                parts.append(_bar(each.points[i], left, width * 0.92, y, each.colour))
    parts.append(_reference(y, reference))
    return _figure(title, parts, _legend(series))


def _tops(points: Sequence[Point]) -> list[float]:
    """The top of each point's interval. A very wide interval is cut off, so that the rest stays readable."""
    most = _TALLEST * max(point.y for point in points)
    return [point.y if point.high is None else min(point.high, most) for point in points]


def _y_axis(low: float, high: float) -> _Axis:
    room = (high - low) * 0.06 or 0.1
    return _Axis(low, high + room, HEIGHT - _BOTTOM, _TOP)


def _y_grid(y: _Axis) -> str:
    lines = []
    for tick in y.ticks():
        at = y.at(tick)
        lines.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at}" y2="{at}" class="grid"/>')
        lines.append(_text(_LEFT - 6, at + 3.5, f"{tick:g}", anchor="end"))
    return "".join(lines)


def _x_ticks(x: _Axis, names: Sequence[str] | None) -> str:
    places = [(float(i), name) for i, name in enumerate(names)] if names else [(t, f"{t:g}") for t in x.ticks()]
    return "".join(_text(x.at(value), HEIGHT - _BOTTOM + 15, name) for value, name in places)


def _labels(x_label: str, y_label: str) -> str:
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    upright = f'transform="rotate(-90 14 {middle})"'
    return _text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - _BOTTOM + 32, x_label) + _text(
        14, middle, y_label, extra=upright
    )


def _reference(y: _Axis, value: float | None) -> str:
    if value is None:
        return ""
    at = y.at(value)
    return f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at}" y2="{at}" class="reference"/>'


def _line(series: Series, x: _Axis, y: _Axis, shift: float, markers: bool) -> str:
    places = [(x.at(point.x) + shift, y.at(point.y), point) for point in series.points]
    path = " ".join(f"{left:.1f},{top:.1f}" for left, top, _ in places)
    dash = ' stroke-dasharray="5 4"' if series.dashed else ""
    parts = [f'<polyline points="{path}" fill="none" stroke="{series.colour}" stroke-width="2"{dash}/>']
    for left, top, point in places if markers else ():
        parts.append(_whisker(left, point, y, series.colour))
        parts.append(f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3.2" fill="{series.colour}"/>')
    return "".join(parts)


def _bar(point: Point, left: float, width: float, y: _Axis, colour: str) -> str:
    top, bottom = y.at(point.y), y.at(0.0)
    bar = (
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{max(bottom - top, 0):.1f}" '
        f'fill="{colour}" fill-opacity="0.8"/>'
    )
    return bar + _whisker(left + width / 2, point, y, "var(--ink, #111827)")


def _whisker(left: float, point: Point, y: _Axis, colour: str) -> str:
    if point.low is None or point.high is None:
        return ""
    return (
        f'<line x1="{left:.1f}" x2="{left:.1f}" y1="{y.at(point.low)}" y2="{y.at(point.high)}" '
        f'stroke="{colour}" stroke-width="1.3"/>'
    )


def _legend(series: Sequence[Series]) -> str:
    """Below the axis; there is space for two rows."""
    parts, left, top = [], float(_LEFT), HEIGHT - 26
    for each in series:
        if not each.in_legend:
            continue
        width = 24 + 6.0 * len(each.name)
        if left + width > WIDTH:
            left, top = float(_LEFT), top + 14
        parts.append(f'<rect x="{left:.0f}" y="{top}" width="10" height="10" fill="{each.colour}"/>')
        parts.append(_text(left + 14, top + 9, each.name, anchor="start"))
        left += width
    return "".join(parts)


def _text(left: float, top: float, text: str, *, anchor: str = "middle", size: int = 10, extra: str = "") -> str:
    return f'<text x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}" font-size="{size}" {extra}>{escape(text)}</text>'


def _figure(title: str, parts: Sequence[str], legend: str) -> str:
    heading = f'<text x="{_LEFT}" y="20" font-size="13" font-weight="600">{escape(title)}</text>'
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{heading}{''.join(parts)}{legend}</svg></figure>"
    )

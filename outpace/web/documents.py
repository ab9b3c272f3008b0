"""A report as one HTML file with the page's styles inside. It loads nothing and has no scripts.

`outpace.bench.charts` draws the charts of reports; `page/charts.js` draws those of the page, which change while they
are looked at. Both draw SVG with the same classes, and `style.css` styles both.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

_STYLE = Path(__file__).with_name("style.css")


def document(title: str, sections: Iterable[str]) -> str:
    """`sections` are HTML; everything in them that is not ours must be escaped."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style()}</style></head>"
        f'<body class="report">{"".join(sections)}</body></html>\n'
    )


def style() -> str:
    return _STYLE.read_text(encoding="utf-8")

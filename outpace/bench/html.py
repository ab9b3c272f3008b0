"""The report as one HTML file: verdict, charts, tables, provenance. It loads nothing and has no scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from outpace.bench.formats import interval, number
from outpace.bench.pictures import pictures
from outpace.errors import UsageError
from outpace.web.documents import document

Results = Mapping[str, Any]

_TITLES = {
    "use": "Use it",
    "use_for_some": "Use it for some requests",
    "leave_off": "Leave it off",
    "no_difference": "No difference beyond noise",
    "too_little_data": "Not known yet",
}


def write_html(path: Path, results: Results) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_html(results), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another path for the report") from error


def as_html(results: Results) -> str:
    verdict = results["verdict"]
    sections = [
        f"<h1>Does speculation pay? {escape(_TITLES[verdict['decision']])}</h1>",
        f'<p class="note">{escape(_subject(results))}</p>',
        f'<p class="verdict {escape(verdict["decision"])}">{escape(verdict["sentence"])}</p>',
        _list(finding["sentence"] for finding in verdict["findings"]),
        _note(results),
        _commands(verdict["commands"]),
        "<h2>Charts</h2>",
        '<p class="note">Vertical lines are 95% intervals. 1 is plain decoding.</p>',
        f'<div class="pictures">{"".join(pictures(results))}</div>',
        "<h2>By class</h2>",
        _table(*_class_table(results)),
        "<h2>All cells</h2>",
        _table(*_cell_table(results)),
        f'<p class="note">{escape(_objective(results))}</p>',
        "<h2>Provenance</h2>",
        _provenance(results),
    ]
    return document(f"outpace bench: {_TITLES[verdict['decision']]}", sections)


def _subject(results: Results) -> str:
    target, origin = results["target"], results["provenance"]
    what = target.get("model") or target["target"]
    return f"{what}, {target['target']}, on {origin['cpu']} ({origin['cores']} cores), Outpace {origin['outpace']}"


def _note(results: Results) -> str:
    plan = results["plan"]
    if plan["was_interrupted"]:
        return '<p class="note">The run was interrupted; the figures cover only what was measured before.</p>'
    if plan["ran_out_of_time"]:
        return '<p class="note">The time budget ended before the whole plan had run.</p>'
    return ""


def _commands(commands: Mapping[str, str]) -> str:
    if not commands:
        return ""
    blocks = (f"<p>{escape(name)}</p><pre>{escape(command)}</pre>" for name, command in commands.items())
    return f"<h2>Commands</h2>{''.join(blocks)}"


def _class_table(results: Results) -> tuple[list[str], list[list[str]]]:
    settings = [name for name in results["overall"] if name != "off"]
    classes = list(results["overall"][settings[0]]) if settings else []
    rows = [[each, *(interval(results["overall"][name].get(each)) for name in settings)] for each in classes]
    return ["speedup", *settings], rows


def _cell_table(results: Results) -> tuple[list[str], list[list[str]]]:
    head = ["", "requests", "failed", "tokens/s", "speedup", "throughput", "estimated", "accepted", "P10", "length"]
    head += [f"{name} {p}" for name in ("TTFT", "TPOT", "E2E") for p in ("P50", "P90", "P99")] + ["good", "unequal"]
    rows: list[list[str]] = []
    for cell in results["cells"]:
        rows.append([f"{cell['name']} ({cell['num_blocks']} blocks)"])
        rows += [[f"  {name}", *_cell_row(figures)] for name, figures in cell["settings"].items()]
    return head, rows


def _cell_row(figures: Mapping[str, Any]) -> Iterator[str]:
    acceptance = figures["acceptance"] or {}
    yield str(figures["num_requests"])
    yield str(figures["num_failed"])
    yield number(figures["tokens_per_second"], ".1f")
    yield interval(figures["speedup"])
    yield interval(figures["throughput_ratio"])
    yield number(figures["estimated_speedup"], ".2f")
    yield number(acceptance.get("rate"), ".0%")
    yield number(acceptance.get("per_request", {}).get("p10"), ".0%")
    yield number(acceptance.get("mean_accepted_length"), ".2f")
    for key, style, scale in (
        ("time_to_first_token", ".0f", 1e3),
        ("time_per_output_token", ".1f", 1e3),
        ("end_to_end", ".2f", 1.0),
    ):
        for percent in ("p50", "p90", "p99"):
            value = figures[key][percent]
            yield number(None if value is None else scale * value, style)
    yield number(figures["good_share"], ".0%")
    yield number(figures["num_unequal"], "d")


def _objective(results: Results) -> str:
    objective = results["plan"]["objective"]
    return (
        "TTFT: time to first token, ms. TPOT: time per output token after it, ms. E2E: end to end, s. Good: answered "
        f"within {1e3 * objective['time_to_first_token']:.0f} ms to the first token and "
        f"{1e3 * objective['time_per_output_token']:.0f} ms for each further one. Unequal: answers that differ from "
        "plain decoding with the same prompt and seed."
    )


def _provenance(results: Results) -> str:
    facts = dict(results["provenance"])
    models = facts.pop("models", {})
    facts |= {f"model {name}": f"sha256 {digest}" for name, digest in models.items()}
    peak = results["memory"]["peak_bytes"]
    if peak:
        facts["peak memory of the process"] = f"{peak / 1e6:.0f} MB"
    facts |= {f"config {name}": value for name, value in (results["target"].get("config") or {}).items()}
    entries = (f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items() if v not in (None, []))
    return f"<dl>{''.join(entries)}</dl>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    width = len(head)
    body = []
    for row in rows:
        is_heading = len(row) == 1
        cells = f'<td colspan="{width}">{escape(row[0])}</td>' if is_heading else "".join(
            f"<td>{escape(value)}</td>" for value in row
        )  # fmt: skip
        body.append(f"<tr{' class=cell' if is_heading else ''}>{cells}</tr>")
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="table"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _list(sentences: Iterator[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""

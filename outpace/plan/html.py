"""The plan as one HTML file: advice, memory split, speedup against load, tables. It loads nothing, without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from outpace.bench.charts import COLOURS, Point, Series, line_chart
from outpace.errors import UsageError
from outpace.plan.report import Report
from outpace.plan.terminal import gigabytes
from outpace.web.documents import document

_MOST_LINES = 6  # in a chart
_PARTS = (("weights", "target weights", COLOURS[1]), ("draft", "draft weights", COLOURS[2]),
          ("buffers", "buffers", COLOURS[0]), ("cache", "cache", COLOURS[3]))  # fmt: skip


def write_html(path: Path, report: Report) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_html(report), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another path for the report") from error


def as_html(report: Report) -> str:
    advice, target = report["advice"], report["target"]
    commands = "".join(f"<p>{escape(n)}</p><pre>{escape(c)}</pre>" for n, c in advice["commands"].items())
    sections = [
        f"<h1>Plan for {escape(target['name'])}</h1>",
        f'<p class="note">{escape(_subject(report))}</p>',
        f'<p class="verdict {escape(advice["decision"])}">{escape(advice["headline"])}</p>',
        _list(advice["sentences"]),
        f"<h2>Commands</h2>{commands}" if commands else "",
        "<h2>Memory</h2>",
        _splits(report),
        f'<h2>Speed</h2><div class="pictures">{_by_load(report)}{_by_depth(report)}</div>' if _drawn(report) else "",
        "<h2>Drafts</h2>" if report["drafts"] else "",
        _draft_table(report),
        "<h2>Precisions</h2>" if report["precisions"] else "",
        _precision_table(report),
        "<h2>What to watch</h2>" if advice["watch"] else "",
        _list(advice["watch"]),
        "<h2>Assumptions</h2>",
        _list(report["assumptions"]),
    ]
    return document(f"Outpace plan: {target['name']}", sections)


def _subject(report: Report) -> str:
    target, machine, conditions = report["target"], report["machine"], report["conditions"]
    return (
        f"{target['parameters'] / 1e9:.3g}B parameters in {target['precision']} on {machine['count']} x "
        f"{machine['name']}, {conditions['concurrency']} at once, up to {conditions['context']:,} tokens each, "
        f"temperature {conditions['temperature']:g}"
    )


# ---- pictures


def _splits(report: Report) -> str:
    """One bar per GPU: without a draft, and with the best one that has weights."""
    plans = [("no draft", report["memory"])]
    plans += [(draft["name"], draft["memory"]) for draft in report["drafts"] if draft["weight_bytes"]][:2]
    bars = []
    for name, memory in plans:
        for i, gpu in enumerate(memory["gpus"]):
            where = f", GPU {i}" if len(memory["gpus"]) > 1 else ""
            room = f"of {memory['context']:,} tokens"
            room = f"{memory['sequences']:,} sequences {room}" if memory["fits"] else f"no room for a sequence {room}"
            bars.append(f'<p class="label">{escape(name)}{where}: {escape(room)}</p>')
            bars.append(_split(gpu))
    legend = "".join(f'<span><i style="background:{colour}"></i>{label}</span>' for _, label, colour in _PARTS)
    share = 1 - report["machine"]["utilization"]
    unused = f'<span><i style="background:#fff;border:1px solid #9ca3af"></i>not used ({share:.0%})</span>'
    rows = [
        [f"{row['context']:,}", f"{row['plain']:,}", "-" if row["with_draft"] is None else f"{row['with_draft']:,}"]
        for row in report["contexts"]
    ]
    table = _table(["tokens of a sequence", "sequences without a draft", "with the best draft"], rows)
    return f'<div class="legend">{legend}{unused}</div>{"".join(bars)}{table}'


def _split(gpu: Report) -> str:
    whole = max(gpu["total"], gpu["weights"] + gpu["draft"] + gpu["buffers"])
    parts = []
    for key, label, colour in _PARTS:
        size = max(0.0, gpu[key])
        if size:
            title = f"{label}: {gigabytes(size)}"
            parts.append(f'<span title="{title}" style="width:{100 * size / whole:.2f}%;background:{colour}"></span>')
    shown = ", ".join(f"{label} {gigabytes(gpu[key])}" for key, label, _ in _PARTS if gpu[key])
    return f'<div class="split" role="img" aria-label="{shown}">{"".join(parts)}</div><p class="note">{shown}</p>'


def _drawn(report: Report) -> list[Report]:
    return [draft for draft in report["drafts"] if draft["verdict"] != "cannot"][:_MOST_LINES]


def _by_load(report: Report) -> str:
    return line_chart(
        "Speedup against load, depth chosen for each load",
        [_series(draft, "by_load", i) for i, draft in enumerate(_drawn(report))],
        x_label="requests at once",
        y_label="times plain decoding",
        x_names=[str(each["concurrency"]) for each in _drawn(report)[0]["by_load"]],
        reference=1.0,
    )


def _by_depth(report: Report) -> str:
    return line_chart(
        f"Speedup against load, fixed depth (best at {report['conditions']['concurrency']} at once)",
        [_series(draft, "at_depth", i) for i, draft in enumerate(_drawn(report))],
        x_label="requests at once",
        y_label="times plain decoding",
        x_names=[str(each["concurrency"]) for each in _drawn(report)[0]["at_depth"]],
        reference=1.0,
    )


def _series(draft: Report, key: str, number: int) -> Series:
    points = [Point(float(i), each["speedup"]) for i, each in enumerate(draft[key])]
    return Series(draft["name"], points, COLOURS[(number + 1) % len(COLOURS)], dashed=not draft["exists"])


# ---- tables


def _draft_table(report: Report) -> str:
    head = ["", "parameters", "size", "acceptance", "", "depth", "speedup", "range", "break-even", "loses from",
            "sequences", "full load, tokens/s", "plain", "verdict"]  # fmt: skip
    rows = []
    for draft in report["drafts"]:
        speed, memory = draft["speed"], draft["memory"]
        is_guess = draft["acceptance"]["source"] == "guessed"
        rows.append([
            draft["name"],
            f"{draft['parameters'] / 1e9:.3g}B" if draft["parameters"] else "-",
            f"1:{draft['ratio']:.0f}" if draft["ratio"] else "-",
            f"{draft['acceptance']['first_token']:.0%}",
            draft["acceptance"]["source"],
            str(speed["depth"]),
            f"{speed['speedup']:.2f}",
            f"{draft['range'][0]:.2f} to {draft['range'][1]:.2f}" if is_guess else "-",
            "never" if draft["break_even"] is None else f"{draft['break_even']:.0%}",
            str(draft["loss_from"] or "-"),
            f"{memory['sequences']:,}",
            f"{draft['full_load']['with_draft']:,.0f}",
            f"{draft['full_load']['plain']:,.0f}",
            f"{draft['verdict']}{', as ' + draft['bridge']['way'] if draft['bridge'] else ''}: {draft['reason']}",
        ])  # fmt: skip
    return _table(head, rows)


def _precision_table(report: Report) -> str:
    rows = [
        [row["target"], row["draft"] or "-", gigabytes(row["weights"]), gigabytes(row["left"]),
         f"{row['sequences']:,}" if row["fits"] else "no room"]
        for row in report["precisions"]
    ]  # fmt: skip
    return _table(["target", "draft", "weights", "left for cache", "sequences"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _list(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""

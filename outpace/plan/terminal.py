"""The plan as text: the advice first, then its tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from outpace.plan.report import Report

_WIDTH = 118
_SHOWN_LOADS = (1, 4, 16, 64, 256)


def as_text(report: Report) -> str:
    parts = [_advice(report), _memory(report), _precisions(report), _drafts(report), _loads(report), _rest(report)]
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part)))


def gigabytes(num_bytes: float) -> str:
    """A fixed unit, so that columns can be compared; small models have MB."""
    return f"{num_bytes / 1e9:.1f} GB" if abs(num_bytes) >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _advice(report: Report) -> Iterator[str]:
    advice = report["advice"]
    yield from textwrap.wrap(advice["headline"], _WIDTH)
    for sentence in advice["sentences"]:
        yield from textwrap.wrap(sentence, _WIDTH, initial_indent="- ", subsequent_indent="  ")


def _memory(report: Report) -> Iterator[str]:
    target, machine, memory = report["target"], report["machine"], report["memory"]
    count = f"{machine['count']} x " if machine["is_gpu"] else ""
    yield (
        f"{target['name']}, {target['parameters'] / 1e9:.3g}B parameters in {target['precision']}, on "
        f"{count}{machine['name']} ({gigabytes(machine['memory_bytes'])}, {machine['utilization']:.0%} usable)"
    )
    unit = "each GPU" if machine["count"] > 1 else "memory"
    yield f"{unit:28}{'weights':>11}{'draft':>11}{'buffers':>11}{'cache':>11}{'tokens':>12}{'sequences':>11}"
    yield _memory_line("no draft", memory, 0)
    for draft in report["drafts"]:
        if draft["weight_bytes"]:
            yield _memory_line(draft["name"], draft["memory"], 0)
    kilobytes = memory["cache_bytes_per_token"] / 1e3
    yield from _contexts(report)
    yield f"  a sequence has {memory['context']:,} tokens; a token of cache takes {kilobytes:,.0f} kB"


def _contexts(report: Report) -> Iterator[str]:
    rows = report["contexts"]
    if len(rows) < 2:
        return
    yield f"  {'sequences, by their tokens':26}" + "".join(f"{row['context']:>11,}" for row in rows)
    yield f"  {'  no draft':26}" + "".join(f"{row['plain']:>11,}" for row in rows)
    if rows[0]["with_draft"] is not None:
        yield f"  {'  with the best draft':26}" + "".join(f"{row['with_draft']:>11,}" for row in rows)


def _memory_line(name: str, memory: Report, index: int) -> str:
    gpu = memory["gpus"][index]
    figures = (gpu["weights"], gpu["draft"], gpu["buffers"], gpu["cache"])
    return (
        f"  {name[:26]:26}" + "".join(f"{gigabytes(each):>11}" for each in figures)
        + f"{memory['cache_tokens']:>12,}{memory['sequences']:>11,}"
    )  # fmt: skip


def _precisions(report: Report) -> Iterator[str]:
    rows = report["precisions"]
    if not rows:
        return
    yield f"{'target':10}{'draft':10}{'weights':>11}{'left':>11}{'sequences':>11}"
    for row in rows:
        fits = f"{row['sequences']:>11,}" if row["fits"] else f"{'no room':>11}"
        sizes = f"{gigabytes(row['weights']):>11}{gigabytes(row['left']):>11}"
        yield f"{row['target']:10}{row['draft'] or '-':10}{sizes}{fits}"


def _drafts(report: Report) -> Iterator[str]:
    if not report["drafts"]:
        return
    conditions = report["conditions"]
    where = f"{conditions['concurrency']} at once, temperature {conditions['temperature']:g}"
    yield (
        f"{'drafts, ' + where:34}{'size':>8}{'accepted':>10}{'':10}{'depth':>6}{'speedup':>9}{'range':>14}"
        f"{'even at':>9}{'loses at':>10}  verdict"
    )
    for draft in report["drafts"]:
        speed, acceptance = draft["speed"], draft["acceptance"]
        size = f"1:{draft['ratio']:.0f}" if draft["ratio"] and draft["kind"] != "self" else "-"
        even = f"{draft['break_even']:.0%}" if draft["break_even"] is not None else "never"
        loses = str(draft["loss_from"]) if draft["loss_from"] else "-"
        span = f"{draft['range'][0]:.2f} to {draft['range'][1]:.2f}" if acceptance["source"] == "guessed" else ""
        if draft["verdict"] == "cannot":
            yield f"  {draft['name'][:32]:32}{size:>8}{'':58}  cannot"
            continue
        yield (
            f"  {draft['name'][:32]:32}{size:>8}{acceptance['first_token']:>10.0%} {acceptance['source']:9}"
            f"{speed['depth']:>6}{speed['speedup']:>9.2f}{span:>14}{even:>9}{loses:>10}  {draft['verdict']}"
            + (f", as {draft['bridge']['way']}" if draft["bridge"] else "")
        )
    yield "  accepted: the first token of a draft; even at: acceptance of a draft token at which it breaks even;"
    yield "  loses at: requests at once from which that fixed depth is slower than plain decoding"
    if any(draft["bridge"] for draft in report["drafts"]):
        yield "  as text, as tokens: the draft has another tokenizer, and what it drafts is carried over in that way"
    for name, reason in report["skipped"].items():
        yield from textwrap.wrap(f"{name}: {reason}", _WIDTH, initial_indent="  ", subsequent_indent="    ")


def _loads(report: Report) -> Iterator[str]:
    usable = [draft for draft in report["drafts"] if draft["verdict"] != "cannot"]
    if not usable:
        return
    loads = [each["concurrency"] for each in usable[0]["by_load"] if each["concurrency"] in _SHOWN_LOADS]
    yield f"{'speedup at the best depth':34}" + "".join(f"{load:>16}" for load in loads) + "  requests at once"
    for draft in usable:
        cells = [each for each in draft["by_load"] if each["concurrency"] in _SHOWN_LOADS]
        shown = (f"{c['speedup']:.2f} (depth {c['depth']})" if c["depth"] else "plain" for c in cells)
        yield f"  {draft['name'][:32]:32}" + "".join(f"{each:>16}" for each in shown)


def _rest(report: Report) -> Iterator[str]:
    for name, command in report["advice"]["commands"].items():
        yield f"{name + ':':10}{command}"
    if report["advice"]["watch"]:
        yield "watch:"
        for sentence in report["advice"]["watch"]:
            yield from textwrap.wrap(sentence, _WIDTH, initial_indent="- ", subsequent_indent="  ")
    yield "assumed:"
    for sentence in report["assumptions"]:
        yield from textwrap.wrap(sentence, _WIDTH, initial_indent="- ", subsequent_indent="  ")

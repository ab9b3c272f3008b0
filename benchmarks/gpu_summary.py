"""Summarises the runs of the GPU experiment: a table of medians over blocks, and the results against their limits."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]


def summary(rows: Rows, required: Mapping[tuple[int, float], float]) -> dict[str, Any]:
    """The table of cells, the cost of a pass of the head, and the speedups of `auto` beside the required ones."""
    cells = [_cell(list(mine)) for mine in _grouped(rows)]
    lines = [
        f"{'at once':>8}{'T':>4}{'setting':>10}{'tokens/s':>10}{'x':>7}{'(least-most)':>14}{'ms/step':>9}"
        f"{'drafting':>10}{'tokens':>8}{'like plain':>12}  accepted of each position"
    ]
    lines += [_line(cell) for cell in cells]
    passes = _passes(cells)
    lines += [
        f"a pass of the head, {each['concurrency']} at once, temperature {each['temperature']:.0f}: "
        f"{each['ms_per_pass']:.3f} ms, {each['of_plain_step']:.3f} of a plain step"
        for each in passes
    ]
    promises = []
    for cell in cells:
        asked = required.get((cell["concurrency"], cell["temperature"]))
        if cell["setting"] == "auto" and asked is not None:
            promises.append(
                {name: cell[name] for name in ("concurrency", "temperature")}
                | {"asked": asked, "found": cell["speedup"]}
            )
            lines.append(
                f"auto over plain, {cell['concurrency']} at once, temperature {cell['temperature']:.0f}: "
                f"{cell['speedup']:.3f}; required {asked}, {'met' if cell['speedup'] >= asked else 'MISSED'}"
            )
    found: dict[str, Any] = {"cells": cells, "passes": passes, "promises": promises, "lines": lines}
    gaps = [gap for row in rows for gap in row["gaps"]]
    if gaps:
        found["widest_gap"] = max(gaps)
        lines.append(
            f"greedy outputs that differ from plain decoding: {len(gaps)}; gap between the logits of the first two "
            f"different tokens: at most {max(gaps):.3f}, median {statistics.median(gaps):.3f}"
        )
    return found


def _passes(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What one more pass of the head takes: from the drafting times of the shallowest and the deepest fixed draft."""
    found = []
    for plain in (cell for cell in cells if cell["setting"] == "plain"):
        place = {name: plain[name] for name in ("concurrency", "temperature")}
        mine = [cell for cell in cells if all(cell[name] == value for name, value in place.items())]
        by_depth = {int(c["setting"].partition(":")[2]): c["ms_drafting"] for c in mine if ":" in c["setting"]}
        least, most = min(by_depth, default=0), max(by_depth, default=0)
        if most > least:
            each = (by_depth[most] - by_depth[least]) / (most - least)
            found.append(place | {"ms_per_pass": each, "of_plain_step": each / plain["ms_per_step"]})
    return found


def _grouped(rows: Rows) -> Iterable[Rows]:
    found: dict[tuple[int, float, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["concurrency"], row["temperature"], row["setting"]), []).append(row)
    return found.values()


def _cell(rows: Rows) -> dict[str, Any]:
    speedups = [row["speedup"] for row in rows]
    return {
        **{name: rows[0][name] for name in ("concurrency", "temperature", "setting")},
        "blocks": len(rows),
        **{name: statistics.median(row[name] for row in rows) for name in ("tokens_per_s", "speedup", "ms_per_step")},
        "speedup_range": [min(speedups), max(speedups)],
        "tokens_per_step_and_request": statistics.median(row["tokens_per_step_and_request"] for row in rows),
        "ms_drafting": statistics.median(row["ms_per_step_in"]["draft"] for row in rows),
        "num_equal": sum(row["num_equal"] for row in rows),
        "num_texts": sum(row["num_texts"] for row in rows),
        "acceptance_per_position": _acceptance(rows),
    }


def _acceptance(rows: Rows) -> list[float]:
    """Accepted tokens over drafted tokens, for each position in the draft."""
    longest = max(len(row["drafted_per_position"]) for row in rows)
    shares = []
    for i in range(longest):
        drafted, accepted = (
            sum(row[f"{what}_per_position"][i] for row in rows if i < len(row[f"{what}_per_position"]))
            for what in ("drafted", "accepted")
        )
        shares.append(accepted / drafted)
    return shares


def _line(cell: Mapping[str, Any]) -> str:
    least, most = cell["speedup_range"]
    shares = " ".join(f"{share:.2f}" for share in cell["acceptance_per_position"])
    equal = f"{cell['num_equal']} of {cell['num_texts']}"
    return (
        f"{cell['concurrency']:8}{cell['temperature']:4.0f}{cell['setting']:>10}{cell['tokens_per_s']:10.0f}"
        f"{cell['speedup']:7.2f}{f'({least:.2f}-{most:.2f})':>14}{cell['ms_per_step']:9.2f}{cell['ms_drafting']:10.2f}"
        f"{cell['tokens_per_step_and_request']:8.2f}{equal:>12}  {shares}"
    )

"""Summarises the runs of the GPU experiment: a table of medians over blocks, and the results against their limits."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]


def summary(rows: Rows, least_auto: float, least_alone: float) -> dict[str, Any]:
    """The table of cells, and whether the two speedup limits are met."""
    cells = [_cell(list(mine)) for mine in _grouped(rows)]
    autos = [cell for cell in cells if cell["setting"] == "auto"]
    lines = [
        f"{'at once':>8}{'T':>4}{'setting':>10}{'tokens/s':>10}{'x':>7}{'(least-most)':>14}{'ms/step':>9}"
        f"{'tokens':>8}{'like plain':>12}  accepted of each position"
    ]
    lines += [_line(cell) for cell in cells]
    promises: dict[str, Any] = {}
    if autos:
        worst = min(autos, key=lambda cell: cell["speedup"])
        promises["auto_at_least"] = {"asked": least_auto, "found": worst["speedup"]}
        lines.append(
            f"auto over plain: at least {worst['speedup']:.3f} (concurrency {worst['concurrency']}, temperature "
            f"{worst['temperature']:.0f}); required {least_auto}"
        )
    alone = [cell for cell in autos if cell["concurrency"] == 1 and cell["temperature"] == 0]
    if alone:
        promises["alone"] = {"asked": least_alone, "found": alone[0]["speedup"]}
        lines.append(f"auto alone at temperature 0: {alone[0]['speedup']:.2f}x; required {least_alone}")
    gaps = [gap for row in rows for gap in row["gaps"]]
    if gaps:
        promises["widest_gap"] = max(gaps)
        lines.append(
            f"greedy outputs that differ from plain decoding: {len(gaps)}; gap between the logits of the first two "
            f"different tokens: at most {max(gaps):.3f}, median {statistics.median(gaps):.3f}"
        )
    return {"cells": cells, "promises": promises, "lines": lines}


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
        "texts_like_plain": statistics.mean(row["texts_like_plain"] for row in rows),
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
    return (
        f"{cell['concurrency']:8}{cell['temperature']:4.0f}{cell['setting']:>10}{cell['tokens_per_s']:10.0f}"
        f"{cell['speedup']:7.2f}{f'({least:.2f}-{most:.2f})':>14}{cell['ms_per_step']:9.2f}"
        f"{cell['tokens_per_step_and_request']:8.2f}{cell['texts_like_plain']:12.2f}  {shares}"
    )

"""Builds, saves and loads the results of a run: one JSON object with `verdict`, `cells`, `provenance` and more."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outpace.bench.figures import Objective, cell_figures, pooled_speedups
from outpace.bench.findings import tail_troubles
from outpace.bench.loads import Closed, Load, Open
from outpace.bench.plan import CellPlan, Plan
from outpace.bench.provenance import peak_memory_bytes
from outpace.bench.session import Cell, Session
from outpace.bench.settings import PLAIN
from outpace.bench.verdict import verdict
from outpace.errors import UsageError

FORMAT = "outpace-bench-1"


def assemble(session: Session, objective: Objective, provenance: dict[str, Any]) -> dict[str, Any]:
    grid = [cell.paired for cell in session.cells if cell.plan.purpose == "grid"]
    names = dict.fromkeys(setting.name for paired in grid for setting in paired.settings)
    has_base = PLAIN.name in names
    results: dict[str, Any] = {
        "format": FORMAT,
        "provenance": provenance | {"seed": session.plan.seed},
        "target": session.target.describe(),
        "plan": {
            "mix": session.plan.weights,
            "time_budget": session.plan.time_budget,
            "objective": objective.as_dict(),
            "was_interrupted": session.was_interrupted,
            "ran_out_of_time": session.ran_out_of_time,
        },
        "memory": {"peak_bytes": peak_memory_bytes()},
        "cells": [_cell(cell, objective) for cell in session.cells],
        "overall": {name: pooled_speedups(grid, name) for name in names} if has_base else {},
    }
    results["verdict"] = verdict(results)
    return results


def _cell(cell: Cell, objective: Objective) -> dict[str, Any]:
    return cell.plan.as_dict() | cell_figures(cell.paired, objective)


def suspects(results: dict[str, Any], plan: Plan) -> list[CellPlan]:
    """Cells to run again with one class alone, where the tail got worse and that class seems to be the cause."""
    known = {setting.name: setting for cell in plan.cells for setting in cell.settings}
    plans = []
    for trouble in tail_troubles(results):
        if trouble.culprit is not None and len(trouble.cell["classes"]) > 1:
            settings = (PLAIN, known[trouble.setting])
            load = _load(trouble.cell["load"])
            plans.append(
                CellPlan(trouble.cell["temperature"], load, settings, plan.confirm_blocks, "confirm", trouble.culprit)
            )
    return plans


def _load(described: dict[str, Any]) -> Load:
    if described["kind"] == "closed":
        return Closed(described["concurrency"])
    return Open(described["rate"], described["arrivals"])


def save(path: Path, results: dict[str, Any]) -> None:
    """Strict JSON: NaN and infinity become null, because other parsers reject them."""
    text = json.dumps(_without_nan(results), indent=1, allow_nan=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another path for the results") from error


def load(path: Path) -> dict[str, Any]:
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; check the path") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON; give a file written by outpace bench --json") from error
    if not isinstance(results, dict) or results.get("format") != FORMAT:
        raise UsageError(f"{path} was not written by outpace bench --json of this version; measure again")
    return results


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_nan(each) for each in value]
    return value

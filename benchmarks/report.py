"""Helpers for results files: provenance (command, machine, versions, models), statistics and JSON."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from math import comb
from pathlib import Path
from typing import Any

from outpace.bench import provenance as _provenance


def provenance(models: Sequence[Path]) -> dict[str, Any]:
    module = f"benchmarks.{Path(sys.argv[0]).stem}"
    return _provenance.provenance(["python", "-m", module, *sys.argv[1:]], models)


def spread(values: Sequence[float], style: str) -> str:
    """The first and the third quartile as text."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return f"{low:{style}} .. {high:{style}}"


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95% interval of the median for any distribution. With few values it is the minimum and the maximum."""
    ordered, n = sorted(values), len(values)
    left_out = 0
    while sum(comb(n, i) for i in range(left_out + 1)) / 2**n <= 0.025:
        left_out += 1
    left_out = max(0, left_out - 1)
    return ordered[left_out], ordered[n - 1 - left_out]


def write_json(path: Path, results: dict[str, Any], *, announce: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    if announce:
        print(f"written to {_provenance.shortened(str(path))}", file=sys.stderr)

"""What every results file carries: what was run, on what, with which versions and files."""

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
    """First and third quartile."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return f"{low:{style}} .. {high:{style}}"


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The median lies between these with 95% certainty, whatever the distribution; few values give all of them."""
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

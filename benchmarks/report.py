"""What every results file carries: what was run, on what, with which versions and files."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
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


def write_json(path: Path, results: dict[str, Any], *, announce: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    if announce:
        print(f"written to {_provenance.shortened(str(path))}", file=sys.stderr)

"""What every results file carries: what was run, on what, with which versions and files."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import outpace


def provenance(models: Sequence[Path]) -> dict[str, Any]:
    return {
        "command": " ".join(["python -m", _module_name(), *map(_shortened, sys.argv[1:])]),
        "outpace": outpace.__version__,
        "commit": _git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain") else ""),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "xllamacpp": version("xllamacpp"),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "models": {path.name: _sha256(path) for path in models},
    }


def spread(values: Sequence[float], style: str) -> str:
    """First and third quartile."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return f"{low:{style}} .. {high:{style}}"


def write_json(path: Path, results: dict[str, Any], *, announce: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    if announce:
        print(f"written to {_shortened(str(path))}", file=sys.stderr)


def _module_name() -> str:
    return f"benchmarks.{Path(sys.argv[0]).stem}"


def _shortened(argument: str) -> str:
    """A results file names files, not the folders of one machine."""
    return Path(argument).name if os.sep in argument and Path(argument).is_absolute() else argument


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""The origin of a results file: command, commit, versions, machine, and hashes of the model files."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import outpace
from outpace.config import usable_cores

_PACKAGES = ("numpy", "xllamacpp", "torch", "transformers", "vllm", "openvino-genai")


def provenance(command: Sequence[str], models: Sequence[Path]) -> dict[str, Any]:
    return {
        "command": shlex.join(map(shortened, command)),
        "outpace": outpace.__version__,
        "commit": commit_name(),
        "python": platform.python_version(),
        **{name: found for name in _PACKAGES if (found := _version(name))},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "gpu": _gpu_names(),
        "cores": usable_cores(),
        "models": {path.name: _sha256(path) for path in models},
    }


def peak_memory_bytes() -> int | None:
    """Of this process, weights and caches included; None if the system does not report it."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def shortened(argument: str) -> str:
    """Only the file name of a path: a results file does not name the folders of one machine."""
    return Path(argument).name if os.sep in argument and Path(argument).is_absolute() else argument


def commit_name() -> str | None:
    """Of the checkout that this package runs from; None if it was installed."""
    commit = _git("rev-parse", "--short", "HEAD")
    return commit + ("+changes" if _git("status", "--porcelain") else "") if commit else None


def _git(*arguments: str) -> str:
    if shutil.which("git") is None or not (Path(outpace.__file__).parents[1] / ".git").exists():
        return ""
    folder = Path(outpace.__file__).parent
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False).stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def _gpu_names() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False, timeout=10)
    return found.stdout.split("\n")[:-1] if found.returncode == 0 else []


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Describes the machine of a GPU benchmark: versions, GPU, driver, commit, memory bandwidth."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_models import median_ms


def describe(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        **{name: _version(name) for name in ("torch", "triton", "transformers", "numpy")},
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"),
        "commit": _commit(),
    }


def bandwidths(device: torch.device) -> dict[str, float]:
    data = torch.empty(1 << 31, dtype=torch.float32, device=device).normal_()
    other = torch.empty_like(data)
    return {
        "read_tb_per_s": data.nbytes / median_ms(data.sum, 3, 5) / 1e9,
        "copy_tb_per_s": 2 * data.nbytes / median_ms(lambda: other.copy_(data), 3, 5) / 1e9,
    }


def _commit() -> str:
    """The commit of the checkout; in a copy without git history, the content of the file COMMIT."""
    noted = Path(__file__).parents[1] / "COMMIT"
    return noted.read_text().strip() if noted.exists() else _output("git", "rev-parse", "--short", "HEAD")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""

"""What `outpace doctor` says about the torch backend: its version, its CUDA build and each GPU, or why it cannot run.

Loading torch takes seconds, so it is looked for first, and loaded only if it is installed.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from typing import Any

_PACKAGES = ("torch", "safetensors", "tokenizers")  # what the backend imports
_REMEDY = "pip install 'outpace[torch]' installs what runs models on a GPU"
_GIB = 1 << 30
_SMI_SECONDS = 10.0  # a driver in trouble may never answer


def torch_report() -> dict[str, Any]:
    """`unavailable` is a sentence if the backend cannot run at all, `no_gpu` if it can run on the CPU only."""
    report: dict[str, Any] = {
        "version": None, "build": None, "driver": None, "gpus": [], "unavailable": None, "no_gpu": None,
    }  # fmt: skip
    missing = [name for name in _PACKAGES if not _is_installed(name)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        return report | {"unavailable": f"{', '.join(missing)} {verb} not installed; {_REMEDY}"}
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of the system that it needs
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return report | {"unavailable": f"torch is installed and does not load ({reason}); reinstall it: {_REMEDY}"}
    seen, driver = _nvidia_gpus()
    report |= {"version": torch.__version__, "build": _build(torch), "driver": driver}
    if torch.cuda.is_available():
        return report | {"gpus": [_gpu(torch, index) for index in range(torch.cuda.device_count())]}
    return report | {"no_gpu": _why_no_gpu(report["build"], seen)}


def as_lines(report: dict[str, Any]) -> list[str]:
    if report["unavailable"]:
        return [f"torch            unavailable: {report['unavailable']}"]
    build = f"built for {report['build']}" if report["build"] else "built for CPUs"
    driver = f", driver {report['driver']}" if report["driver"] else ""
    lines = [f"torch            {report['version']}, {build}{driver}"]
    if report["no_gpu"]:
        lines.append(f"GPU              none: {report['no_gpu']}")
    lines += [
        f"{f'GPU {index}':16} {gpu['name']}, {gpu['memory_bytes'] / _GIB:.1f} GiB, "
        f"compute capability {gpu['capability']}"
        for index, gpu in enumerate(report["gpus"])
    ]
    return lines


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _build(torch: Any) -> str | None:
    """What the installed torch was built for; None: CPUs only."""
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    hip = getattr(torch.version, "hip", None)
    return f"ROCm {hip}" if hip else None


def _gpu(torch: Any, index: int) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(index)
    return {"name": found.name, "memory_bytes": found.total_memory, "capability": f"{found.major}.{found.minor}"}


def _nvidia_gpus() -> tuple[list[str], str | None]:
    """The GPUs that the driver has, by name, and its version. torch knows neither without a CUDA build."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [], None
    command = [tool, "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return [], None
    rows = [line.split(", ", 1) for line in asked.stdout.splitlines() if ", " in line]
    return [name for _, name in rows], rows[0][0] if rows else None


def _why_no_gpu(build: str | None, seen: list[str]) -> str:
    if seen and build is None:
        return f"the driver has {', '.join(seen)}, and this torch is built for CPUs; install a CUDA build of torch"
    if seen:
        return (
            f"the driver has {', '.join(seen)}, and torch cannot use it; check CUDA_VISIBLE_DEVICES, and that the "
            f"driver is new enough for {build}"
        )
    return "no NVIDIA driver answers; the torch backend runs on the CPU, where the native one is faster"

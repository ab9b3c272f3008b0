"""How much more memory this process can use, as reported by the system."""

from __future__ import annotations

from pathlib import Path


def available_bytes() -> int | None:
    """The smaller of the machine's available memory and the container's; None if neither can be read."""
    found = [value for value in (_from_meminfo(), _from_cgroup()) if value is not None]
    return min(found, default=None)


def _from_meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _from_cgroup() -> int | None:
    """The cgroup v2 limit of a container minus the used memory that cannot be reclaimed."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        statistics = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return None if limit == "max" else int(limit) - int(statistics["anon"])
    except (OSError, ValueError, KeyError):
        return None

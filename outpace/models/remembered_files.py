"""Remembers which checks a file has passed, so that only its first use pays for them.

A file is known by its size, times and inode. This protects against accidents and against another file in its place, not
against somebody who can write to the cache folder.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from outpace.errors import ModelError
from outpace.models.embedded import cache_dir

_MOST = 2000  # entries; the oldest are forgotten


class RememberedFiles:
    """The checks that these files passed together. Any change of one of them forgets all."""

    def __init__(self, kind: str, *paths: Path) -> None:
        self._key = " ".join([kind, *map(_identity, paths)])

    @property
    def checks(self) -> list[str]:
        found = _read().get(self._key)
        return found if isinstance(found, list) else []

    def add(self, *checks: str) -> None:
        """If two processes write at the same time, one entry is lost and its check is made once more."""
        kept = {**_read(), self._key: sorted({*self.checks, *checks})}
        text = json.dumps(dict(list(kept.items())[-_MOST:]))
        with suppress(OSError):  # in a read-only cache, the check is made at every start
            place = _place()
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", encoding="ascii", dir=place.parent, delete=False) as file:
                file.write(text)
            os.replace(file.name, place)


def _identity(path: Path) -> str:
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}; check its permissions") from error
    # A copy may keep the time of modification; nobody can set the time of the last change of the inode.
    times = f"{status.st_mtime_ns}:{status.st_ctime_ns}"
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{times}"


def _place() -> Path:
    return cache_dir() / "checked_files.json"


def _read() -> dict[str, list[str]]:
    try:
        found = json.loads(_place().read_text(encoding="ascii"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}

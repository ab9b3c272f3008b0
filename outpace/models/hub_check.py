"""Compares files from the hub with the hashes that the hub gave for them.

The hub client keeps every file under its hash and links to it by name: a SHA-256 for large files, git's hash of the
content for the others. The client itself compares only sizes. Where it copies files instead of linking them, nothing is
compared.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from outpace.errors import ModelError
from outpace.models.remembered_files import RememberedFiles

_SHA256, _GIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
_CHUNK = 1 << 20


def check_files(folder: Path) -> None:
    """Raise ModelError for a file that is not what the hub has. Every file is read once, at its first use."""
    for path in sorted(folder.iterdir()):
        check_file(path)


def check_file(path: Path) -> None:
    """The same for one file."""
    if path.is_symlink() and path.is_file():
        _check(path, Path(os.readlink(path)).name)


def _check(path: Path, promised: str) -> None:
    if not _SHA256.fullmatch(promised) and not _GIT.fullmatch(promised):
        return
    memory = RememberedFiles("hub", path)
    if promised in memory.checks:
        return
    found = _hash(path, promised)
    if found != promised:
        raise ModelError(
            f"{path} is not the file that the hub has (hash {found[:12]} instead of {promised[:12]}); "
            f"delete {path.resolve()}, and it is downloaded again"
        )
    memory.add(promised)


def _hash(path: Path, promised: str) -> str:
    """A hash of the same kind as the promised one."""
    is_git = _GIT.fullmatch(promised) is not None
    start = b"blob %d\0" % path.stat().st_size if is_git else b""
    digest = hashlib.sha1(start, usedforsecurity=False) if is_git else hashlib.sha256(start)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()

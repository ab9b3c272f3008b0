"""Tries an unknown GGUF file in a child process before llama.cpp opens it in this one.

llama.cpp ends its process on many damaged files. If it ends the child, the file is refused with one sentence. A file
that passed is remembered by its size, times and inode, so only its first start pays for the child. The embedded model
is known by its hash and is never tried.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from outpace.errors import ModelError
from outpace.models.embedded import is_verified
from outpace.models.remembered_files import RememberedFiles

log = logging.getLogger("outpace.models")

REFUSED = 3  # the child's exit status for a file that llama.cpp refuses in good order; stdout says why
_SECONDS = 20.0
_SECONDS_PER_BYTE = 1 / 20e6  # the slowest disk whose files may be large
_VERSION = 1  # raise it when llama_trial.py tries more than before
_REASON = re.compile(r"GGML_ASSERT\(.*\) failed|what\(\): .*|GGML_ABORT.*|.*: fatal error.*|.*error: .*")
_trusted: set[str] = set()


def trust(path: Path) -> None:
    """Do not try this file in this process."""
    _trusted.add(os.path.abspath(path))


def check_file(path: Path, library: Path, *, vocab_only: bool) -> None:
    """Raise ModelError if llama.cpp cannot open this file, or ends its process when it does."""
    if os.path.abspath(path) in _trusted or is_verified(path):
        return
    part = "vocabulary" if vocab_only else "weights"
    memory = RememberedFiles(f"llama.cpp trial {_VERSION}", path, library)
    if part in memory.checks:
        return
    if _try(path, library, part):
        memory.add("vocabulary", part)  # the vocabulary is tried with the weights too


def _try(path: Path, library: Path, part: str) -> bool:
    """Whether the file passed; False if it could not be tried."""
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    # A backtrace by a debugger would take seconds.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "GGML_NO_BACKTRACE": "1", "PYTHONUTF8": "1"}
    command = [sys.executable or "python", "-P", "-m", "outpace.models.llama_trial", str(path), str(library), part]
    limit = _SECONDS + path.stat().st_size * _SECONDS_PER_BYTE
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"{path} is refused: llama.cpp was not done with it after {limit:.0f} seconds; the file is damaged or of a "
            "kind that this llama.cpp does not support, so get another copy from a source you trust"
        ) from error
    except OSError as error:
        log.warning("%s is opened unchecked, because no child process can be started (%s)", path, error)
        return False
    if done.returncode == REFUSED:
        raise ModelError(done.stdout.decode(errors="replace").strip())
    if done.returncode != 0:
        raise ModelError(
            f"{path} is refused: llama.cpp ends its process when it opens this file "
            f"({_reason(done.returncode, done.stderr)}); it is damaged or of a kind that this llama.cpp does not "
            "support, so get another copy from a source you trust"
        )
    return True


def _reason(status: int, stderr: bytes) -> str:
    """The assertion or exception that ended the child, or the signal."""
    found = _REASON.findall(stderr.decode(errors="replace"))
    if found:
        return str(found[0]).strip()[:200]
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"exit status {status}"

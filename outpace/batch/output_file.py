"""The output file of a batch: every result is written once, as one line, and survives the end of the process.

A line is complete when its line break is written. A process that is killed while it writes leaves at most one
incomplete line, at the end; opening the file again cuts it off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO

from outpace.batch.lines import check_result, is_failure
from outpace.errors import OutpaceError, UsageError

_SYNC_SECONDS = 5.0  # at most so much is lost if the power fails


class OutputFile:
    """Opens the file, or begins it; no other process can write it meanwhile."""

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self._path = path
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a file that can be continued; choose another output file")
        try:
            self._file = _locked(path, path.open("a+b"))
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror or error}; choose another file") from error
        if overwrite:
            self._file.truncate(0)
        self._synced_at = monotonic()

    def recover(self, found: Callable[[dict[str, Any]], None]) -> None:
        """Cut off an incomplete last line, and call `found` with every result of earlier runs."""
        end = 0
        for number, content in self._complete_lines():
            end += len(content)
            result = check_result(content)
            if result is None:
                raise UsageError(
                    f"line {number} of {self._path} is not the result of a batch; choose another output file, or "
                    "--overwrite to begin this one anew"
                )
            found(result)
        self._file.truncate(end)

    def drop_failures(self) -> int:
        """Remove the results of lines that failed, so that they are tried again. Returns their number.

        The new content replaces the old in one step: a process that is killed leaves either of them.
        """
        draft = self._path.with_name(self._path.name + ".part")
        num_dropped = 0
        with suppress(FileNotFoundError):
            draft.unlink()
        file = _locked(draft, draft.open("a+b"))
        for _, content in self._complete_lines():
            result = check_result(content)
            if result is not None and is_failure(result):
                num_dropped += 1
            else:
                file.write(content)
        file.flush()
        os.fsync(file.fileno())
        draft.replace(self._path)
        self._file.close()
        self._file = file
        return num_dropped

    def append(self, result: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(result).encode() + b"\n")
            self._file.flush()
            if monotonic() - self._synced_at > _SYNC_SECONDS:
                self._sync()
        except OSError as error:
            raise OutpaceError(
                f"cannot write {self._path}: {error.strerror or error}; what is in it stays valid, so make room and "
                "run the same command again"
            ) from error

    def close(self) -> None:
        with suppress(OSError):  # appending has reported a full disk
            self._sync()
        with suppress(OSError):
            self._file.close()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced_at = monotonic()

    def _complete_lines(self) -> Iterator[tuple[int, bytes]]:
        self._file.seek(0)
        for number, content in enumerate(self._file, 1):
            if content.endswith(b"\n"):
                yield number, content


def _locked(path: Path, file: BinaryIO) -> BinaryIO:
    """Refuse a file that another process writes. The lock ends with the process."""
    try:
        import fcntl
    except ImportError:  # Windows
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UsageError(f"another batch is writing {path}; wait for it, or choose another output file") from None
    return file

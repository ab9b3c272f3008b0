"""Runs `worker.py` in a child process, so that an abort or a hang is an outcome like any other."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).parents[2]
READY = b"ready\n"


class Outcome(NamedTuple):
    kind: str  # ran, refused (a sentence); ugly (a text that is none), traceback, abort, hang
    words: str

    @property
    def is_fine(self) -> bool:
        return self.kind in ("ran", "refused")


class Jail:
    """A worker with a cache folder of its own. A worker that ended is replaced."""

    def __init__(self, folder: Path, seconds: float, program: Sequence[str] = ("-m", "tests.fuzz.worker")) -> None:
        self._seconds = seconds
        self._command = [sys.executable, "-P", *program]
        # When llama.cpp aborts, it would start a debugger that writes to stdout.
        own = {"OUTPACE_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT), "GGML_NO_BACKTRACE": "1"}
        self._environment = {**os.environ, **own}
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._worker: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Jail:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._stderr.close()

    def attempt(self, kind: str, path: Path, backend: str = "auto") -> Outcome:
        worker = self._worker = self._worker or self._start()
        assert worker.stdin is not None and worker.stdout is not None
        line = json.dumps({"kind": kind, "path": str(path), "backend": backend})
        worker.stdin.write(line.encode() + b"\n")
        worker.stdin.flush()
        ready, _, _ = select.select([worker.stdout], [], [], self._seconds)
        if not ready:
            self._end()
            return Outcome("hang", f"no answer after {self._seconds:g} seconds")
        answer: bytes = worker.stdout.readline()
        if answer:
            return Outcome(*json.loads(answer))
        status = worker.wait()
        self._end()
        return Outcome("abort", f"exit status {status}: {self._last_words()}")

    def _start(self) -> subprocess.Popen[bytes]:
        self._stderr.seek(0)
        self._stderr.truncate()
        pipe = subprocess.PIPE
        worker = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=self._stderr, env=self._environment)
        assert worker.stdout is not None
        if worker.stdout.readline() != READY:
            worker.kill()
            raise RuntimeError(f"the worker does not start: {self._last_words()}")
        return worker

    def _last_words(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()[-2000:].decode(errors="replace")

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            for pipe in (self._worker.stdin, self._worker.stdout):
                assert pipe is not None
                pipe.close()
            self._worker.wait()
            self._worker = None

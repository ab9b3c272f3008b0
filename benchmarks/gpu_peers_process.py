"""The other end of a worker: starts its process, sends commands, waits for answers with a limit, and ends it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from benchmarks.gpu_peers_settings import PeerSettings
from benchmarks.gpu_peers_vllm import environment

_LAST_LINES = 6  # of the log, in the reason of a failure
_END_SECONDS = 20.0


class Failed(Exception):
    """The engine gave no result; the message says why."""


class PeerProcess:
    def __init__(self, settings: PeerSettings, job: dict[str, Any], log: Path, site: Path | None, folder: Path) -> None:
        self.settings = settings
        self._log = log
        is_vllm = settings.kind == "vllm"
        paths = [os.getcwd(), *([str(site.absolute())] if is_vllm and site else []), os.environ.get("PYTHONPATH", "")]
        more = environment(settings, folder / "vllm-cache") if is_vllm else {}
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu_peers_worker", json.dumps(job)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more},
            )  # fmt: skip
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    def wait_until_ready(self, seconds: float) -> dict[str, Any]:
        return self._next("ready", seconds)

    def ask(self, command: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise Failed(f"its process has ended; {self._tail()}") from error
        return self._next("found", seconds)

    def _next(self, key: str, seconds: float) -> dict[str, Any]:
        try:
            found = self._answers.get(timeout=max(seconds, 0.1))
        except queue.Empty:
            self.kill()  # an answer that comes late would be taken for the next one
            raise Failed(f"no answer within {seconds:.0f} s; {self._tail()}") from None
        if found is None:
            self._answers.put(None)
            raise Failed(f"its process has ended; {self._tail()}")
        if key not in found:
            raise Failed(f"{found.get('error')}; {self._tail()}")
        values: dict[str, Any] = found[key]
        return values

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        return "log: " + " | ".join(line.strip()[:300] for line in lines)

    def close(self) -> None:
        """Ask the engine to end, and end it with all its processes if it does not."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write('{"do": "quit"}\n')
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the process group: vLLM's engine has a process of its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

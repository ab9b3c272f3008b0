"""Rank 0's side: starts the other ranks, tells them every step, and notices when one has died."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor

from outpace.backends.torch.execution.step import StepInputs
from outpace.backends.torch.kernels.base import Cache
from outpace.backends.torch.parallel.group import Group
from outpace.backends.torch.parallel.messages import Kind, Setup, encode, numbers_of
from outpace.backends.torch.parallel.model import ShardedModel
from outpace.errors import BackendError, BackendLost

_READY = b"ready\n"
_EXIT_SECONDS = 5.0  # for a rank to end after its pipe is closed
_NOTICE_SECONDS = 3.0  # an operation fails a little before the system reports that the process has ended
_SETTLE_SECONDS = 0.1  # between the end of a rank and the question which rank ended first
_STUCK_SECONDS = 10.0  # for a step to fail after a rank has died


class Leader:
    """The other ranks, as processes of their own. They end when their pipe is closed, so also with this process."""

    def __init__(self, setups: list[Setup]) -> None:
        self.sentence: str | None = None  # why a rank is lost
        self._is_closing = False
        self._is_stepping = False
        self._listeners: list[Callable[[BackendLost], None]] = []
        self._group: Group | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        command = [sys.executable, "-m", "outpace.backends.torch.parallel.worker"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        for setup in setups:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0
            )  # fmt: skip
            self._processes.append(process)
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # reported when the rank should be ready
                process.stdin.write(setup.encode())

    def join(self, store: Any, device: torch.device) -> Group:
        """Wait until every rank has loaded its part, and form a group with them."""
        for rank, process in enumerate(self._processes, 1):
            assert process.stdout is not None
            line = process.stdout.readline()
            if line != _READY:
                reason = line.decode(errors="replace").strip() or f"it {_ending(process.wait())}"
                self.close()
                raise BackendError(f"rank {rank} of {self.size} could not load its part of the model: {reason}")
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(b"join\n")
        self._group = Group(store, 0, self.size, device)
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()
        return self._group

    @property
    def size(self) -> int:
        return len(self._processes) + 1

    def on_loss(self, listener: Callable[[BackendLost], None]) -> None:
        """Call `listener` when a rank dies, in a thread of its own."""
        self._listeners.append(listener)

    def send(self, kind: Kind, *numbers: int) -> None:
        message = encode(kind, numbers)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(message)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Turn the failure of an operation into a sentence, if its cause is that a rank has died."""
        if self.sentence is not None:
            raise BackendLost(self.sentence)
        self._is_stepping = True
        try:
            yield
        except (RuntimeError, OSError) as error:
            deadline = monotonic() + _NOTICE_SECONDS
            while self.sentence is None and monotonic() < deadline:
                sleep(0.01)
            if self.sentence is None:
                raise
            raise BackendLost(self.sentence) from error
        finally:
            self._is_stepping = False

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        sleep(_SETTLE_SECONDS)
        if self._is_closing or self.sentence is not None:
            return
        # A rank that fails because another was killed is not the cause.
        for other, each in enumerate(self._processes, 1):
            if (each.poll() or 0) < 0:
                rank, status = other, each.returncode
        self.sentence = (
            f"rank {rank} of {self.size} of the model {_ending(status)}, so nothing can be computed any more; restart"
        )
        for listener in self._listeners:
            listener(BackendLost(self.sentence))
        if self._was_stuck(_NOTICE_SECONDS) and self._group is not None:
            with suppress(RuntimeError):
                self._group.abort()
        if self._was_stuck(_STUCK_SECONDS):
            # An operation on a GPU waits for the dead rank, and no exception can end it.
            print(f"outpace: {self.sentence}", file=sys.stderr, flush=True)
            os._exit(1)

    def _was_stuck(self, seconds: float) -> bool:
        """Whether a step that ran now still runs after this time."""
        deadline = monotonic() + seconds
        while self._is_stepping and not self._is_closing:
            if monotonic() >= deadline:
                return True
            sleep(0.05)
        return False

    def close(self) -> None:
        self._is_closing = True
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            with suppress(OSError):
                process.stdin.close()
            process.stdout.close()
        for process in self._processes:
            try:
                process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ending(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


class LeadingModel(ShardedModel):
    """Rank 0's part of a model: every forward pass runs on all ranks."""

    leader: Leader
    group: Group
    can_give_peaks = True

    def lead(self, leader: Leader, group: Group) -> None:
        self.leader, self.group = leader, group
        self.on_loss = leader.on_loss

    @torch.inference_mode()
    def forward(
        self, step: StepInputs, caches: list[Cache], room: Tensor | None = None, states: list[Tensor] | None = None
    ) -> Tensor:
        with self.leader.stepping():
            is_capturing = step.words.is_cuda and torch.cuda.is_current_stream_capturing()
            self.leader.send(Kind.CAPTURE if is_capturing else Kind.RUN, *numbers_of(step.shape))
            self.group.from_first(step.words)
            return super().forward(step, caches, room, states)

    def replaying(self, step: StepInputs) -> None:
        with self.leader.stepping():
            self.leader.send(Kind.REPLAY, *numbers_of(step.shape))

    def copying_page(self, source: int, target: int) -> None:
        with self.leader.stepping():
            self.leader.send(Kind.COPY_PAGE, source, target)

    def close(self) -> None:
        self.leader.close()

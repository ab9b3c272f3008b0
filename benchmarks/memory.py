"""Measures the resident memory of this process during a load test."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread
from time import perf_counter

from outpace.backends.native.runner import NativeRunner
from outpace.core import Row, StepPlan
from outpace.engine.engine import Engine


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))) * 1024


class MemoryWatch:
    """Samples resident memory every second for `seconds`; what follows is no longer the load under test."""

    def __init__(self, seconds: float) -> None:
        self.samples: list[int] = []
        self._seconds = seconds
        self._done = Event()
        self._thread = Thread(target=self._watch)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        end = perf_counter() + self._seconds
        while not self._done.wait(1.0) and perf_counter() < end:
            self.samples.append(resident_bytes())

    def peaks(self, seconds: int) -> tuple[int, int]:
        """The peak of the first `seconds`, and the peak after them."""
        return max(self.samples[:seconds]), max(self.samples[seconds:])


def touch_all(engine: Engine) -> None:
    """Make a model touch all the memory it can use: every page of the KV cache, and the buffers of the largest step.

    Loading reserves that memory, but the system provides a page only when it is first touched. Without this, the first
    step of the largest size, perhaps after minutes, would look like a leak.
    """
    runner, capacity = engine._runner, engine.capacity
    pool = runner.pool if isinstance(runner, NativeRunner) else None
    num_cells = pool.num_blocks * pool.block_size if pool is not None else capacity.cache_tokens
    each = min(num_cells // capacity.max_sequences, capacity.max_context)
    num_rows = max(1, capacity.max_step_tokens // each)
    for first in range(0, capacity.max_sequences, num_rows):
        sequences = range(first, min(first + num_rows, capacity.max_sequences))
        size = min(each, capacity.max_step_tokens)
        for start in range(0, each, size):
            count = min(size, each - start)
            runner.forward(StepPlan([Row(seq, start, [0] * count, count) for seq in sequences]))
    for seq in range(capacity.max_sequences):
        runner.free(seq)

"""Who runs first where engines use all cores: engines and the router, then the rest of Ray.

Each process of Ray wakes up about a hundred times a second, also when idle. By the usual policy of Linux, a thread that
wakes up interrupts the one that runs on its core, and takes some of its cache. By SCHED_BATCH it waits until that one
has had its time slice, a millisecond or more; its share of the core stays the same.
"""

from __future__ import annotations

import os
from contextlib import suppress


def yield_to_engines() -> None:
    """This thread, and all threads and processes that it starts, interrupt nobody."""
    _choose("SCHED_BATCH")


def run_at_once() -> None:
    """This thread, and those that it starts, have the usual policy again."""
    _choose("SCHED_OTHER")


def _choose(policy: str) -> None:
    if hasattr(os, "sched_setscheduler"):  # not on macOS
        with suppress(OSError):  # a container may forbid it; then the policy stays as it is
            os.sched_setscheduler(0, getattr(os, policy), os.sched_param(0))

"""Settings of the interpreter for a process that runs an event loop and, in another thread, an engine."""

from __future__ import annotations

import asyncio
import gc
import sys

from outpace.engine.async_engine import AsyncEngine

# The engine's thread holds the GIL between forward passes, and the event loop must get it back after every system call.
# With CPython's default of 5 ms, streams to 64 clients were late by tenths of a second.
_SWITCH_SECONDS = 0.0002
_COLLECTION_SECONDS, _MAX_ROUNDS, _NEVER = 10.0, 6, 10**9


async def keep_responsive(engine: AsyncEngine) -> None:
    """Switch threads often. Run full garbage collections while no request is open, else once a minute.

    A full collection stops every thread for tenths of a second, because it visits all objects, including the thousands
    in the suffix store. Under heavy traffic Python would run one every few seconds.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    # Objects that exist before the first request live until the end. A program that has frozen some itself keeps them
    # frozen: unfreezing at the end would undo what it did.
    freezes = gc.get_freeze_count() == 0
    if freezes:
        gc.freeze()
    youngest, middle, oldest = gc.get_threshold()
    gc.set_threshold(youngest, middle, _NEVER)
    rounds = 0
    try:
        while True:
            await asyncio.sleep(_COLLECTION_SECONDS)
            rounds += 1
            if engine.num_open == 0 or rounds >= _MAX_ROUNDS:
                gc.collect()
                rounds = 0
    finally:
        if freezes:
            gc.unfreeze()
        gc.set_threshold(youngest, middle, oldest)

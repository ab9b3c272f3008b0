"""Pauses Python's garbage collector during a step.

The collector runs whenever several hundred more objects were allocated than freed. A step with many requests allocates
thousands, and reference counting frees them all when it ends. Without the pause the collector would scan them several
times a step, sometimes with the whole heap, and free nothing.
"""

from __future__ import annotations

import gc


class PausedCollection:
    """If the collector is already off, because of the user or another engine, it stays off."""

    __slots__ = ("_was_on",)

    def __enter__(self) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._was_on:
            gc.enable()

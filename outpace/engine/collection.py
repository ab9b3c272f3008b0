"""Python's garbage collector waits while a step is under way.

It comes whenever some hundreds more objects were made than have gone. A step of many requests makes thousands, which
all go by themselves at its end: the collector would look through them several times a step, and now and then through
everything there is, to find nothing.
"""

from __future__ import annotations

import gc


class PausedCollection:
    """Where the collector is off already, by the user's wish or another engine's, nothing changes."""

    __slots__ = ("_was_on",)

    def __enter__(self) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._was_on:
            gc.enable()

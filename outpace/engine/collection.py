"""Python's garbage collector waits while a step is under way.

It comes whenever some hundreds more objects were made than have gone. A step of many requests makes thousands, which
all go by themselves at its end: the collector would look through them several times a step, and now and then through
everything there is, to find nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    if not gc.isenabled():  # by the user's wish, or by another engine that will switch it on again
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

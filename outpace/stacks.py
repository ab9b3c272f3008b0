"""Runs work that recurses deeply in a thread with a stack of a given size; an overflow would end the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R")
_size_lock = threading.Lock()


def run_on_stack(num_bytes: int, work: Callable[[], R]) -> R:
    """`work()` in a thread with a stack of `num_bytes`. Memory is used only as far as the recursion goes."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.extend((work(), None))
        except BaseException as error:
            outcome.extend((None, error))

    thread = threading.Thread(target=run, name="outpace-deep-stack", daemon=True)
    with _size_lock:  # the size is a setting of the process, for the threads that start next
        before = threading.stack_size(num_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    result, error = outcome
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]

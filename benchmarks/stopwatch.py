"""Adds up the time spent inside chosen functions."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any


class Stopwatch:
    """Time inside some calls; a call inside another one is counted once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_inside = False

    def wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._is_inside:
                return call(*arguments, **named)
            self._is_inside, begin = True, perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds += perf_counter() - begin
                self._is_inside = False

        return timed

"""How much a chat template may make and how long it may run.

Every value that a template makes is bounded, and with it the time of any operation on that value. Between operations
the sum of all values and the time are checked. `template_estimates.py` checks operations before they run.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple

from jinja2.utils import Namespace

MAX_SIZE = 1 << 23  # characters in one value, such as the prompt: more than any model's context
MAX_TOTAL = 1 << 29  # characters in all values together; templates that append to a text copy it for each message
MAX_SECONDS = 5.0
MAX_DEPTH = 200  # lists in lists; Python's own functions recurse for each, some without a limit
ITEM_SIZE = 16  # an element of a list, in characters
_CONTAINERS = (list, tuple, set, frozenset, Mapping, KeysView, ValuesView, ItemsView)


class TemplateLimitError(Exception):
    """Which limit a template exceeded, as a clause."""


class Extent(NamedTuple):
    """The size of a value that is written out in full, as by tojson."""

    size: int
    items: int = 1
    depth: int = 0


class Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self._left = MAX_TOTAL
        self._deadline = perf_counter() + MAX_SECONDS
        self._known: dict[int, tuple[object, Extent]] = {}  # containers of this rendering, which cannot change

    def spend(self, size: int) -> None:
        self._left -= size + 1
        if self._left < 0:
            raise TemplateLimitError(f"it handled more than {MAX_TOTAL:,} characters")
        if perf_counter() > self._deadline:
            raise TemplateLimitError(f"it ran for more than {MAX_SECONDS:g} seconds")

    def measure(self, value: object) -> Extent:
        if isinstance(value, str | bytes):
            return Extent(len(value))
        if isinstance(value, int):
            return Extent(value.bit_length() // 3 + 1)
        if isinstance(value, Namespace):  # it can change after it was measured
            raise TemplateLimitError("it used a namespace as a text or in a list")
        if not isinstance(value, _CONTAINERS):
            return Extent(ITEM_SIZE)
        known = self._known.get(id(value))
        if known is None:
            known = self._known[id(value)] = (value, self._measure_container(value))
        return known[1]

    def _measure_container(self, value: Any) -> Extent:
        size, items, depth = ITEM_SIZE * (len(value) + 1), 1, 0
        parts = chain(value, value.values()) if isinstance(value, Mapping) else value
        for part in parts:
            if size > MAX_SIZE:
                break
            extent = self.measure(part)
            size += extent.size
            items += extent.items
            depth = max(depth, extent.depth)
        if depth >= MAX_DEPTH:
            raise TemplateLimitError(f"it made a list of more than {MAX_DEPTH} levels")
        return Extent(size, items, depth + 1)

    def bounded(self, value: Any) -> Any:
        """Count a new value."""
        if isinstance(value, str | bytes):
            check_size(len(value))
            self.spend(len(value))
        elif isinstance(value, _CONTAINERS):
            check_size(self.measure(value).size)
            self.spend(len(value) * ITEM_SIZE)
        return value


_current: ContextVar[Budget] = ContextVar("budget of the chat template that is being rendered")


@contextmanager
def limited() -> Iterator[Budget]:
    token = _current.set(Budget())
    try:
        yield _current.get()
    finally:
        _current.reset(token)


def budget() -> Budget:
    return _current.get()


def check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise TemplateLimitError(f"it made a value of more than {MAX_SIZE:,} characters")

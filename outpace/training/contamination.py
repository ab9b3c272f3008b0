"""Finds training prompts that share a long run of words with prompts that are kept for measuring."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import TypeVar

NUM_WORDS = 13
_WORD = re.compile(r"\w+")
T = TypeVar("T", bound=Hashable)


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def overlaps(candidates: Sequence[Sequence[T]], kept: Sequence[Sequence[T]], length: int = NUM_WORDS) -> list[bool]:
    """For each candidate, whether it shares `length` neighbours with one of `kept`, or is equal to a shorter one."""
    known = {run for each in kept for run in _runs(each, length)}
    return [any(run in known for run in _runs(each, length)) for each in candidates]


def _runs(items: Sequence[T], length: int) -> list[tuple[T, ...]]:
    if len(items) <= length:
        return [tuple(items)] if items else []
    return [tuple(items[at : at + length]) for at in range(len(items) - length + 1)]

"""How much of a text must be held back because it may begin something else."""

from __future__ import annotations


def length_of_beginning(text: str, wanted: str) -> int:
    """The length of the longest end of the text that begins the wanted text and is shorter than it."""
    for length in range(min(len(text), len(wanted) - 1), 0, -1):
        if text.endswith(wanted[:length]):
            return length
    return 0

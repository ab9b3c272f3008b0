"""Reads JSON that arrives character by character: just enough of it to find the parts of a call."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, str, T]  # is sent one character after the other

_MAX_STRING = 256  # characters of a key, a function's name or an id
_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')


class NotACall(Exception):
    """The last character cannot belong to a call."""


class Nesting:
    """Finds the end of a JSON object whose opening brace was read."""

    def __init__(self) -> None:
        self.depth = 1
        self._in_string = self._is_escaped = False

    def advance(self, text: str, place: int) -> int:
        """Where the object ends, or the text."""
        while self.depth and place < len(text):
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            found = (_STRING_END if self._in_string else _STRUCTURE).search(text, place)
            if found is None:
                return len(text)
            place, char = found.end(), found[0]
            if char == '"':
                self._in_string = not self._in_string
            elif char == "\\":
                self._is_escaped = True
            else:
                self.depth += 1 if char in "{[" else -1
        return place


def after_space() -> Reading[str]:
    while (char := (yield)).isspace():
        pass
    return char


def string() -> Reading[str]:
    """A JSON string, after its opening quote."""
    characters: list[str] = []
    while (char := (yield)) != '"':
        characters.append(char)
        if char == "\\":
            characters.append((yield))
        require(len(characters) <= _MAX_STRING)
    try:
        return str(json.loads(f'"{"".join(characters)}"'))
    except ValueError:
        raise NotACall from None


def require(ok: bool) -> None:
    if not ok:
        raise NotACall

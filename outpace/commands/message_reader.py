"""Reads the messages of `outpace chat`: with line editing at a terminal, else line by line.

A line that ends in a backslash continues on the next line. Several lines that are pasted are one message: GNU readline
gives them as one line with line feeds, and without it they are recognised because they are all there at once.
"""

from __future__ import annotations

import select
import sys
from typing import TextIO

from outpace.errors import UsageError

PROMPT, CONTINUATION = "> ", ". "


class MessageReader:
    def __init__(self, stdin: TextIO | None) -> None:
        if stdin is None:
            raise UsageError("stdin is closed; give messages there, one a line, or start the chat at a terminal")
        self._stdin = stdin
        self.is_terminal = stdin.isatty()
        self._pastes_as_one = self.is_terminal and _enable_line_editing()

    def read(self) -> str | None:
        """The next message that is not empty; None at the end of the input."""
        while (lines := self._lines()) is not None:
            message = "\n".join(lines).rstrip()
            if message:
                return message
        return None

    def _lines(self) -> list[str] | None:
        lines: list[str] = []
        while True:
            line = self._line(CONTINUATION if lines else PROMPT)
            if line is None:
                return lines or None
            continues = line.endswith("\\")
            lines.append(line.removesuffix("\\"))
            if not continues and not self._has_more_of_a_paste():
                return lines

    def _line(self, prompt: str) -> str | None:
        try:
            if self.is_terminal and sys.stdout.isatty():
                return input(prompt)  # this is what uses line editing
            if self.is_terminal:
                print(prompt, end="", file=sys.stderr, flush=True)
            line = self._stdin.readline()
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise UsageError(f"a line of the input is not {error.encoding} text; convert it first") from error
        return line.removesuffix("\n") if line else None

    def _has_more_of_a_paste(self) -> bool:
        if not self.is_terminal or self._pastes_as_one:
            return False
        return bool(select.select([self._stdin], [], [], 0)[0])


def _enable_line_editing() -> bool:
    """Whether pasted lines arrive as one. The import makes `input` use readline; some builds of Python lack it."""
    try:
        import readline
    except ImportError:
        return False
    if "libedit" in (readline.__doc__ or ""):
        return False
    readline.parse_and_bind("set enable-bracketed-paste on")
    return True

"""Shows progress on standard error: a bar in a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from typing import Any

_LINE_EVERY = 10.0  # seconds


class Display:
    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._bar: Any = None
        self._what = ""
        self._last_line = 0.0

    def say(self, text: str) -> None:
        self.close()
        print(f"[{time.monotonic() - self._begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    def show(self, what: str, share: float, text: str) -> None:
        """`share` of the work is done."""
        now = time.monotonic()
        if sys.stderr.isatty():
            self._show_bar(what, share, text)
        elif now - self._last_line >= _LINE_EVERY or what != self._what:
            self._last_line = now
            print(f"[{now - self._begin:6.1f} s] {what} {share:4.0%}  {text}", file=sys.stderr, flush=True)
        self._what = what

    def _show_bar(self, what: str, share: float, text: str) -> None:
        from tqdm import tqdm

        if self._bar is None or what != self._what:
            self.close()
            self._bar = tqdm(
                desc=what, total=1000, leave=False, bar_format="{desc} {percentage:3.0f}%|{bar}| {postfix}"
            )
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(int(1000 * min(share, 1.0)) - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

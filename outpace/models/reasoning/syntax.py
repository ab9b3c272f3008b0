"""The tags around a model's thinking, and where an answer begins: inside, before or after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Beginning = Literal["inside", "before", "after"]  # of an answer; before: it may open the thinking itself


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningSyntax:
    name: str
    opener: str = "<think>"
    closer: str = "</think>"
    always: bool = False  # an answer begins with thinking, also where neither the prompt nor the answer opens it

    def beginning(self, prompt: str) -> Beginning:
        """Templates may end a prompt with the opener, or with both tags to prevent thinking."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.closer):
            return "after"
        return "inside" if self.always or prompt.endswith(self.opener) else "before"

    def continued(self, text: str) -> Beginning:
        """For an answer that continues this text."""
        if not text.strip():
            return "inside" if self.always else "before"
        is_open = text.rfind(self.opener) > text.rfind(self.closer)
        return "inside" if is_open else "after"

"""Separates the thinking in a model's answer from the rest, piece by piece as the answer is generated.

Tags may be split over pieces, so text that may begin one is held back. White space around the thinking is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from outpace.models.held_text import length_of_beginning
from outpace.models.reasoning.syntax import Beginning, ReasoningSyntax


@dataclass(frozen=True, slots=True)
class Thought:
    """What a piece of an answer added to the thinking and to the rest."""

    reasoning: str = ""
    content: str = ""


class ReasoningReader:
    def __init__(self, syntax: ReasoningSyntax, beginning: Beginning) -> None:
        self._syntax = syntax
        self._is_thinking = beginning == "inside"
        self._at_start = beginning != "after"  # where the opener may be
        self._drops_space = self._is_thinking  # up to the next other character
        self._held = ""

    def read(self, text: str, *, is_last: bool) -> Thought:
        """What the next piece adds; with the last one, also what was held back."""
        thought = self.feed(text)
        if not is_last:
            return thought
        rest = self.finish()
        return Thought(thought.reasoning + rest.reasoning, thought.content + rest.content)

    def feed(self, text: str) -> Thought:
        text, self._held = self._held + text, ""
        if self._at_start:
            beginning = text.lstrip()
            if self._syntax.opener.startswith(beginning) and beginning != self._syntax.opener:
                self._held = text
                return Thought()
            text = self._started(text, beginning)
        return self._thinking(text) if self._is_thinking else self._content(text)

    def finish(self) -> Thought:
        """The rest, at the end of the answer."""
        held, self._held = self._held, ""
        return Thought(reasoning=self._without_space(held).rstrip()) if self._is_thinking else Thought(content=held)

    def _started(self, text: str, beginning: str) -> str:
        """The text after the opener, if there is one, also if the prompt has it already."""
        self._at_start = False
        if beginning.startswith(self._syntax.opener):
            self._is_thinking = True
            beginning = beginning.removeprefix(self._syntax.opener)
        self._drops_space = self._is_thinking
        return beginning if self._is_thinking else text

    def _thinking(self, text: str) -> Thought:
        text = self._without_space(text)
        closer = self._syntax.closer
        reasoning, found, rest = text.partition(closer)
        if not found:
            shown = text[: len(text) - length_of_beginning(text, closer)].rstrip()
            self._held = text[len(shown) :]
            return Thought(reasoning=shown)
        self._is_thinking, self._drops_space = False, True
        return Thought(reasoning.rstrip(), self._without_space(rest))

    def _content(self, text: str) -> Thought:
        return Thought(content=self._without_space(text))

    def _without_space(self, text: str) -> str:
        if not self._drops_space:
            return text
        text = text.lstrip()
        self._drops_space = not text
        return text

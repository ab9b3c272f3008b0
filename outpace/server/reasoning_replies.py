"""Chat replies of models that think: the thinking is a field of its own, all else stays as without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outpace.engine.generation import Piece
from outpace.models.reasoning.use import Reasoning
from outpace.server.replies import ChatAnswer, Heading
from outpace.server.scored import TokenTexts
from outpace.server.tool_replies import ToolAnswer


class ReasoningAnswer(ChatAnswer):
    def __init__(self, heading: Heading, texts: TokenTexts, *, reasoning: Reasoning, **others: Any) -> None:
        super().__init__(heading, texts, **others)
        self.reasoning = reasoning
        self._is_shown = reasoning.is_shown
        self._thoughts = [reasoning.reader() for _ in heading.echoes]

    def delta(self, piece: Piece) -> dict[str, Any] | None:
        thought = self._thoughts[piece.index].read(piece.text, is_last=piece.is_last)
        choice = super().delta(replace(piece, text=thought.content))
        if not thought.reasoning or not self._is_shown:
            return choice
        choice = choice or self._choice_fields(piece) | {"delta": {}}
        return choice | {"delta": _fields(thought.reasoning) | choice["delta"]}

    def choice(self, piece: Piece) -> dict[str, Any]:
        thought = self._thoughts[piece.index].read(piece.text, is_last=piece.is_last)
        choice = super().choice(replace(piece, text=thought.content))
        if thought.reasoning:
            shown = _fields(thought.reasoning) if self._is_shown else {}
            choice["message"] |= {"content": choice["message"]["content"] or None, **shown}
        return choice


class ReasoningToolAnswer(ReasoningAnswer, ToolAnswer):
    """The calls are read from what is left without the thinking."""


def _fields(reasoning: str) -> dict[str, str]:
    """vLLM's name, and the older one that it and DeepSeek had first."""
    return {"reasoning": reasoning, "reasoning_content": reasoning}

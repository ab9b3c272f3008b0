"""The history of `outpace chat`: what was said, as a prompt that fits the context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outpace.errors import PromptTooLong, UsageError

if TYPE_CHECKING:
    from outpace.llm import LLM


@dataclass(frozen=True, slots=True)
class Turn:
    user: str
    assistant: str


@dataclass(slots=True)
class Conversation:
    """Turns and a system message. An answer gets `answer_room` tokens of the context, or what there is."""

    llm: LLM
    answer_room: int
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def prompt(self, message: str) -> tuple[list[int], int]:
        """The tokens of the conversation with this message at its end, and how many of the oldest turns were dropped.

        Turns are dropped until half of the context is free. Dropping one changes the prompt from its beginning, so all
        of it is computed again; this way that is rare.
        """
        context = self.llm.config.max_context
        alone = self._encode([], message)
        if alone is None or len(alone) >= context:
            raise UsageError(
                f"the message and the system message leave no room for an answer in the context of {context} tokens; "
                "shorten them or raise --max-model-len"
            )
        tokens = self._encode(self.turns, message)
        if tokens is not None and len(tokens) + min(self.answer_room, context // 4) <= context:
            return tokens, 0
        num_dropped, num_turns = 0, len(self.turns)
        while num_dropped < num_turns and (tokens is None or len(tokens) > context // 2):
            num_dropped += 1
            tokens = self._encode(self.turns[num_dropped:], message)
        del self.turns[:num_dropped]
        return tokens or alone, num_dropped

    def add(self, message: str, answer: str) -> None:
        self.turns.append(Turn(message, answer))

    def _encode(self, turns: Sequence[Turn], message: str) -> list[int] | None:
        """None if there are more tokens than the context holds."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in turns:
            messages.append({"role": "user", "content": turn.user})
            messages.append({"role": "assistant", "content": turn.assistant})
        messages.append({"role": "user", "content": message})
        try:
            return self.llm.encode_chat(messages)
        except PromptTooLong:
            return None

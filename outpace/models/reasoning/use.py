"""How one request's answer thinks: where its thinking begins, and what follows for its sampling and its usage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outpace.backends.base import Tokenizer
from outpace.models.reasoning.reader import ReasoningReader
from outpace.models.reasoning.syntax import Beginning, ReasoningSyntax
from outpace.structured import Thinking

if TYPE_CHECKING:
    from outpace.config import SamplingParams


@dataclass(frozen=True, slots=True)
class Reasoning:
    syntax: ReasoningSyntax
    beginning: Beginning
    is_shown: bool = True

    def reader(self) -> ReasoningReader:
        return ReasoningReader(self.syntax, self.beginning)

    def allow(self, params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
        """The parameters of a request whose structured output, if it has one, begins after the thinking.

        Tags that are control tokens become visible, because the reader has to see them.
        """
        tags = (self.syntax.opener, self.syntax.closer)
        controls = {token.text: token.id for token in tokenizer.specials.controls.tokens if token.text in tags}
        structured = params.structured
        if structured is not None and self.beginning != "after":
            opener, closer = (controls.get(tag, tag) for tag in tags)
            thinking = Thinking(closer=closer, opener=None if self.beginning == "inside" else opener)
            structured = replace(structured, after=thinking)
        return replace(params, structured=structured, visible_tokens=(*params.visible_tokens, *controls.values()))

    def num_tokens(self, pieces: Iterable[bytes]) -> int:
        """How many of an answer's tokens, given by their bytes, are thinking, tags included."""
        if self.beginning == "after":
            return 0
        opener, closer = self.syntax.opener.encode(), self.syntax.closer.encode()
        is_open, text, num_tokens = self.beginning == "inside", bytearray(), 0
        for piece in pieces:
            num_tokens += 1
            text += piece
            if not is_open:
                start = bytes(text).lstrip()
                is_open = start.startswith(opener)
                if not is_open and not opener.startswith(start):
                    return 0
            if closer in text:
                return num_tokens
            del text[: -len(closer) if is_open else 0]  # a closer may begin in what is left
        return num_tokens if is_open else 0

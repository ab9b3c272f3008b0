"""Chat replies of requests with tools: the calls in an answer become `tool_calls`, all else stays its content."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from outpace.engine.generation import Piece
from outpace.models.tool_calls.reader import CallDelta, CallReader, Found
from outpace.models.tool_calls.use import ToolUse
from outpace.server.replies import ChatAnswer, Heading
from outpace.server.scored import TokenTexts


class ToolAnswer(ChatAnswer):
    def __init__(self, heading: Heading, texts: TokenTexts, use: ToolUse) -> None:
        super().__init__(heading, texts)
        self._readers: list[CallReader] = [use.reader() for _ in heading.echoes]

    def opening(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": None}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def delta(self, piece: Piece) -> dict[str, Any] | None:
        found = self._read(piece)
        delta: dict[str, Any] = {"content": found.content} if found.content else {}
        if found.calls:
            delta["tool_calls"] = [{"index": call.index, **_written(call)} for call in found.calls]
        if not delta and not piece.is_last and not self._has_details(piece):
            return None
        return self._fields(piece) | {"delta": delta}

    def choice(self, piece: Piece) -> dict[str, Any]:
        found = self._read(piece)
        message: dict[str, Any] = {"role": "assistant", "content": found.content, "refusal": None}
        if found.calls:
            message |= {"content": found.content or None, "tool_calls": [_written(call) for call in found.calls]}
        return self._fields(piece) | {"message": message}

    def _read(self, piece: Piece) -> Found:
        reader = self._readers[piece.index]
        found = reader.feed(piece.text)
        return found.joined(reader.finish()) if piece.is_last else found

    def _fields(self, piece: Piece) -> dict[str, Any]:
        fields = self._choice_fields(piece)
        if piece.finish_reason == "stop" and self._readers[piece.index].num_calls:
            fields["finish_reason"] = "tool_calls"
        return fields


def _written(call: CallDelta) -> dict[str, Any]:
    """A call, or what was added to one: only its beginning has an id and a name."""
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}

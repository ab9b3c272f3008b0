"""Answers in Anthropic's format: a message made of content blocks, or the events that build one.

A whole message is made of the same steps that a stream sends as events.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from pydantic_core import from_json

from outpace.engine.generation import Piece
from outpace.models.reasoning.reader import Thought
from outpace.models.tool_calls.reader import CallDelta, Found
from outpace.server.completions import Encoded
from outpace.server.errors import ApiError
from outpace.server.messages.errors import error_body
from outpace.server.replies import Answer, Heading, event
from outpace.server.scored import TokenTexts

Fields = dict[str, Any]
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


class MessagesAnswer(Answer):
    def __init__(self, encoded: Encoded, heading: Heading, texts: TokenTexts) -> None:
        super().__init__(heading, texts)
        reasoning, use = encoded.reasoning, encoded.tools
        self.reasoning = reasoning
        self._thoughts = None if reasoning is None else reasoning.reader()
        self._reader = None if use is None else use.reader()
        self._num_blocks = 0
        self._open_type: str | None = None  # of the block that takes the next delta

    # ---- as Answer's

    def reply(self) -> Fields:
        [piece] = self._folded.values()
        return self._message(_built(self._steps(piece)), self._usage()) | self._ending()

    def events(self, piece: Piece) -> bytes:
        steps: list[Fields] = []
        if not self._opened:
            self._opened.add(piece.index)
            start = self._message([], self._prompt_usage()) | {"stop_reason": None, "stop_sequence": None}
            steps.append({"type": "message_start", "message": start})
        self._record(piece)
        steps += self._steps(piece)
        return b"".join(event(step, step["type"]) for step in steps)

    def closing(self) -> bytes:
        delta = {"type": "message_delta", "delta": self._ending(), "usage": self._usage()}
        return event(delta, "message_delta") + event({"type": "message_stop"}, "message_stop")

    def failure(self, error: ApiError) -> bytes:
        request_id = self.heading.id.removeprefix("msg_")
        return event(error_body(error.status, str(error), request_id), "error")

    # ---- fields of a message

    def _message(self, content: list[Fields], usage: Fields) -> Fields:
        heading = self.heading
        about = {"id": heading.id, "type": "message", "role": "assistant", "model": heading.model}
        return about | {"content": content, "usage": usage}

    def _ending(self) -> Fields:
        [request] = self.finished.values()
        sequence = request.writer.stopped_by
        if request.finish_reason == "length":
            reason = "max_tokens"
        elif sequence is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._reader is not None and self._reader.num_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _prompt_usage(self, num_cached: int = 0) -> Fields:
        return {
            "input_tokens": self.heading.num_prompt_tokens - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self.num_completion_tokens,
        }

    def _usage(self) -> Fields:
        usage = self.usage()
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        num_thinking = usage["completion_tokens_details"]["reasoning_tokens"]
        details = {"output_tokens_details": {"thinking_tokens": num_thinking}, "speculation": usage["speculation"]}
        return self._prompt_usage(num_cached) | details

    # ---- steps that build the content

    def _steps(self, piece: Piece) -> Iterator[Fields]:
        thought = self._thought(piece)
        if thought.reasoning and self.reasoning is not None and self.reasoning.is_shown:
            yield from self._begun("thinking", {"thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": thought.reasoning})
        found = self._read(thought.content, is_last=piece.is_last)
        if found.content:
            yield from self._begun("text", {"text": "", "citations": None})
            yield self._delta({"type": "text_delta", "text": found.content})
        for call in found.calls:
            yield from self._call_steps(call)
        if piece.is_last:
            yield from self._ended()

    def _thought(self, piece: Piece) -> Thought:
        if self._thoughts is None:
            return Thought(content=piece.text)
        return self._thoughts.read(piece.text, is_last=piece.is_last)

    def _read(self, content: str, *, is_last: bool) -> Found:
        if self._reader is None:
            return Found(content)
        found = self._reader.feed(content)
        return found.joined(self._reader.finish()) if is_last else found

    def _call_steps(self, call: CallDelta) -> Iterator[Fields]:
        if call.name is not None:
            yield from self._ended()
            fields = {"id": f"toolu_{uuid4().hex[:24]}", "name": call.name, "input": {}}
            yield from self._begun("tool_use", fields)
        if call.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _begun(self, kind: str, fields: Fields) -> Iterator[Fields]:
        """Begin a block of this type, unless the open one is of this type."""
        if self._open_type != kind:
            yield from self._ended()
            self._open_type = kind
            self._num_blocks += 1
            block = {"type": kind, **fields}
            yield {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}

    def _delta(self, delta: Fields) -> Fields:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

    def _ended(self) -> Iterator[Fields]:
        if self._open_type is not None:
            self._open_type = None
            yield {"type": "content_block_stop", "index": self._num_blocks - 1}


def _built(steps: Iterator[Fields]) -> list[Fields]:
    """The blocks that the steps of a whole answer build."""
    blocks: list[Fields] = []
    arguments = ""
    for step in steps:
        if step["type"] == "content_block_start":
            blocks.append(step["content_block"])
            arguments = ""
        elif step["type"] == "content_block_delta":
            delta = step["delta"]
            arguments += delta.get("partial_json", "")
            for name in ("text", "thinking"):
                if name in delta:
                    blocks[-1][name] += delta[name]
        elif blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = _input(arguments)
    return blocks


def _input(arguments: str) -> Fields:
    """Arguments as an object; if the answer was cut in them, what is complete of it."""
    for text in (arguments, _SURROGATE.sub(r"\\ufffd", arguments)):  # a lone surrogate cannot be sent as UTF-8
        try:
            found = from_json(text, allow_partial=True)
        except ValueError:
            continue
        return found if isinstance(found, dict) else {}
    return {}

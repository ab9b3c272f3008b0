"""Writes the answer to a request of the Responses API: as one object, or as a stream of named, numbered events."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from outpace.engine.generation import Piece
from outpace.models.reasoning.reader import Thought
from outpace.models.tool_calls.reader import Found
from outpace.server.completions import Encoded
from outpace.server.errors import ApiError
from outpace.server.replies import ChatAnswer, Heading
from outpace.server.responses.output import Event, Output
from outpace.server.scored import TokenTexts

_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class ResponsesAnswer(ChatAnswer):
    name = chunk_name = "response"

    def __init__(self, repeated: dict[str, Any], encoded: Encoded, heading: Heading, texts: TokenTexts) -> None:
        """`repeated` are the fields of the request that the answer repeats."""
        super().__init__(heading, texts)
        params = encoded.params
        self._repeated = repeated | {"temperature": params.temperature, "top_p": params.top_p}
        self._repeated_json = _checked_json(self._repeated)
        self.reasoning = encoded.reasoning
        self._thoughts = None if encoded.reasoning is None else encoded.reasoning.reader()
        self._num_skipped = 0  # bytes of the answer since its last content that are in no item, or in thinking
        self._reader = None if encoded.tools is None else encoded.tools.reader()
        self._output = Output()
        self._token_ids: list[int] = []
        self._num_events = 0

    def reply(self) -> dict[str, Any]:
        [piece] = self._folded.values()
        for _ in self._read(piece):
            pass
        return self._state(_status(piece)) | self._repeated

    def events(self, piece: Piece) -> bytes:
        events = []
        if not self._num_events:
            events = [self._about_all("response.created"), self._about_all("response.in_progress")]
        self._record(piece)
        events += [self._event(each) for each in self._read(piece)]
        if piece.is_last:
            status = _status(piece)
            events.append(self._about_all(f"response.{status}", status))
        return "".join(events).encode()

    def closing(self) -> bytes:
        return b""  # the last piece has ended the stream

    def failure(self, error: ApiError) -> bytes:
        events = [self._event(each) for each in self._output.close("incomplete")]
        events.append(self._about_all("response.failed", "failed", str(error)))
        return "".join(events).encode()

    def _read(self, piece: Piece) -> Iterable[Event]:
        self._token_ids += piece.token_ids
        entries = self.logprob_entries(piece) if self.heading.with_logprobs else []
        thought, reader = self._thought(piece), self._reader
        if thought.reasoning:
            yield from self._output.add_thinking(thought.reasoning)
        found = Found(thought.content) if reader is None else reader.feed(thought.content)
        yield from self._output.add(found, entries, self._newly_skipped(piece, thought))
        if piece.is_last:
            if reader is not None:
                yield from self._output.add(reader.finish(), [])
            yield from self._output.finish(_status(piece))

    def _thought(self, piece: Piece) -> Thought:
        if self._thoughts is None:
            return Thought(content=piece.text)
        return self._thoughts.read(piece.text, is_last=piece.is_last)

    def _newly_skipped(self, piece: Piece, thought: Thought) -> int:
        """Bytes of thinking, its tags and the space around it. Text that is held back may become content, so they are
        known where content follows, or at the end."""
        self._num_skipped += len(piece.text.encode()) - len(thought.content.encode())
        if not thought.content and not piece.is_last:
            return 0
        num_skipped, self._num_skipped = self._num_skipped, 0
        return num_skipped

    # ---- the object of the response, and events

    def _state(self, status: str = "in_progress", failure: str | None = None) -> dict[str, Any]:
        """What may change while the answer is generated."""
        is_finished = status in ("completed", "incomplete")
        return {
            "id": self.heading.id,
            "object": self.name,
            "created_at": self.heading.created,
            "status": status,
            "error": None if failure is None else {"code": "server_error", "message": failure},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.heading.model,
            "output": self._output.items,
            "usage": self._response_usage() if is_finished else None,
        } | (self._all_token_ids() if is_finished else {})

    def _all_token_ids(self) -> dict[str, Any]:
        ids = self.heading.prompt_token_ids
        return {} if ids is None else {"prompt_token_ids": ids[0], "token_ids": self._token_ids}

    def _response_usage(self) -> dict[str, Any]:
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
            "speculation": usage["speculation"],
        }

    def _about_all(self, name: str, status: str = "in_progress", failure: str | None = None) -> str:
        response = f"{_to_json(self._state(status, failure))[:-1]},{self._repeated_json[1:]}"
        return self._written(name, f'"response":{response}')

    def _event(self, event: Event) -> str:
        return self._written(event["type"], _to_json({name: event[name] for name in event if name != "type"})[1:-1])

    def _written(self, name: str, members: str) -> str:
        number = self._num_events
        self._num_events += 1
        return f'event: {name}\ndata: {{"type":"{name}","sequence_number":{number},{members}}}\n\n'


def _status(piece: Piece) -> str:
    return "incomplete" if piece.finish_reason == "length" else "completed"


def _checked_json(repeated: dict[str, Any]) -> str:
    """The JSON of what comes from the request, before anything is generated: it may be what no JSON text can hold."""
    try:
        text = _to_json(repeated)
    except (ValueError, RecursionError):
        message = "the tools or the format have a number that is not finite, or too many levels; send plainer ones"
        raise ApiError(400, message, param="tools", code="invalid_value") from None
    text.encode()  # raises an error for lone surrogates
    return text

"""Replies in OpenAI's format. A whole reply is merged from the same pieces that a stream sends one by one.

Replies are dictionaries with the shapes of reply_types.py. The part that all chunks of an answer share is encoded
once, because there may be a chunk per token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outpace.core import Request, TokenLogprob, estimated_speedup
from outpace.engine.generation import Piece
from outpace.engine.stretches import Stretch
from outpace.models.reasoning.use import Reasoning
from outpace.server.errors import ApiError
from outpace.server.scored import ScoredPrompt, TokenTexts, finite, top_by_text

_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(slots=True)
class Heading:
    """The fields that a whole reply and all its chunks share."""

    id: str
    created: int
    model: str
    num_prompt_tokens: int
    completions_per_prompt: int
    with_logprobs: bool
    include_usage: bool
    echoes: list[str]  # per completion: the prompt's text that precedes it, or empty
    continuous_usage: bool = False  # with include_usage: every chunk has usage
    prompt_token_ids: list[list[int]] | None = None  # per prompt, if the reply has token ids
    prompts: Sequence[Sequence[int]] = ()  # token ids, per prompt; needed where they are scored
    prompt_logprobs: int | None = None  # alternatives in vLLM's field of that name; None: the reply has no such field
    echoed_logprobs: int | None = None  # alternatives for the tokens of a repeated prompt; None: no logprobs of them
    include_drafts: bool = False  # a chunk has text of one origin, and says which

    @property
    def is_scored(self) -> bool:
        return self.prompt_logprobs is not None or self.echoed_logprobs is not None


class Answer:
    """Writes pieces as chunks, or merges them into one reply. Subclasses add what differs for chat and plain text."""

    def __init__(self, heading: Heading, texts: TokenTexts) -> None:
        self.heading = heading
        self.texts = texts
        self.num_completion_tokens = 0
        self.finished: dict[int, Request] = {}
        self._opened: set[int] = set()
        self._folded: dict[int, Piece] = {}
        self.scored: dict[int, ScoredPrompt] = {}
        self._chunk_begin = "data: " + _to_json(self._object(self.chunk_name))[:-1] + ',"choices":['
        self._no_usage = ',"usage":null' if heading.include_usage else ""

    @property
    def is_complete(self) -> bool:
        return len(self.finished) == len(self.heading.echoes)

    @property
    def is_long(self) -> bool:
        """Whether writing the reply may take longer than the event loop may be blocked."""
        return self.heading.is_scored

    def fold(self, piece: Piece) -> None:
        self._note_scores(piece)
        self._record(piece)
        if piece.index in self._folded:
            self._folded[piece.index].merge(piece)
        else:
            self._folded[piece.index] = piece

    def reply(self) -> dict[str, Any]:
        choices = [self.choice(self._folded[index]) for index in sorted(self._folded)]
        return self._object(self.name) | {"choices": choices, "usage": self.usage()} | self.about_prompts()

    def events(self, piece: Piece) -> bytes:
        """The chunks of one piece, as server-sent events."""
        self._note_scores(piece)
        events = [] if piece.index in self._opened else self._first_events(piece.index)
        self._record(piece)
        if self.heading.include_drafts:
            events += self._chunks_by_origin(piece)
        elif (delta := self.delta(piece)) is not None:
            events.append(self._chunk(delta))
        return "".join(events).encode()

    def _chunks_by_origin(self, piece: Piece) -> Iterator[str]:
        """A chunk for each stretch of text; the last one has what belongs to the whole piece, such as its end."""
        *others, last = piece.stretches or [Stretch("")]
        parts = [(stretch, Piece(piece.index, stretch.text)) for stretch in others]
        for stretch, part in [*parts, (last, replace(piece, text=last.text))]:
            delta = self.delta(part)
            if delta is not None:
                yield self._chunk(delta | {"speculation": self._origin(stretch)})

    def _origin(self, stretch: Stretch) -> dict[str, Any] | None:
        draft = stretch.draft
        if draft is None:
            return None
        return {
            "at": draft.start,
            "proposer": draft.proposer,
            "draft": [self.texts.text(token) for token in draft.tokens],
            "accepted": draft.num_accepted,
            "lenient": draft.num_lenient,
            "is_accepted": stretch.is_accepted,
        }

    def _first_events(self, index: int) -> list[str]:
        about = "" if self._opened else _members(self.about_prompts())
        self._opened.add(index)
        return [self._chunk(delta, about) for delta in self.opening(index)]

    def _chunk(self, choice: dict[str, Any], about: str = "") -> str:
        usage = self._no_usage
        if self.heading.include_usage and self.heading.continuous_usage:
            usage = _members({"usage": self._counts()})
        return f"{self._chunk_begin}{_to_json(choice)}]{usage}{about}}}\n\n"

    def closing(self) -> bytes:
        """The end of the stream: the usage chunk, if requested, and [DONE]."""
        if not self.heading.include_usage:
            return DONE
        return event(self._object(self.chunk_name) | {"choices": [], "usage": self.usage()}) + DONE

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that fails after its start."""
        return event(error.body()) + DONE

    def usage(self) -> dict[str, Any]:
        heading, requests = self.heading, list(self.finished.values())
        specs = [request.spec for request in requests]
        speedup = estimated_speedup(specs)
        # A prompt counts once, however many completions it has: its first one counts the cached tokens.
        firsts = [r for index, r in self.finished.items() if index % heading.completions_per_prompt == 0]
        return self._counts() | {
            "prompt_tokens_details": {"cached_tokens": sum(request.num_shared for request in firsts)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(self.num_reasoning_tokens(request) for request in requests),
                "accepted_prediction_tokens": sum(spec.accepted_prediction_tokens for spec in specs),
                "rejected_prediction_tokens": sum(spec.rejected_prediction_tokens for spec in specs),
            },
            "speculation": {
                "drafted": sum(spec.num_drafted for spec in specs),
                "accepted": sum(spec.num_accepted for spec in specs),
                "lossy": any(request.params.speculation.is_lossy for request in requests),
                "estimated_speedup": None if speedup is None else round(speedup, 3),
            },
        }

    def _counts(self) -> dict[str, Any]:
        num_prompt, num_completion = self.heading.num_prompt_tokens, self.num_completion_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        }

    # ---- for subclasses

    name = chunk_name = ""
    reasoning: Reasoning | None = None  # how the answers think; None: the model does not

    def opening(self, index: int) -> list[dict[str, Any]]:
        raise NotImplementedError

    def delta(self, piece: Piece) -> dict[str, Any] | None:
        """The choice of a chunk; None if the piece adds nothing that a client sees."""
        raise NotImplementedError

    def choice(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def about_prompts(self) -> dict[str, Any]:
        """Fields beside the choices that a reply has once, a stream in its first chunk."""
        return {}

    def num_reasoning_tokens(self, request: Request) -> int:
        """Of a finished completion."""
        if self.reasoning is None:
            return 0
        return self.reasoning.num_tokens(map(self.texts.bytes, request.tokens[len(request.prompt) :]))

    def token_ids(self, piece: Piece) -> dict[str, Any]:
        """Those of a choice, if they were asked for."""
        return {} if self.heading.prompt_token_ids is None else {"token_ids": piece.token_ids}

    def _has_news(self, piece: Piece) -> bool:
        return bool(piece.text or piece.is_last or self._has_details(piece))

    def _has_details(self, piece: Piece) -> bool:
        """Whether a chunk must be sent for its tokens, also without any text."""
        heading = self.heading
        return bool((heading.with_logprobs and piece.logprobs) or (heading.prompt_token_ids and piece.token_ids))

    def _note_scores(self, piece: Piece) -> None:
        if self.heading.is_scored and piece.index not in self.scored:
            prompt = self.heading.prompts[piece.index // self.heading.completions_per_prompt]
            self.scored[piece.index] = ScoredPrompt(prompt, piece.prompt_logprobs, self.texts)

    def _prompt_logprobs(self, index: int) -> dict[str, Any]:
        """vLLM's field, if it was asked for."""
        num_top = self.heading.prompt_logprobs
        return {} if num_top is None else {"prompt_logprobs": self.scored[index].by_token_id(num_top)}

    def _record(self, piece: Piece) -> None:
        self.num_completion_tokens += len(piece.token_ids)
        if piece.request is not None:
            self.finished[piece.index] = piece.request

    def _object(self, name: str) -> dict[str, Any]:
        heading = self.heading
        return {"id": heading.id, "object": name, "created": heading.created, "model": heading.model}


class ChatAnswer(Answer):
    name, chunk_name = "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def about_prompts(self) -> dict[str, Any]:
        ids = self.heading.prompt_token_ids
        return ({} if ids is None else {"prompt_token_ids": ids[0]}) | self._prompt_logprobs(0)

    def delta(self, piece: Piece) -> dict[str, Any] | None:
        if not self._has_news(piece):
            return None
        delta = {"content": piece.text} if piece.text else {}
        return self._choice_fields(piece) | {"delta": delta}

    def choice(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return self._choice_fields(piece) | {"message": message}

    def _choice_fields(self, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self.heading.with_logprobs:
            logprobs = {"content": self.logprob_entries(piece), "refusal": None}
        fields = {"index": piece.index, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        return fields | self.token_ids(piece)

    def logprob_entries(self, piece: Piece) -> list[dict[str, Any]]:
        return [
            self._entry(one.token_id, one.logprob) | {"top_logprobs": [self._entry(*top) for top in one.top]}
            for one in piece.logprobs
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self.texts.bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(raw)}


class TextAnswer(Answer):
    name = chunk_name = "text_completion"

    def __init__(self, heading: Heading, texts: TokenTexts) -> None:
        super().__init__(heading, texts)
        self._offsets = [len(echo) for echo in heading.echoes]  # where the next token of each completion begins

    def opening(self, index: int) -> list[dict[str, Any]]:
        echo, ids = self.heading.echoes[index], self._prompt_token_ids(index)
        logprobs = self._echoed_logprobs(index)
        first = {"index": index, "text": echo, "logprobs": logprobs, "finish_reason": None} | ids
        return [first] if echo or ids or logprobs else []

    def _echoed_logprobs(self, index: int) -> dict[str, list[Any]] | None:
        num_top = self.heading.echoed_logprobs
        return None if num_top is None else self.scored[index].by_text(num_top, self.heading.echoes[index])

    def _prompt_token_ids(self, index: int) -> dict[str, Any]:
        ids = self.heading.prompt_token_ids
        return {} if ids is None else {"prompt_token_ids": ids[index // self.heading.completions_per_prompt]}

    def delta(self, piece: Piece) -> dict[str, Any] | None:
        return self._text_choice(piece) if self._has_news(piece) else None

    def _text_choice(self, piece: Piece) -> dict[str, Any]:
        logprobs = self._logprobs(piece.index, piece.logprobs) if self.heading.with_logprobs else None
        fields = {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        return fields | self.token_ids(piece)

    def choice(self, piece: Piece) -> dict[str, Any]:
        index, choice = piece.index, self._text_choice(piece)
        choice["text"] = self.heading.echoes[index] + piece.text
        echoed = self._echoed_logprobs(index)
        if echoed is not None:
            choice["logprobs"] = {name: echoed[name] + choice["logprobs"][name] for name in echoed}
        return choice | self._prompt_token_ids(index) | self._prompt_logprobs(index)

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens = [self.texts.text(entry.token_id) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [top_by_text(entry, self.texts) for entry in entries],
            "text_offset": offsets,
        }


def _members(fields: dict[str, Any]) -> str:
    """JSON members to put before the end of an object."""
    return "," + _to_json(fields)[1:-1] if fields else ""


def event(body: dict[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    return (f"event: {name}\n" if name else "").encode() + b"data: " + _to_json(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"

"""Replies in OpenAI's format. A whole reply is merged from the same pieces that a stream sends one by one.

Replies are dictionaries with the shapes of reply_types.py. The part that all chunks of an answer share is encoded
once, because there may be a chunk per token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outpace.backends.base import Tokenizer
from outpace.core import Request, TokenLogprob
from outpace.engine.generation import Piece

_LEAST_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON lacks
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class TokenTexts:
    """The bytes and text of tokens. Control tokens, which produce no text, appear by their name in the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._written: Sequence[tuple[bytes, int]] | None = None

    def bytes(self, token: int) -> bytes:
        piece = self._tokenizer.token_bytes(token)
        if not piece:
            if self._written is None:
                self._written = self._tokenizer.vocabulary()
            piece = self._written[token][0]
        return piece

    def text(self, token: int) -> str:
        return self.bytes(token).decode(errors="replace")


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


class Answer:
    """Writes pieces as chunks, or merges them into one reply. Subclasses add what differs for chat and plain text."""

    def __init__(self, heading: Heading, texts: TokenTexts) -> None:
        self.heading = heading
        self.texts = texts
        self.num_completion_tokens = 0
        self.finished: dict[int, Request] = {}
        self._opened: set[int] = set()
        self._folded: dict[int, Piece] = {}
        self._chunk_begin = "data: " + _to_json(self._object(self.chunk_name))[:-1] + ',"choices":['
        self._chunk_end = (',"usage":null}' if heading.include_usage else "}") + "\n\n"

    @property
    def is_complete(self) -> bool:
        return len(self.finished) == len(self.heading.echoes)

    def fold(self, piece: Piece) -> None:
        self._record(piece)
        if piece.index in self._folded:
            self._folded[piece.index].merge(piece)
        else:
            self._folded[piece.index] = piece

    def reply(self) -> dict[str, Any]:
        choices = [self.choice(self._folded[index]) for index in sorted(self._folded)]
        return self._object(self.name) | {"choices": choices, "usage": self.usage()}

    def events(self, piece: Piece) -> bytes:
        """The chunks of one piece, as server-sent events."""
        self._record(piece)
        deltas = [] if piece.index in self._opened else self.opening(piece.index)
        self._opened.add(piece.index)
        delta = self.delta(piece)
        if delta is not None:
            deltas.append(delta)
        return "".join([f"{self._chunk_begin}{_to_json(delta)}]{self._chunk_end}" for delta in deltas]).encode()

    def closing(self) -> bytes:
        """The end of the stream: the usage chunk, if requested, and [DONE]."""
        if not self.heading.include_usage:
            return DONE
        return event(self._object(self.chunk_name) | {"choices": [], "usage": self.usage()}) + DONE

    def usage(self) -> dict[str, Any]:
        heading, requests = self.heading, list(self.finished.values())
        specs = [request.spec for request in requests]
        drafted = sum(spec.num_drafted for spec in specs)
        spent, plain = sum(spec.decode_seconds for spec in specs), sum(spec.plain_seconds for spec in specs)
        # A prompt counts once, however many completions it has: its first one counts the cached tokens.
        firsts = [r for index, r in self.finished.items() if index % heading.completions_per_prompt == 0]
        return {
            "prompt_tokens": heading.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": heading.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(request.num_shared for request in firsts)},
            "speculation": {
                "drafted": drafted,
                "accepted": sum(spec.num_accepted for spec in specs),
                "lossy": any(request.params.speculation.is_lossy for request in requests),
                "estimated_speedup": round(plain / spent, 3) if drafted and spent and plain else None,
            },
        }

    # ---- for subclasses

    name = chunk_name = ""

    def opening(self, index: int) -> list[dict[str, Any]]:
        raise NotImplementedError

    def delta(self, piece: Piece) -> dict[str, Any] | None:
        """The choice of a chunk; None if the piece adds nothing that a client sees."""
        raise NotImplementedError

    def choice(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _has_news(self, piece: Piece) -> bool:
        return bool(piece.text) or piece.is_last or (self.heading.with_logprobs and bool(piece.logprobs))

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
            entries = [
                self._entry(one.token_id, one.logprob) | {"top_logprobs": [self._entry(*top) for top in one.top]}
                for one in piece.logprobs
            ]
            logprobs = {"content": entries, "refusal": None}
        return {"index": piece.index, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self.texts.bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(raw)}


class TextAnswer(Answer):
    name = chunk_name = "text_completion"

    def __init__(self, heading: Heading, texts: TokenTexts) -> None:
        super().__init__(heading, texts)
        self._offsets = [len(echo) for echo in heading.echoes]  # where the next token of each completion begins

    def opening(self, index: int) -> list[dict[str, Any]]:
        echo = self.heading.echoes[index]
        return [{"index": index, "text": echo, "logprobs": None, "finish_reason": None}] if echo else []

    def delta(self, piece: Piece) -> dict[str, Any] | None:
        return self._text_choice(piece) if self._has_news(piece) else None

    def _text_choice(self, piece: Piece) -> dict[str, Any]:
        logprobs = self._logprobs(piece.index, piece.logprobs) if self.heading.with_logprobs else None
        return {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def choice(self, piece: Piece) -> dict[str, Any]:
        return self._text_choice(piece) | {"text": self.heading.echoes[piece.index] + piece.text}

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens = [self.texts.text(entry.token_id) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(entry.logprob, _LEAST_LOGPROB) for entry in entries],
            "top_logprobs": [
                {self.texts.text(token): max(logprob, _LEAST_LOGPROB) for token, logprob in entry.top}
                for entry in entries
            ],
            "text_offset": offsets,
        }


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _to_json(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"

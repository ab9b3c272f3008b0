"""Tokens and their log-probabilities as replies show them: in OpenAI's shape by text, and in vLLM's by token id."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outpace.backends.base import Tokenizer
from outpace.core import TokenLogprob

_LEAST_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON lacks


def finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


class TokenTexts:
    """The bytes and text of tokens. Control tokens, which produce no text, appear by their name in the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._written: Sequence[tuple[bytes, int]] | None = None

    def own_bytes(self, token: int) -> bytes:
        """What the token adds to a text; empty for control tokens."""
        return self._tokenizer.token_bytes(token)

    def control_names(self) -> dict[int, str]:
        """The texts by which a prompt names control tokens."""
        return {token.id: token.text for token in self._tokenizer.specials.controls.tokens}

    def bytes(self, token: int) -> bytes:
        piece = self._tokenizer.token_bytes(token)
        if not piece:
            if self._written is None:
                self._written = self._tokenizer.vocabulary()
            piece = self._written[token][0]
        return piece

    def text(self, token: int) -> str:
        return self.bytes(token).decode(errors="replace")


def top_by_text(entry: TokenLogprob, texts: TokenTexts, num_top: int | None = None) -> dict[str, float]:
    """The alternatives to a token. The token itself is always there, as with OpenAI, also with logprobs=0."""
    pairs = [(entry.token_id, entry.logprob), *entry.top[:num_top]]
    return {texts.text(token): finite(logprob) for token, logprob in pairs}


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """A prompt and the log-probabilities of its tokens, from the second one on."""

    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    texts: TokenTexts

    def by_text(self, num_top: int, shown: str) -> dict[str, list[Any]]:
        """OpenAI's shape, with null for the first token. `shown` is the text of the prompt, for the offsets."""
        return {
            "tokens": [self.texts.text(token) for token in self.tokens],
            "token_logprobs": [None, *(finite(entry.logprob) for entry in self.logprobs)],
            "top_logprobs": [None, *(top_by_text(entry, self.texts, num_top) for entry in self.logprobs)],
            "text_offset": self._offsets(shown),
        }

    def by_token_id(self, num_top: int) -> list[dict[str, Any] | None]:
        """vLLM's shape: for each token a mapping of ids to log-probabilities, and null for the first."""
        return [None, *(self._by_token_id(entry, num_top) for entry in self.logprobs)]

    def _by_token_id(self, entry: TokenLogprob, num_top: int) -> dict[str, Any]:
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top[:num_top], 1)]
        return {
            str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": self.texts.text(token)}
            for token, logprob, rank in [*ranked, (entry.token_id, entry.logprob, entry.rank)]
        }

    def _offsets(self, shown: str) -> list[int]:
        """Where each token begins in `shown`. A control token takes no place there, unless its name is shown."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        names = self.texts.control_names()
        offsets, at = [], 0
        for token in self.tokens:
            offsets.append(min(at, len(shown)))
            at += len(decoder.decode(self.texts.own_bytes(token)))
            if token in names and shown.startswith(names[token], at):
                at += len(names[token])
        return offsets

"""Splits forced text into tokens that spell exactly its bytes, as the model would split them.

A tokenizer may add to a text, such as a space at its beginning, or refuse part of a character. What a grammar forces is
in the middle of a text, so nothing may be added, and it may end inside a character.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

from outpace.backends.base import Tokenizer
from outpace.errors import OutpaceError

_CACHED_TEXTS = 4096
# Written before a text, it keeps a tokenizer from adding a space to the text itself.
_BEFORE = ("", "\n")


class ExactTokenizer:
    """Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known = lru_cache(_CACHED_TEXTS)(self._tokens)

    def __call__(self, text: bytes) -> list[int]:
        return list(self._known(text))

    def _tokens(self, text: bytes) -> tuple[int, ...]:
        for before in _BEFORE:
            tokens = self._encoded(before, text)
            if tokens is not None:
                return tokens
        begin, end = _whole_characters(text)
        if (begin, end) == (0, len(text)) or begin >= end:
            return self._longest_first(text)
        return self._joined(text[:begin], text[begin:end], text[end:])

    def _joined(self, *parts: bytes) -> tuple[int, ...]:
        """The tokens of all parts, up to a byte that no token spells."""
        tokens: tuple[int, ...] = ()
        for part in parts:
            found = self._tokens(part) if part else ()
            tokens += found
            if sum(len(self._tokenizer.token_bytes(token)) for token in found) < len(part):
                break
        return tokens

    def _encoded(self, before: str, text: bytes) -> tuple[int, ...] | None:
        """The tokens of the text after `before`; None if no token begins where the text does."""
        try:
            tokens = self._tokenizer.encode(before + text.decode(), add_special=False, parse_special=False)
        except (UnicodeDecodeError, OutpaceError):
            return None
        pieces = [self._tokenizer.token_bytes(token) for token in tokens]
        for start in range(len(tokens) + 1):
            if b"".join(pieces[start:]) == text:
                return tuple(tokens[start:])
        return None

    def _longest_first(self, text: bytes) -> tuple[int, ...]:
        """The longest token that fits, again and again; ends before a byte that no token spells."""
        ids, longest, tokens, at = self._ids, self._longest, list[int](), 0
        while at < len(text):
            ends = range(min(len(text), at + longest[text[at]]), at, -1)
            end = next((end for end in ends if text[at:end] in ids), None)
            if end is None:
                break
            tokens.append(ids[text[at:end]])
            at = end
        return tuple(tokens)

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        controls = {token.id for token in self._tokenizer.specials.controls.tokens}
        pieces = ((self._tokenizer.token_bytes(token), token) for token in range(self._tokenizer.vocab_size))
        return {piece: token for piece, token in pieces if piece and token not in controls}

    @cached_property
    def _longest(self) -> list[int]:
        """Bytes of the longest token, by its first byte."""
        found = [0] * 256
        for piece in self._ids:
            found[piece[0]] = max(found[piece[0]], len(piece))
        return found


def _whole_characters(text: bytes) -> tuple[int, int]:
    """Where the first whole character of UTF-8 begins, and where the last one ends."""
    begin = next((i for i, byte in enumerate(text[:4]) if byte & 0xC0 != 0x80), len(text))
    for i in range(len(text) - 1, max(len(text) - 5, -1), -1):
        if text[i] & 0xC0 != 0x80:
            size = 1 if text[i] < 0x80 else 2 if text[i] < 0xE0 else 3 if text[i] < 0xF0 else 4
            return begin, len(text) if i + size <= len(text) else i
    return begin, len(text)

"""Token sequences that a request must not produce.

The last token of a sequence is masked where the tokens before it were emitted, that of a sequence of one token always.
Only the output counts: a sequence that begins in the prompt may be completed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

TokenIds = tuple[int, ...]


class Encoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]: ...


def as_token_ids(words: Sequence[str | Sequence[int]], tokenizer: Encoder) -> tuple[TokenIds, ...]:
    """The sequences for these words: a text as it is and after a space, as tokenizers tell the two apart.

    Names of control tokens are plain text. A sequence of token ids stays as it is.
    """
    found: dict[TokenIds, None] = {}
    for word in words:
        texts = (word, " " + word.lstrip()) if isinstance(word, str) else ()
        ids = [tokenizer.encode(text, add_special=False, parse_special=False) for text in texts]
        for sequence in ids if isinstance(word, str) else [word]:
            if sequence:
                found[tuple(sequence)] = None
    return tuple(found)


class BadWords:
    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._always = [ids[0] for ids in sequences if len(ids) == 1]
        self._longest = max((len(ids) for ids in sequences), default=0)
        self._by_last_but_one: dict[int, list[TokenIds]] = defaultdict(list)
        for ids in sequences:
            if len(ids) > 1:
                self._by_last_but_one[ids[-2]].append(tuple(ids))
        self._emitted: list[int] = []  # as much of the output as a sequence can begin with

    def advance(self, tokens: Sequence[int]) -> None:
        """Record tokens that were emitted."""
        if self._by_last_but_one:
            self._emitted = [*self._emitted, *tokens][1 - self._longest :]

    def after(self, prefix: Sequence[int]) -> list[int]:
        """The tokens that must not follow the output and `prefix`."""
        last = prefix[-1] if prefix else self._emitted[-1] if self._emitted else -1
        candidates = self._by_last_but_one.get(last)
        if not candidates:
            return self._always
        before = (*self._emitted, *prefix)
        completing = [ids[-1] for ids in candidates if before[1 - len(ids) :] == ids[:-1]]
        return list(dict.fromkeys(self._always + completing))

"""Runs of tokens of which each is the only one that a grammar allows.

llguidance says which tokens must follow the parser's place. Its mask there has the first of them alone. Whether its
answer one token later is the rest of the run depends on how the tokenizer splits the text from there; it is so for
almost all texts and tokenizers. Each run is tried once, on the parser, and kept for the whole grammar: so a run costs
one question instead of one for each of its tokens.
"""

from __future__ import annotations

from typing import Protocol

_MOST_KEPT = 4096


class RunParser(Protocol):
    """The part of `llguidance.LLMatcher` that is used here."""

    def try_consume_tokens(self, tokens: list[int]) -> int: ...
    def rollback(self, num_tokens: int) -> bool: ...
    def compute_ff_tokens(self) -> list[int]: ...


class ForcedRuns:
    """Of one grammar."""

    def __init__(self) -> None:
        self._lengths: dict[tuple[bytes, tuple[int, ...]], int] = {}

    def at(self, parser: RunParser, text: bytes, stop_ids: frozenset[int]) -> tuple[int, ...]:
        """The run at the parser's place, where it forces `text`; it ends with the first stop token."""
        tokens = tuple(parser.compute_ff_tokens())
        if len(tokens) < 2:
            return tokens
        length = self._lengths.get((text, tokens))
        if length is None:
            if len(self._lengths) >= _MOST_KEPT:
                self._lengths.clear()
            length = self._lengths[text, tokens] = _length_of(parser, tokens)
        first_stop = next((i for i, token in enumerate(tokens) if token in stop_ids), length)
        return tokens[: min(length, first_stop + 1)]


def _length_of(parser: RunParser, tokens: tuple[int, ...]) -> int:
    """How many of the tokens the parser also gives from each place between them."""
    length = 1
    while length < len(tokens) and parser.try_consume_tokens([tokens[length - 1]]) == 1:
        if tuple(parser.compute_ff_tokens()) != tokens[length:]:
            parser.rollback(1)
            break
        length += 1
    parser.rollback(length - 1)
    return length

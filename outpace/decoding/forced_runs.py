"""Runs of tokens of which each is the only one that a grammar allows.

llguidance says which tokens must follow the parser's place. Its mask there has the first of them alone. Whether its
answer one token later is the rest of the run depends on how the tokenizer splits the text from there; it is so for
almost all texts and tokenizers. Each run is tried once, on the parser, and kept for the whole grammar: so a run costs
one question instead of one for each of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outpace.decoding.masks import Mask
from outpace.decoding.parser import ForcingParser

_MOST_KEPT = 4096


@dataclass(slots=True)
class Place:
    """What is known of a place on the parser's path."""

    mask: Mask | None = None
    is_forced: bool | None = None  # the mask has fewer tokens than the parser accepts; None: not asked yet
    run: tuple[int, ...] = ()  # tokens that must follow: each is the only one of its mask

    def after(self, tokens: Sequence[int]) -> Place:
        """The place after these tokens, with what this one tells of it."""
        return Place(None, True, self.run[len(tokens) :]) if self.begins_run(tokens) else Place()

    def begins_run(self, tokens: Sequence[int]) -> bool:
        """Whether the tokens begin the run and it goes on after them."""
        run = self.run
        return len(tokens) < len(run) and run[: len(tokens)] == tuple(tokens)


class ForcedRuns:
    """Of one grammar."""

    def __init__(self) -> None:
        self._lengths: dict[tuple[bytes, tuple[int, ...]], int] = {}

    def at(self, parser: ForcingParser, text: bytes, stop_ids: frozenset[int]) -> tuple[int, ...]:
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


def _length_of(parser: ForcingParser, tokens: tuple[int, ...]) -> int:
    """How many of the tokens the parser also gives from each place between them."""
    length = 1
    while length < len(tokens) and parser.try_consume_tokens([tokens[length - 1]]) == 1:
        if tuple(parser.compute_ff_tokens()) != tokens[length:]:
            parser.rollback(1)
            break
        length += 1
    parser.rollback(length - 1)
    return length

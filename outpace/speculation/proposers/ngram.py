"""Prompt lookup: drafts the tokens that followed the latest earlier occurrence of the last few tokens.

It searches only the request's own tokens and uses the latest occurrence of the longest n-gram. `suffix.py` is the
proposer that counts continuations and also uses earlier requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from outpace.core import Draft, Request
from outpace.speculation.proposers.base import DraftAsk, NoDraft

MOST_MATCHED = 32  # a longer match does not predict better


class NgramProposer(NoDraft):
    name = "ngram"

    def __init__(self, min_n: int, max_n: int) -> None:
        self._sizes = range(max_n, min_n - 1, -1)  # longest first
        self._indexes: dict[int, _Index] = {}

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [self._draft(ask.request, ask.depth) for ask in asks]

    def prepare(self, request: Request) -> None:
        self._find(request)

    def release(self, request: Request) -> None:
        self._indexes.pop(request.id, None)

    def _find(self, request: Request) -> int | None:
        index = self._indexes.get(request.id)
        if index is None:
            index = self._indexes[request.id] = _Index(self._sizes)
        return index.find(request.tokens)

    def _draft(self, request: Request, depth: int) -> Draft:
        start = self._find(request)
        if start is None:
            return Draft([], self.name)
        source = request.tokens[start : start + depth]
        # If the source reaches the end of the text, it continues in the draft itself and so repeats the pattern.
        tokens = source if len(source) == depth else [source[i % len(source)] for i in range(depth)]
        matched = matched_length(request.tokens, start)
        # After m agreements in a row, text and source agree once more with probability m / (m + 1).
        return Draft(tokens, self.name, confidence=[(matched + i) / (matched + i + 1) for i in range(depth)])


def matched_length(tokens: Sequence[int], start: int) -> int:
    """How many tokens before `start` equal those at the end of the text, up to MOST_MATCHED."""
    length, most = 0, min(start, MOST_MATCHED)
    if tokens[start - most : start] == tokens[len(tokens) - most :]:  # the usual case in copied text
        return most
    while length < most and tokens[start - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


class _Index:
    """The position just after each n-gram's latest occurrence."""

    __slots__ = ("_found", "_num_indexed", "_sizes", "_starts")

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._starts: dict[tuple[int, ...], int] = {}  # n-grams of all sizes
        self._num_indexed = 0
        self._found: int | None = None

    def find(self, tokens: list[int]) -> int | None:
        """Index the text to its end; returns where the longest n-gram at the end continued before."""
        found, starts = self._found, self._starts
        for end in range(self._num_indexed + 1, len(tokens) + 1):
            found = None
            for n in self._sizes:
                if n <= end:
                    gram = tuple(tokens[end - n : end])
                    if found is None:
                        found = starts.get(gram)
                    starts[gram] = end
        self._num_indexed, self._found = len(tokens), found
        return found

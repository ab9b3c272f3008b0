"""Prompt lookup: what followed the last few tokens the last time they were said is guessed to follow again.

Knows the tokens of one request at a time; refuses to know other requests, the model, and how often a
continuation was right. The latest occurrence of the longest n-gram wins, without a vote: `suffix.py` is the
proposer that counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from outpace.core import Draft, Request
from outpace.speculation.proposers.base import DraftAsk, NoDraft

MOST_MATCHED = 32  # a longer match says no more about what follows


class NgramProposer(NoDraft):
    name = "ngram"

    def __init__(self, min_n: int, max_n: int) -> None:
        self._sizes = range(max_n, min_n - 1, -1)  # longest first: the order of trust
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
        # A source that meets the end of the text reads on in the draft itself, which repeats the pattern.
        tokens = source if len(source) == depth else [source[i % len(source)] for i in range(depth)]
        matched = matched_length(request.tokens, start)
        # Having agreed m times in a row, text and source agree once more with probability m / (m + 1).
        return Draft(tokens, self.name, confidence=[(matched + i) / (matched + i + 1) for i in range(depth)])


def matched_length(tokens: Sequence[int], start: int) -> int:
    """How many tokens before `start` are the same as those at the end, as far as that matters."""
    length, most = 0, min(start, MOST_MATCHED)
    if tokens[start - most : start] == tokens[len(tokens) - most :]:  # a text that is copied: nothing to count
        return most
    while length < most and tokens[start - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


class _Index:
    """Where to read on: the position just after each n-gram's latest occurrence."""

    __slots__ = ("_found", "_num_read", "_sizes", "_starts")

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._starts: dict[tuple[int, ...], int] = {}  # n-grams of every size: their lengths keep them apart
        self._num_read = 0
        self._found: int | None = None

    def find(self, tokens: list[int]) -> int | None:
        """Where the longest n-gram at the end of the text was said before, and the text is read to its end."""
        found, starts = self._found, self._starts
        for end in range(self._num_read + 1, len(tokens) + 1):
            found = None
            for n in self._sizes:
                if n <= end:
                    gram = tuple(tokens[end - n : end])
                    if found is None:
                        found = starts.get(gram)
                    starts[gram] = end
        self._num_read, self._found = len(tokens), found
        return found

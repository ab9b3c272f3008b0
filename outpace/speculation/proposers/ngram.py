"""Prompt lookup: drafts the tokens that followed the latest earlier occurrence of the last few tokens.

It searches only the request's own tokens and uses the latest occurrence of the longest n-gram. `suffix.py` is the
proposer that counts continuations and also uses earlier requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from outpace.core import Draft, Request
from outpace.speculation.proposers.base import DraftAsk, NoDraft

MOST_MATCHED = 32  # a longer match does not predict better
MOST_COMPARED = 128  # occurrences, the latest first; a frequent n-gram may have thousands


class NgramProposer(NoDraft):
    name = "ngram"

    def __init__(self, min_n: int, max_n: int) -> None:
        self._sizes = range(max_n, min_n - 1, -1)  # longest first
        self._indexes: dict[int, _Index] = {}

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def prepare(self, request: Request) -> None:
        self._find(request)

    def release(self, request: Request) -> None:
        self._indexes.pop(request.id, None)

    def _find(self, request: Request) -> int | None:
        return self._index(request).find(request.tokens)

    def _index(self, request: Request) -> _Index:
        index = self._indexes.get(request.id)
        if index is None:
            index = self._indexes[request.id] = _Index(self._sizes)
        return index

    def _draft(self, ask: DraftAsk) -> Draft:
        text, depth = ask.request.tokens, ask.depth
        start = self._find(ask.request)
        if ask.prefix:
            text = [*text, *ask.prefix]
            start = self._index(ask.request).find_end_of(text)
        if start is None:
            return Draft([], self.name)
        source = text[start : start + depth]
        # If the source reaches the end of the text, it continues in the draft itself and so repeats the pattern.
        tokens = source if len(source) == depth else [source[i % len(source)] for i in range(depth)]
        matched = matched_length(text, start)
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
    """The occurrences of every n-gram of the smallest size; longer ones are compared when a draft is asked for."""

    __slots__ = ("_before", "_found", "_latest", "_num_indexed", "_sizes")

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._latest: dict[tuple[int, ...], int] = {}  # the position just after the latest occurrence
        self._before: list[int] = [0] * sizes[-1]  # by such a position: that of the occurrence before it, or 0
        self._num_indexed = 0
        self._found: int | None = None

    def find(self, tokens: list[int]) -> int | None:
        """Index the text to its end; returns where the longest n-gram at the end continued before."""
        if self._num_indexed < len(tokens):
            self._num_indexed = len(tokens)
            self._extend(tokens)
            self._found = self._longest(tokens, self._before[-1])
        return self._found

    def find_end_of(self, text: list[int]) -> int | None:
        """Where the longest n-gram at the end of `text` continued in the indexed text, which `text` begins with."""
        return self._longest(text, self._latest.get(tuple(text[-self._sizes[-1] :]), 0))

    def _extend(self, tokens: list[int]) -> None:
        latest, before, size = self._latest, self._before, self._sizes[-1]
        for end in range(len(before), len(tokens) + 1):
            gram = tuple(tokens[end - size : end])
            before.append(latest.get(gram, 0))
            latest[gram] = end

    def _longest(self, tokens: list[int], start: int) -> int | None:
        """The latest of the occurrences, from `start` on, that agree with the end of the text in the most tokens."""
        best, found, most = 0, None, self._sizes[0]
        end = tokens[-most:]
        for _ in range(MOST_COMPARED):
            if not start:
                break
            if tokens[max(0, start - most) : start] == end:
                return start
            length = self._sizes[-1]
            while length < start and tokens[start - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > best:
                best, found = length, start
            start = self._before[start]
        return found

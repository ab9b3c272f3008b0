"""A predicted text, indexed so that the places after given bytes are found in nearly constant time.

The output is compared with it byte by byte and not token by token: near an edit, the same text may be split into other
tokens. Drafts are made of its tokens, so only places where a token begins are of use.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_MATCHED = 32  # bytes; a longer match does not predict better
_WIDTH = 4  # bytes of a key in the index; shorter matches count only near the expected place
_MOST_COMPARED = 8  # places with the same key, on each side of the expected one; there may be thousands
_NEAR_TOKENS = 16  # so far after the expected place, an output is likely to come back after an edit
_LEAST_NEAR = 2  # bytes that must match there

# How much a match says, in tokens that agreed; m of them make the next one right with probability m / (m + 1). The
# values fit 300 changes of files in this project's history: a match elsewhere is often a coincidence.
_PER_NEAR_BYTE, _NEAR = 1 / 4, 0.3
_PER_FAR_BYTE = 1 / 12


class Match(NamedTuple):
    """A place where the output may go on: after it come the next tokens, before it are the output's latest bytes."""

    place: int
    num_bytes: int
    evidence: float  # in tokens that agreed


class Prediction:
    """A predicted text. It never changes, so the n completions of a prompt share it."""

    __slots__ = ("_index", "starts", "text", "token_bytes", "tokens")

    def __init__(self, tokens: Sequence[int], token_bytes: Callable[[int], bytes]) -> None:
        """Takes time and memory in proportion to the tokens. Control tokens add no text and are left out."""
        pieces = [(token, piece) for token in tokens if (piece := token_bytes(token))]
        self.tokens = [token for token, _ in pieces]
        self.text = b"".join([piece for _, piece in pieces])
        self.starts = [0]  # of every token in the text; at last, the end of the text
        for _, piece in pieces:
            self.starts.append(self.starts[-1] + len(piece))
        self.token_bytes = token_bytes
        self._index = _Index(self.text, self.starts[:-1])

    def boundary_at(self, place: int) -> int | None:
        """The number of tokens before this place; None inside a token."""
        count = bisect_left(self.starts, place)
        return count if self.starts[count] == place else None

    def tokens_between(self, begin: int, end: int) -> range:
        """The tokens that lie wholly between two places."""
        return range(bisect_left(self.starts, begin), bisect_right(self.starts, end) - 1)

    def find(self, latest: bytes, expected: int) -> Match | None:
        """Where an output that ends with `latest` goes on. The match that says most wins; among equals, the first one
        after the expected place, else the last one before it."""
        first = bisect_left(self.starts, expected)
        near = range(first, min(first + _NEAR_TOKENS, len(self.tokens)))
        best: Match | None = None
        for token in near:
            num_bytes = self._matched(latest, self.starts[token])
            evidence = _NEAR + _PER_NEAR_BYTE * num_bytes
            if num_bytes >= _LEAST_NEAR and (best is None or evidence > best.evidence):
                best = Match(self.starts[token], num_bytes, evidence)
        for token in self._index.tokens_after(latest, first):
            num_bytes = self._matched(latest, self.starts[token])
            evidence = _PER_FAR_BYTE * num_bytes
            if best is None or evidence > best.evidence:
                best = Match(self.starts[token], num_bytes, evidence)
        return best

    def _matched(self, latest: bytes, place: int) -> int:
        """How many of the latest bytes are also those before this place."""
        if not place or not latest or self.text[place - 1] != latest[-1]:
            return 0
        most = min(place, len(latest))
        difference = int.from_bytes(self.text[place - most : place]) ^ int.from_bytes(latest[-most:])
        # The lowest bit that differs lies in the last byte that differs.
        return ((difference & -difference).bit_length() - 1) // 8 if difference else most


class _Index:
    """The tokens of a text, sorted by the bytes before them."""

    __slots__ = ("_keys", "_tokens")

    def __init__(self, text: bytes, starts: Sequence[int]) -> None:
        first = bisect_left(starts, _WIDTH)  # the first token with enough bytes before it
        keys: NDArray[np.uint32] = np.zeros(0, np.uint32)
        if first < len(starts):
            windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(text, np.uint8), _WIDTH)
            keys = windows[np.array(starts[first:]) - _WIDTH].view(np.uint32).ravel()
        order = np.argsort(keys, kind="stable")  # tokens with the same key stay in the order of the text
        self._keys, self._tokens = keys[order], (first + order).astype(np.int32)

    def tokens_after(self, latest: bytes, first: int) -> list[int]:
        """Tokens that have the latest bytes before them: some from `first` on, then some before it, backwards."""
        if len(latest) < _WIDTH:
            return []
        key = np.frombuffer(latest[-_WIDTH:], np.uint32)[0]
        low, high = int(self._keys.searchsorted(key, "left")), int(self._keys.searchsorted(key, "right"))
        found = self._tokens[low:high]
        middle = int(found.searchsorted(first))
        following: list[int] = found[middle : middle + _MOST_COMPARED].tolist()
        preceding: list[int] = found[max(0, middle - _MOST_COMPARED) : middle].tolist()
        return following + preceding[::-1]

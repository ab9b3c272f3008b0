"""Counts the cache entries of a draft head, whose entries lie in the target's pages.

An entry depends on the tokens up to its position, as the target's own keys and values do. So a fork shares entries, and
a rewind drops those of removed tokens. Position 0 has no entry; it counts as cached.
"""

from __future__ import annotations


class HeadEntries:
    def __init__(self, max_sequences: int) -> None:
        self._num_cached = [1] * max_sequences

    def num_uncached(self, seq: int, num_tokens: int) -> int:
        return num_tokens - self._num_cached[seq]

    def take(self, seq: int, num_tokens: int) -> int:
        """The position from which to compute entries for a draft after num_tokens; they then count as cached.

        The last entry is always computed: it gives the first draft token.
        """
        start = min(self._num_cached[seq], num_tokens - 1)
        self._num_cached[seq] = num_tokens
        return start

    def truncate(self, seq: int, num_tokens: int) -> None:
        self._num_cached[seq] = min(self._num_cached[seq], max(num_tokens, 1))

    def fork(self, source: int, target: int, num_tokens: int) -> None:
        self._num_cached[target] = min(self._num_cached[source], max(num_tokens, 1))

    def free(self, seq: int) -> None:
        self._num_cached[seq] = 1

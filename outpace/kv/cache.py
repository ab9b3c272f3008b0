"""The engine's handle on a runner's cache: books and memory change together, so they cannot drift apart.

Each operation updates the pool of tokens and tells the runner in the same breath. Sequence numbers are handed out here.
"""

from __future__ import annotations

from outpace.backends.base import Runner
from outpace.kv.tokens import TokenPool


class SequenceCache:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._pool = TokenPool(runner.capacity.cache_tokens)
        self._unused = list(range(runner.capacity.max_sequences - 1, -1, -1))

    @property
    def num_free_tokens(self) -> int:
        return self._pool.num_free

    @property
    def num_unused_sequences(self) -> int:
        return len(self._unused)

    @property
    def num_open_sequences(self) -> int:
        return len(self._pool.sequences)

    def length(self, seq: int) -> int:
        return self._pool.length(seq)

    def open(self) -> int:
        seq = self._unused.pop()
        self._pool.open(seq)
        return seq

    def fork(self, source: int, num_tokens: int) -> int:
        """A new sequence that begins with the first num_tokens of `source`, computed once."""
        seq = self._unused.pop()
        self._pool.fork(source, seq, num_tokens)
        self._runner.fork(source, seq, num_tokens)
        return seq

    def reserve(self, seq: int, num_tokens: int) -> bool:
        """Take room for tokens about to be computed. False, and no change, where there is too little."""
        return self._pool.reserve(seq, num_tokens)

    def commit(self, seq: int, num_computed: int, num_kept: int) -> None:
        """Of the num_computed tokens the runner appended, the first num_kept stay."""
        length = self._pool.commit(seq, num_kept)
        if num_kept < num_computed:
            self._runner.truncate(seq, length)

    def advance(self, seq: int, num_tokens: int) -> None:
        """The runner appended this many reserved tokens, all kept; the rest of the reservation stands."""
        self._pool.advance(seq, num_tokens)

    def rewind(self, seq: int, length: int) -> None:
        """Keep the first `length` tokens; room reserved and not used goes back too."""
        shortens = length < self._pool.length(seq)
        self._pool.rewind(seq, length)
        if shortens:
            self._runner.truncate(seq, length)

    def close(self, seq: int) -> None:
        self._pool.close(seq)
        self._runner.free(seq)
        self._unused.append(seq)

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        open_sequences = self._pool.sequences
        assert not open_sequences & set(self._unused), "a sequence is both open and unused"
        assert len(open_sequences) + len(self._unused) == self._runner.capacity.max_sequences, "a sequence was lost"

"""The engine's access to a runner's cache.

Each operation updates a pool of single tokens, which knows what fits, and the runner together, so that the two always
agree. This module also assigns the sequence numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from outpace.backends.base import Runner
from outpace.kv.blocks import BlockPool


class SequenceCache:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._pool = BlockPool(runner.capacity.cache_tokens)
        self._unused = list(range(runner.capacity.max_sequences - 1, -1, -1))

    @property
    def num_free_tokens(self) -> int:
        return self._pool.num_free_blocks

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
        """Open a new sequence that shares the first num_tokens of `source`."""
        seq = self._unused.pop()
        self._pool.fork(source, seq, num_tokens)
        self._runner.fork(source, seq, num_tokens)
        return seq

    def reserve(self, seq: int, num_tokens: int) -> bool:
        """Reserve room for tokens to be computed. If there is too little: False, and no change."""
        return self._pool.reserve(seq, num_tokens) is not None

    def commit(self, seq: int, num_computed: int, num_kept: int, path: Sequence[int] | None = None) -> None:
        """The runner appended num_computed tokens; keep the first num_kept. Of a row that ends with a tree, the last of
        them are the nodes of `path`."""
        self._pool.commit(seq, num_kept)
        if path is not None:
            keep_path = self._runner.capabilities.keep_path
            assert keep_path is not None, "a backend that cannot keep a path gets no trees"
            keep_path(seq, self._pool.length(seq) - len(path), path)
            return
        if num_kept < num_computed:
            self._runner.truncate(seq, self._pool.length(seq))

    def advance(self, seq: int, num_tokens: int) -> None:
        """The runner appended num_tokens reserved tokens. Keep them all; the rest stays reserved."""
        self._pool.advance(seq, num_tokens)

    def rewind(self, seq: int, length: int) -> None:
        """Keep the first `length` tokens; free the rest and all reserved tokens."""
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

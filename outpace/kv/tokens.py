"""Counts the cache tokens of each sequence: the accounting of `blocks.py` for single tokens, without block numbers.

    sequence   |--- shared ---|--- its own ---|--- reserved ---|
                spans          committed       allocated, not yet committed

The scheduler needs to know what fits, not where it is, so a step costs a few additions for any sequence length. Tokens
shared by several sequences are counted once, in spans. A prefix is a chain of spans, and a span exists as long as a
sequence or a later span continues from it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Span:
    before: _Span | None
    start: int  # position of its first token
    end: int
    num_holders: int = 1  # sequences and spans that continue from its end


@dataclass(slots=True)
class _Sequence:
    shared: _Span | None = None  # its last span
    num_shared: int = 0
    length: int = 0
    reserved: int = 0


class TokenPool:
    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.num_free = num_tokens
        self._sequences: dict[int, _Sequence] = {}

    @property
    def sequences(self) -> frozenset[int]:
        return frozenset(self._sequences)

    def length(self, seq: int) -> int:
        return self._sequences[seq].length

    def open(self, seq: int) -> None:
        assert seq not in self._sequences, f"sequence {seq} is already open"
        self._sequences[seq] = _Sequence()

    def fork(self, source: int, target: int, num_tokens: int) -> None:
        """Open `target` as the first num_tokens of `source`."""
        origin = self._sequences[source]
        assert num_tokens <= origin.length, "only committed tokens can be shared"
        self.open(target)
        if num_tokens > origin.num_shared:
            origin.shared = _Span(origin.shared, origin.num_shared, num_tokens)
            origin.num_shared = num_tokens
        self._sequences[target] = _Sequence(_acquire(origin.shared, num_tokens), num_tokens, num_tokens)

    def reserve(self, seq: int, num_tokens: int) -> bool:
        """Make room for num_tokens after the committed ones. If the pool has too few: False, and no change."""
        sequence = self._sequences[seq]
        num_new = num_tokens - sequence.reserved
        if num_new > 0:
            if num_new > self.num_free:
                return False
            self.num_free -= num_new
            sequence.reserved = num_tokens
        return True

    def advance(self, seq: int, num_tokens: int) -> None:
        """Commit the first num_tokens of the reserved tokens; the rest stays reserved."""
        sequence = self._sequences[seq]
        assert num_tokens <= sequence.reserved, f"{num_tokens} tokens kept, {sequence.reserved} reserved"
        sequence.length += num_tokens
        sequence.reserved -= num_tokens

    def commit(self, seq: int, num_tokens: int) -> int:
        """Commit the first num_tokens of the reserved tokens and free the rest. Returns the new length."""
        sequence = self._sequences[seq]
        assert num_tokens <= sequence.reserved, f"{num_tokens} tokens kept, {sequence.reserved} reserved"
        self.num_free += sequence.reserved - num_tokens
        sequence.length += num_tokens
        sequence.reserved = 0
        return sequence.length

    def rewind(self, seq: int, length: int) -> None:
        """Free everything after the first `length` tokens."""
        sequence = self._sequences[seq]
        assert length <= sequence.length, "rewinding cannot lengthen a sequence"
        self.num_free += sequence.reserved + sequence.length - max(length, sequence.num_shared)
        sequence.length, sequence.reserved = length, 0
        if length < sequence.num_shared:
            kept = _acquire(sequence.shared, length)
            self._release(sequence.shared)
            sequence.shared, sequence.num_shared = kept, length

    def close(self, seq: int) -> None:
        sequence = self._sequences.pop(seq)
        self.num_free += sequence.reserved + sequence.length - sequence.num_shared
        self._release(sequence.shared)

    def _release(self, span: _Span | None) -> None:
        """Remove one holder of the span; free spans without holders."""
        while span is not None:
            span.num_holders -= 1
            if span.num_holders:
                return
            self.num_free += span.end - span.start
            span = span.before

    def check_integrity(self) -> None:
        """Assert that every token is counted exactly once and that num_holders is right for every span."""
        num_taken = 0
        holders: Counter[_Span] = Counter()
        for seq, sequence in self._sequences.items():
            assert sequence.num_shared == (sequence.shared.end if sequence.shared else 0) <= sequence.length, seq
            num_taken += sequence.length - sequence.num_shared + sequence.reserved
            span = sequence.shared
            while span is not None:
                assert span.start == (span.before.end if span.before else 0) < span.end, "spans do not join"
                holders[span] += 1
                if holders[span] > 1:
                    break  # the spans before it were counted already
                num_taken += span.end - span.start
                span = span.before
        assert all(span.num_holders == count for span, count in holders.items()), "a span's holders were miscounted"
        assert num_taken + self.num_free == self.num_tokens, "tokens were lost or counted twice"


def _acquire(span: _Span | None, end: int) -> _Span | None:
    """Return the span of the chain that ends at `end`, with one more holder; split a span if needed. None for end 0."""
    while span is not None and span.start >= end:
        span = span.before
    if span is not None and span.end > end:
        head = _Span(span.before, span.start, end)
        span.before, span.start = head, end
        span = head
    if span is not None:
        span.num_holders += 1
    return span

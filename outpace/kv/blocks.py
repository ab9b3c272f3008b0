"""A pool of equal blocks with reference counts, and the block table of every sequence.

    table      [ b0 | b1 | b2 | b3 | .. ]
    tokens     |--------- length ---|--- reserved ---|
                committed: kept in the cache          allocated, not yet committed

A sequence grows in three steps: `reserve` allocates (it can fail, and then changes nothing), the backend writes, and
`commit` keeps some of the tokens and frees the rest. `rewind` frees committed tokens. `fork` shares blocks. A block in
several tables is never written: the first write copies it. `tokens.py` does the same accounting for single tokens,
without block numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Copy = tuple[int, int]  # (source block, destination block)


@dataclass(slots=True)
class _Table:
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    reserved: int = 0


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int = 1) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self._tables: dict[int, _Table] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def sequences(self) -> frozenset[int]:
        return frozenset(self._tables)

    def length(self, seq: int) -> int:
        return self._tables[seq].length

    def reserved(self, seq: int) -> int:
        return self._tables[seq].reserved

    def blocks(self, seq: int) -> tuple[int, ...]:
        return tuple(self._tables[seq].blocks)

    def open(self, seq: int) -> None:
        assert seq not in self._tables, f"sequence {seq} is already open"
        self._tables[seq] = _Table()

    def fork(self, source: int, target: int, num_tokens: int) -> None:
        """Open `target` as the first num_tokens of `source`, sharing their blocks."""
        origin = self._tables[source]
        assert num_tokens <= origin.length, "only committed tokens can be shared"
        self.open(target)
        shared = origin.blocks[: self._blocks_for(num_tokens)]
        for block in shared:
            self._refs[block] += 1
        table = self._tables[target]
        table.blocks, table.length = shared, num_tokens

    def reserve(self, seq: int, num_tokens: int) -> list[Copy] | None:
        """Make room for num_tokens after the committed ones. If the pool has too few blocks: None, and no change.

        Returns the block copies that the backend must make before it writes: at most one, of a shared last block.
        """
        table = self._tables[seq]
        blocks, (first_written, num_in_it) = table.blocks, divmod(table.length, self.block_size)
        copies_shared = num_in_it > 0 and num_tokens > 0 and self._refs[blocks[first_written]] > 1
        num_new = -(-(table.length + num_tokens) // self.block_size) - len(blocks)
        copies: list[Copy] = []
        if num_new > 0 or copies_shared:
            if max(num_new, 0) + copies_shared > len(self._free):
                return None
            if copies_shared:
                shared = blocks[first_written]
                blocks[first_written] = self._take()
                self._refs[shared] -= 1
                copies.append((shared, blocks[first_written]))
            for _ in range(num_new):
                blocks.append(self._take())
        if num_tokens > table.reserved:
            table.reserved = num_tokens
        return copies

    def advance(self, seq: int, num_tokens: int) -> None:
        """Commit the first num_tokens of the reserved tokens; the rest stays reserved."""
        table = self._tables[seq]
        assert num_tokens <= table.reserved, f"{num_tokens} tokens kept, {table.reserved} reserved"
        table.length += num_tokens
        table.reserved -= num_tokens

    def commit(self, seq: int, num_tokens: int) -> None:
        """Commit the first num_tokens of the reserved tokens and free the rest."""
        self.advance(seq, num_tokens)
        table = self._tables[seq]
        table.reserved = 0
        self._shrink(table)

    def rewind(self, seq: int, length: int) -> None:
        """Free everything after the first `length` tokens."""
        table = self._tables[seq]
        assert length <= table.length, "rewinding cannot lengthen a sequence"
        table.length, table.reserved = length, 0
        self._shrink(table)

    def close(self, seq: int) -> None:
        table = self._tables.pop(seq)
        for block in reversed(table.blocks):
            self._drop(block)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _shrink(self, table: _Table) -> None:
        keep = self._blocks_for(table.length)
        while len(table.blocks) > keep:
            self._drop(table.blocks.pop())

    def _take(self) -> int:
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def _drop(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)

    def check_integrity(self) -> None:
        """Assert that reference counts match the tables, and that each table has exactly the blocks it needs."""
        refs = [0] * self.num_blocks
        for seq, table in self._tables.items():
            assert len(set(table.blocks)) == len(table.blocks), f"sequence {seq} holds a block twice"
            needed = self._blocks_for(table.length + table.reserved)
            assert len(table.blocks) == needed, f"sequence {seq} holds {len(table.blocks)} blocks, needs {needed}"
            for block in table.blocks:
                refs[block] += 1
        assert refs == self._refs, "reference counts do not match the tables"
        assert sorted(self._free) == [b for b in range(self.num_blocks) if refs[b] == 0], "the free list is wrong"

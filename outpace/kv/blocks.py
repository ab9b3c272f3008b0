"""A pool of equal blocks with reference counts, and the block table of every sequence.

    table      [ b0 | b1 | b2 | b3 | .. ]
    tokens     |--------- length ---|--- reserved ---|
                committed: kept in the cache          allocated, not yet committed

A sequence grows in three steps: `reserve` allocates (it can fail, and then changes nothing), the backend writes, and
`commit` keeps some of the tokens and frees the rest. `rewind` frees committed tokens. `fork` shares blocks. A block in
several tables is never written: the first write copies it. The engine uses blocks of one token to count what fits; a
backend that pages its cache uses larger ones.
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
        table, size = self._tables[seq], self.block_size
        blocks, length = table.blocks, table.length
        first_written = length // size
        copies_shared = length % size > 0 and num_tokens > 0 and self._refs[blocks[first_written]] > 1
        num_new = (length + num_tokens - 1) // size + 1 - len(blocks)
        copies: list[Copy] = []
        if num_new > 0 or copies_shared:
            if max(num_new, 0) + copies_shared > len(self._free):
                return None
            if copies_shared:
                shared = blocks[first_written]
                (blocks[first_written],) = self._take(1)
                self._refs[shared] -= 1
                copies.append((shared, blocks[first_written]))
            if num_new > 0:
                blocks += self._take(num_new)
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
        table = self._tables[seq]
        assert num_tokens <= table.reserved, f"{num_tokens} tokens kept, {table.reserved} reserved"
        self._shrink(table, table.length + num_tokens)

    def rewind(self, seq: int, length: int) -> None:
        """Free everything after the first `length` tokens."""
        table = self._tables[seq]
        assert length <= table.length, "rewinding cannot lengthen a sequence"
        self._shrink(table, length)

    def close(self, seq: int) -> None:
        self._drop(self._tables.pop(seq).blocks)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _shrink(self, table: _Table, length: int) -> None:
        table.length, table.reserved = length, 0
        keep = -(-length // self.block_size)
        if len(table.blocks) > keep:
            self._drop(table.blocks[keep:])
            del table.blocks[keep:]

    def _take(self, count: int) -> list[int]:
        taken = self._free[-count:]
        del self._free[-count:]
        for block in taken:
            self._refs[block] = 1
        return taken

    def _drop(self, blocks: list[int]) -> None:
        refs, free = self._refs, self._free
        for block in blocks:
            refs[block] -= 1
            if not refs[block]:
                free.append(block)

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

"""How a family's checkpoints name their tensors, and where each goes.

Everywhere else tensors have the names of Llama, Qwen3 and Qwen3-MoE, queries, keys and values are matrices of their
own, and the elements of a head that RoPE turns together lie half a head apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from outpace.backends.torch.storage import take_rows
from outpace.backends.torch.storage.stacked import Part
from outpace.errors import ModelError
from outpace.models.architecture import Architecture
from outpace.models.families import Family


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a stored tensor that go to one place."""

    name: str
    begin: int
    end: int


class Naming:
    def __init__(self, family: Family, config: Architecture) -> None:
        self._family = family
        self._config = config
        self._renamed = re.compile("|".join(map(re.escape, sorted(family.names, key=len, reverse=True))))

    def is_ignored(self, name: str) -> bool:
        return name.startswith(self._family.ignored)

    def pieces(self, name: str, shape: tuple[int, ...], source: str) -> list[Piece]:
        """Where the rows of a stored tensor go. Raises ModelError if they are not as many as the config says."""
        own = self._renamed.sub(lambda found: self._family.names[found[0]], name) if self._family.names else name
        num_rows = shape[0] if shape else 0
        module, _, end = own.rpartition(".")
        before, _, kind = module.rpartition(".")
        parts = self._family.fused.get(kind)
        if parts is None:
            return [Piece(own, 0, num_rows)]
        sizes = [self._num_rows(part) for part in parts]
        if sum(sizes) != num_rows:
            raise ModelError(
                f"{source} holds {name} of shape {list(shape)} and its config.json asks for {sum(sizes)} rows; "
                "the files do not belong together, download them again"
            )
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        return [
            Piece(f"{before}.{part}.{end}", begin, begin + size)
            for part, begin, size in zip(parts, begins, sizes, strict=True)
        ]

    def stored(self, name: str) -> str:
        """What the checkpoint would call a tensor that it lacks, for messages."""
        for fused, parts in self._family.fused.items():
            for part in parts:
                name = name.replace(f".{part}.", f".{fused}.")
        table: Mapping[str, str] = {new: old for old, new in self._family.names.items() if "." not in old.strip(".")}
        if not table:
            return name
        pattern = "|".join(map(re.escape, sorted(table, key=len, reverse=True)))
        return re.sub(pattern, lambda found: table[found[0]], name)

    def ordered(self, name: str, part: Part) -> Part:
        """The rows of queries and keys, so that RoPE pairs the halves of a head although it leaves some elements."""
        c = self._config
        if c.num_rotated == c.head_dim or not re.search(r"\.[qk]_proj\.", name):
            return part
        rotated, kept = c.num_rotated // 2, (c.head_dim - c.num_rotated) // 2
        in_head = torch.arange(c.head_dim)
        first, second, third, fourth = in_head.split([rotated, rotated, kept, kept])
        order = torch.cat([first, third, second, fourth])
        heads = torch.arange(part.shape[0] // c.head_dim)[:, None] * c.head_dim
        return take_rows(part, (heads + order).flatten())

    def _num_rows(self, kind: str) -> int:
        c = self._config
        return {"q_proj": c.q_size, "k_proj": c.kv_size, "v_proj": c.kv_size}.get(kind, c.hidden)


def split(tensor: Part, pieces: list[Piece]) -> Iterator[tuple[str, Part]]:
    """Views of a stored tensor's parts."""
    for piece in pieces:
        if len(pieces) == 1:
            yield piece.name, tensor
        elif isinstance(tensor, torch.Tensor):
            yield piece.name, tensor[piece.begin : piece.end]
        else:
            yield piece.name, tensor.rows(piece.begin, piece.end)

"""A fused matrix whose rows are stored in several formats, such as the 4 and 6 bits of a GGUF's queries and values."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from outpace.backends.torch.storage.planar import Planar
from outpace.backends.torch.storage.scaled import Scaled

Part = Tensor | Planar | Scaled


@dataclass(frozen=True, slots=True)
class Stacked:
    parts: tuple[Part, ...]  # from the first row to the last

    @property
    def ends(self) -> list[int]:
        """The row after each part."""
        return list(accumulate(part.shape[0] for part in self.parts))

    @property
    def shape(self) -> tuple[int, int]:
        return self.ends[-1], self.parts[0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def numel(self) -> int:
        return sum(part.numel() for part in self.parts)

    def rows(self, begin: int, end: int) -> Part:
        """A view of some rows of one part."""
        number = next(i for i, part_end in enumerate(self.ends) if begin < part_end)
        part, first = self.parts[number], self.ends[number] - self.parts[number].shape[0]
        assert end <= self.ends[number], "the rows belong to two parts"
        return part[begin - first : end - first] if isinstance(part, Tensor) else part.rows(begin - first, end - first)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        return torch.cat(
            [part.to(dtype) if isinstance(part, Tensor) else part.dequantise(dtype) for part in self.parts]
        )

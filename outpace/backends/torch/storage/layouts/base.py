"""What all layouts share: the interface, and nibbles in words of 32 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from outpace.backends.torch.storage import Format
from outpace.backends.torch.storage.planar import Planar, int4, pack
from outpace.backends.torch.storage.stacked import Part
from outpace.models.hf_quantization import StoredQuantization

Header = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor
WHOLE_ROW = 128  # a scale for a whole row is repeated for groups of so many columns


class MatrixLayout(Protocol):
    @property
    def main(self) -> str:
        """The tensor whose presence makes a module quantised, in place of its `weight`."""
        ...

    @property
    def others(self) -> tuple[str, ...]:
        """Further tensors of it that are read; some may be absent."""
        ...

    @property
    def ignored(self) -> tuple[str, ...]:
        """Those that are not read."""
        ...

    def shape(self, main: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of the matrix, from the shape of the main tensor."""
        ...

    def format(self, headers: Mapping[str, Header]) -> Format:
        """How the matrix is kept, given its tensors' headers by their endings."""
        ...

    def read(self, tensors: Mapping[str, Tensor]) -> Part: ...


def nibbles(words: Tensor, dim: int, order: Sequence[int] = range(8)) -> Tensor:
    """Eight codes of each word, along a dimension; `order[i]`: the place of the word's i-th nibble."""
    if words.dtype != torch.int32 or words.dim() != 2:
        raise ValueError(f"codes as {words.dtype} of shape {list(words.shape)}, not words of 32 bits")
    shifts = torch.tensor([4 * list(order).index(place) for place in range(8)], dtype=torch.int32, device=words.device)
    codes = ((words.unsqueeze(-1) >> shifts) & 0xF).to(torch.uint8)
    codes = codes.movedim(-1, dim + 1)
    return codes.flatten(dim, dim + 1)


def four_bits(stored: StoredQuantization, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Planar:
    """From codes [rows, columns], and scales and zero points [rows, groups]."""
    group = stored.group or WHOLE_ROW
    num_groups = -(-codes.shape[1] // group)
    expected = (len(codes), num_groups if stored.group else 1)
    for each in (scales, zeros):
        if each is not None and tuple(each.shape) != expected:
            raise ValueError(f"groups of shape {list(each.shape)} where {list(expected)} is expected")
    if stored.group is None:
        scales, zeros = scales.expand(-1, num_groups), None if zeros is None else zeros.expand(-1, num_groups)
    return pack(int4(group, has_zeros=zeros is not None, scale_dtype=scales.dtype), codes, scales, zeros)


def four_bit_format(stored: StoredQuantization, scale_dtype: torch.dtype, *, has_zeros: bool) -> Format:
    return int4(stored.group or WHOLE_ROW, has_zeros=has_zeros, scale_dtype=scale_dtype)

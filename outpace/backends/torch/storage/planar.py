"""Weights of 4 to 8 bits in groups along a row, in the order in which the matrix units take them.

    weight[n, k] = scale[group of k, n] * (code[n, k] - zero) - minimum[group of k, n]

A row is cut into chunks, a chunk into planes of neighbouring columns. A unit of 16 bits holds one code of each plane:
four codes of 4 bits, or two of 8. A kernel then unpacks a plane by one shift and one mask, without moving values
between threads. Codes of 5 and 6 bits have their upper bits in bytes beside the units. Units lie chunk after chunk, so
the units of neighbouring rows are contiguous. A row's scales of a chunk lie together too, and are loaded as one word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

_UNIT_BITS = 16
_WORD_BYTES = 8  # most that a row's scales of a chunk take together
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class PlanarFormat:
    """How codes become weights. `has_blocks`: scales and minima are integers, times a float of their block."""

    name: str
    bits: int
    group: int  # columns that share a scale
    plane: int = 32  # columns
    zero: int = 0  # subtracted from every code
    has_minima: bool = False
    has_zeros: bool = False  # the minima are stored as a zero point for each group, times the scale
    has_blocks: bool = False
    block: int = 256
    is_fp8: bool = False  # the codes are numbers: e4m3
    scale_dtype: torch.dtype = torch.float16  # without blocks

    @property
    def low_bits(self) -> int:
        return 8 if self.bits == 8 else 4

    @property
    def high_bits(self) -> int:
        return self.bits - self.low_bits

    @property
    def num_planes(self) -> int:
        return _UNIT_BITS // self.low_bits

    @property
    def chunk(self) -> int:
        """Columns of a chunk."""
        return self.num_planes * self.plane

    @property
    def chunks_per_byte(self) -> int:
        """Chunks whose upper bits share a byte."""
        return 8 // (self.high_bits * self.num_planes) if self.high_bits else 1

    @property
    def scales_per_word(self) -> int:
        """Groups of a chunk whose scales lie together."""
        itemsize = 1 if self.has_blocks else self.scale_dtype.itemsize
        return max(1, min(self.chunk // self.group, _WORD_BYTES // itemsize))

    @property
    def quantum(self) -> int:
        """Rows are padded to a multiple of this many columns."""
        return max(self.chunk * self.chunks_per_byte, self.group, self.block if self.has_blocks else 0)


def int4(group: int, *, has_zeros: bool = False, scale_dtype: torch.dtype = torch.float16) -> PlanarFormat:
    name = f"int4 in groups of {group}{' with zero points' if has_zeros else ''}"
    zero = 0 if has_zeros else 8
    return PlanarFormat(
        name, 4, group, zero=zero, has_minima=has_zeros, has_zeros=has_zeros, scale_dtype=scale_dtype
    )  # fmt: skip


def fp8(group: int, *, scale_dtype: torch.dtype = torch.float16) -> PlanarFormat:
    """Groups of columns in a row; a checkpoint whose groups are blocks of rows and columns repeats their scales."""
    return PlanarFormat(f"FP8 in groups of {group}", 8, group, is_fp8=True, scale_dtype=scale_dtype)


Q4_0 = PlanarFormat("Q4_0", 4, 32, zero=8)
Q4_1 = PlanarFormat("Q4_1", 4, 32, has_minima=True)
Q8_0 = PlanarFormat("Q8_0", 8, 32, zero=128)
Q4_K = PlanarFormat("Q4_K", 4, 32, has_minima=True, has_blocks=True)
Q5_K = PlanarFormat("Q5_K", 5, 32, has_minima=True, has_blocks=True)
Q6_K = PlanarFormat("Q6_K", 6, 16, plane=16, zero=32, has_blocks=True)


@dataclass(frozen=True, slots=True)
class Planar:
    """A stored matrix of `num_columns` columns. The second dimension of every tensor is the rows."""

    format: PlanarFormat
    num_columns: int
    units: Tensor  # int16 [chunks, rows, plane]
    high: Tensor | None  # uint8 [chunks / chunks per byte, rows, plane]
    scales: Tensor  # [words, rows, scales per word], by groups
    minima: Tensor | None  # the same; zero points if the format has them
    block_scales: Tensor | None  # [blocks, rows]
    block_minima: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.units.shape[1], self.num_columns

    @property
    def device(self) -> torch.device:
        return self.units.device

    @property
    def tensors(self) -> list[Tensor]:
        found = (self.units, self.high, self.scales, self.minima, self.block_scales, self.block_minima)
        return [tensor for tensor in found if tensor is not None]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def rows(self, begin: int, end: int) -> Planar:
        """A view of some rows."""
        return self._changed(lambda tensor: tensor[:, begin:end])

    def take_rows(self, order: Tensor) -> Planar:
        """A copy with the rows in another order."""
        return self._changed(lambda tensor: tensor[:, order])

    def _changed(self, change: Callable[[Tensor], Tensor]) -> Planar:
        changes = {
            field.name: change(value)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **changes)  # type: ignore[arg-type]

    def columns(self, begin: int, end: int) -> Planar:
        """A view of some columns; both ends are multiples of the format's quantum."""
        f = self.format
        assert begin % f.quantum == end % f.quantum == 0, "the columns divide a chunk, a group or a block"

        def cut(tensor: Tensor | None, size: int) -> Tensor | None:
            return None if tensor is None else tensor[begin // size : end // size]

        word = f.group * f.scales_per_word
        units, scales = cut(self.units, f.chunk), cut(self.scales, word)
        assert units is not None and scales is not None
        return Planar(
            f, end - begin, units, cut(self.high, f.chunk * f.chunks_per_byte), scales, cut(self.minima, word),
            cut(self.block_scales, f.block), cut(self.block_minima, f.block),
        )  # fmt: skip

    def copy_(self, other: Planar) -> None:
        assert self.format == other.format and self.shape == other.shape
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine.copy_(theirs)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """[rows, columns]: the reference of the kernels."""
        f, num_rows = self.format, self.shape[0]
        codes = self._codes()  # [padded columns, rows]
        codes = codes.to(torch.uint8).view(FP8).float() if f.is_fp8 else codes.float() - f.zero
        scales = self._by_group(self.scales)
        minima = None if self.minima is None else self._by_group(self.minima)
        if f.has_zeros and minima is not None:
            minima = minima * scales
        if self.block_scales is not None:
            scales = scales * self.block_scales.float().repeat_interleave(f.block // f.group, 0)
        if self.block_minima is not None and minima is not None:
            minima = minima * self.block_minima.float().repeat_interleave(f.block // f.group, 0)
        groups = codes.view(-1, f.group, num_rows) * scales[:, None]
        if minima is not None:
            groups = groups - minima[:, None]
        return groups.reshape(-1, num_rows)[: self.num_columns].T.to(dtype).contiguous()

    def _by_group(self, words: Tensor) -> Tensor:
        """[groups, rows] in float32."""
        return words.float().transpose(1, 2).reshape(-1, self.shape[0])

    def _codes(self) -> Tensor:
        f = self.format
        units = self.units.to(torch.int32)
        planes = []
        for j in range(f.num_planes):
            code = (units >> (f.low_bits * j)) & ((1 << f.low_bits) - 1)
            if self.high is not None:
                high = self.high.to(torch.int32).repeat_interleave(f.chunks_per_byte, 0)
                chunk = torch.arange(len(units), device=units.device)[:, None, None] % f.chunks_per_byte
                shift = (chunk * f.num_planes + j) * f.high_bits
                code = code | (((high >> shift) & ((1 << f.high_bits) - 1)) << f.low_bits)
            planes.append(code)
        # [chunks, planes, rows, plane] to [columns, rows]
        return torch.stack(planes, 1).transpose(2, 3).reshape(-1, units.shape[1])


def pack(
    format: PlanarFormat,
    codes: Tensor,
    scales: Tensor,
    minima: Tensor | None = None,
    block_scales: Tensor | None = None,
    block_minima: Tensor | None = None,
) -> Planar:
    """From codes [rows, columns], before the zero is subtracted, and parameters [rows, groups] or [rows, blocks]."""
    f, (num_rows, num_columns) = format, codes.shape
    padded = -(-num_columns // f.quantum) * f.quantum
    codes = torch.nn.functional.pad(codes.to(torch.int32), (0, padded - num_columns))
    by_plane = codes.view(num_rows, -1, f.num_planes, f.plane).permute(1, 2, 0, 3)  # [chunks, planes, rows, plane]
    low_mask = (1 << f.low_bits) - 1
    units = torch.zeros(by_plane.shape[0], num_rows, f.plane, dtype=torch.int32, device=codes.device)
    for j in range(f.num_planes):
        units |= (by_plane[:, j] & low_mask) << (f.low_bits * j)
    high = None
    if f.high_bits:
        high = torch.zeros(len(units) // f.chunks_per_byte, *units.shape[1:], dtype=torch.int32, device=codes.device)
        for part in range(f.chunks_per_byte):
            for j in range(f.num_planes):
                upper = by_plane[part :: f.chunks_per_byte, j] >> f.low_bits
                high |= upper << ((part * f.num_planes + j) * f.high_bits)
        high = high.to(torch.uint8)

    def across(values: Tensor | None, columns: int) -> Tensor | None:
        """[rows, groups] to [groups, rows]; zeros for padding."""
        if values is None:
            return None
        return torch.nn.functional.pad(values.T, (0, 0, 0, padded // columns - values.shape[1])).contiguous()

    def in_words(values: Tensor | None) -> Tensor | None:
        made = across(values, f.group)
        return None if made is None else made.view(-1, f.scales_per_word, num_rows).transpose(1, 2).contiguous()

    made = in_words(scales)
    assert made is not None
    signed = (units ^ 0x8000) - 0x8000  # the same 16 bits as a signed number
    return Planar(
        f, num_columns, signed.to(torch.int16), high, made, in_words(minima), across(block_scales, f.block),
        across(block_minima, f.block),
    )  # fmt: skip


def allocate(format: PlanarFormat, num_rows: int, num_columns: int, device: torch.device) -> Planar:
    """Uninitialised memory for a matrix."""
    f = format
    padded = -(-num_columns // f.quantum) * f.quantum

    def room(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    chunks, blocks = padded // f.chunk, padded // f.block
    words = (padded // (f.group * f.scales_per_word), num_rows, f.scales_per_word)
    small = (torch.int8 if f.bits == 6 else torch.uint8) if f.has_blocks else f.scale_dtype
    return Planar(
        f, num_columns, room(torch.int16, chunks, num_rows, f.plane),
        room(torch.uint8, chunks // f.chunks_per_byte, num_rows, f.plane) if f.high_bits else None,
        room(small, *words),
        room(torch.uint8 if f.has_zeros else small, *words) if f.has_minima else None,
        room(torch.float16, blocks, num_rows) if f.has_blocks else None,
        room(torch.float16, blocks, num_rows) if f.has_blocks and f.has_minima else None,
    )  # fmt: skip

"""Unpacks ggml's block formats on the device that holds the bytes: to float32, or to planar weights without loss.

Written in torch and not taken from the `gguf` package, because a GPU unpacks a billion weights in little time, and
because nothing else needs that package at run time. Each function takes blocks as [num_blocks, bytes of a block].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.backends.torch import storage
from outpace.backends.torch.storage import planar
from outpace.backends.torch.storage.planar import Planar, PlanarFormat, pack
from outpace.models.gguf_header import BLOCK_SIZES


@dataclass(frozen=True, slots=True)
class _Codes:
    """The contents of blocks: (codes - zero) * scales * block_scales - minima * block_minima."""

    codes: Tensor  # uint8 [num_blocks, elements of a block]
    scales: Tensor  # [num_blocks, groups of a block]
    minima: Tensor | None = None  # the same
    block_scales: Tensor | None = None  # [num_blocks, 1]
    block_minima: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Kind:
    format: PlanarFormat
    unpack: Callable[[Tensor], _Codes]
    is_kept: bool = True  # there is a kernel for it

    def dequantise(self, blocks: Tensor) -> Tensor:
        found = self.unpack(blocks)
        scales, minima = found.scales.float(), None if found.minima is None else found.minima.float()
        if found.block_scales is not None:
            scales = scales * found.block_scales.float()
        if minima is not None and found.block_minima is not None:
            minima = minima * found.block_minima.float()
        groups = found.codes.view(len(blocks), -1, self.format.group).float() - self.format.zero
        values = groups * scales[..., None]
        return values if minima is None else values - minima[..., None]


def can_dequantise(kind: int) -> bool:
    return kind in _FLOATS or kind in _KINDS


def dequantise(data: Tensor, kind: int) -> Tensor:
    """The values of a tensor's bytes, flat, in float32."""
    if kind in _FLOATS:
        return data.contiguous().view(-1).view(_FLOATS[kind]).float()
    return _KINDS[kind].dequantise(data.view(-1, BLOCK_SIZES[kind][1])).reshape(-1)


def planar_format(kind: int) -> PlanarFormat | None:
    """The format that holds such blocks without any loss; None if no kernel reads it."""
    found = _KINDS.get(kind)
    return found.format if found is not None and found.is_kept else None


def as_planar(data: Tensor, kind: int, columns: int) -> Planar:
    """The matrix of these bytes, uint8 [rows, bytes of a row]."""
    found = _KINDS[kind]
    made = planar.allocate(found.format, len(data), columns, data.device)
    for begin, end in storage.slabs(len(data), columns):
        rows = end - begin
        unpacked = found.unpack(data[begin:end].reshape(-1, BLOCK_SIZES[kind][1]))
        parts = (unpacked.codes, unpacked.scales, unpacked.minima, unpacked.block_scales, unpacked.block_minima)
        codes, scales, *others = [None if part is None else part.reshape(rows, -1) for part in parts]
        assert codes is not None and scales is not None
        made.rows(begin, end).copy_(pack(found.format, codes, scales, *others))
    return made


def _halves(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16)  # [num_blocks, 1]


def _nibbles(packed: Tensor) -> Tensor:
    """Low halves of all bytes, then high halves: [.., n] to [.., 2n]."""
    return torch.cat([packed & 0xF, packed >> 4], dim=-1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """A word of 32 bits, one per element, moved to where the fifth bit belongs."""
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks[:, at : at + 4, None] >> bits) & 1).reshape(len(blocks), 32) << 4


def _q4_0(b: Tensor) -> _Codes:
    return _Codes(_nibbles(b[:, 2:18]), _halves(b, 0))


def _q4_1(b: Tensor) -> _Codes:
    return _Codes(_nibbles(b[:, 4:20]), _halves(b, 0), -_halves(b, 2))


def _q5_0(b: Tensor) -> _Codes:
    return _Codes(_nibbles(b[:, 6:22]) | _fifth_bits(b, 2), _halves(b, 0))


def _q5_1(b: Tensor) -> _Codes:
    return _Codes(_nibbles(b[:, 8:24]) | _fifth_bits(b, 4), _halves(b, 0), -_halves(b, 2))


def _q8_0(b: Tensor) -> _Codes:
    return _Codes(b[:, 2:34] ^ 0x80, _halves(b, 0))  # signed bytes, plus 128


def _k_codes(b: Tensor, codes: Tensor) -> _Codes:
    """Scales and minima of a super-block's eight parts have six bits each, in bytes 4 to 16."""
    low, middle, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat([low & 63, (high & 0xF) | ((low >> 6) << 4)], dim=1)
    minima = torch.cat([middle & 63, (high >> 4) | ((middle >> 6) << 4)], dim=1)
    return _Codes(codes.reshape(len(b), 256), scales, minima, _halves(b, 0), _halves(b, 2))


def _q4_k(b: Tensor) -> _Codes:
    return _k_codes(b, _nibbles(b[:, 16:144].reshape(-1, 4, 32)))


def _q5_k(b: Tensor) -> _Codes:
    parts = torch.arange(8, dtype=torch.uint8, device=b.device)[:, None]
    fifth = ((b[:, None, 16:48] >> parts) & 1) << 4
    return _k_codes(b, _nibbles(b[:, 48:176].reshape(-1, 4, 32)).reshape(-1, 8, 32) | fifth)


def _q6_k(b: Tensor) -> _Codes:
    low = _nibbles(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=b.device)[:, None]
    high = ((b[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4
    scales = b[:, 192:208].contiguous().view(torch.int8)  # one per 16 elements
    return _Codes((low | high).reshape(len(b), 256), scales, block_scales=_halves(b, 208))


_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_KINDS = {
    2: _Kind(planar.Q4_0, _q4_0),
    3: _Kind(planar.Q4_1, _q4_1),
    6: _Kind(PlanarFormat("Q5_0", 5, 32, zero=16), _q5_0, is_kept=False),
    7: _Kind(PlanarFormat("Q5_1", 5, 32, has_minima=True), _q5_1, is_kept=False),
    8: _Kind(planar.Q8_0, _q8_0),
    12: _Kind(planar.Q4_K, _q4_k),
    13: _Kind(planar.Q5_K, _q5_k),
    14: _Kind(planar.Q6_K, _q6_k),
}

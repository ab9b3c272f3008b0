"""Dequantises ggml's block formats to float32, on the device that holds the bytes.

Written in torch and not taken from the `gguf` package, because a GPU unpacks a billion weights in little time, and
because nothing else needs that package at run time. Each function takes blocks as [num_blocks, bytes of a block].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outpace.models.gguf_header import BLOCK_SIZES


def can_dequantise(kind: int) -> bool:
    return kind in _UNPACK


def dequantise(data: Tensor, kind: int) -> Tensor:
    """The values of a tensor's bytes, flat, in float32."""
    return _UNPACK[kind](data.view(-1, BLOCK_SIZES[kind][1])).reshape(-1)


def _halves(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()  # [num_blocks, 1]


def _nibbles(packed: Tensor) -> Tensor:
    """Low halves of all bytes, then high halves: [.., n] to [.., 2n]."""
    return torch.cat([packed & 0xF, packed >> 4], dim=-1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """A word of 32 bits, one per element, moved to where the fifth bit belongs."""
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks[:, at : at + 4, None] >> bits) & 1).reshape(len(blocks), 32) << 4


def _q4_0(b: Tensor) -> Tensor:
    return _halves(b, 0) * (_nibbles(b[:, 2:18]).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return _halves(b, 0) * _nibbles(b[:, 4:20]).float() + _halves(b, 2)


def _q5_0(b: Tensor) -> Tensor:
    return _halves(b, 0) * ((_nibbles(b[:, 6:22]) | _fifth_bits(b, 2)).float() - 16)


def _q5_1(b: Tensor) -> Tensor:
    return _halves(b, 0) * (_nibbles(b[:, 8:24]) | _fifth_bits(b, 4)).float() + _halves(b, 2)


def _q8_0(b: Tensor) -> Tensor:
    return _halves(b, 0) * b[:, 2:34].contiguous().view(torch.int8).float()


def _k_scales(b: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of a super-block's eight parts, six bits each, in bytes 4 to 16: [num_blocks, 8, 1]."""
    low, middle, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat([low & 63, (high & 0xF) | ((low >> 6) << 4)], dim=1)
    minima = torch.cat([middle & 63, (high >> 4) | ((middle >> 6) << 4)], dim=1)
    return (_halves(b, 0) * scales.float())[..., None], (_halves(b, 2) * minima.float())[..., None]


def _q4_k(b: Tensor) -> Tensor:
    scales, minima = _k_scales(b)
    codes = _nibbles(b[:, 16:144].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return scales * codes.float() - minima


def _q5_k(b: Tensor) -> Tensor:
    scales, minima = _k_scales(b)
    parts = torch.arange(8, dtype=torch.uint8, device=b.device)[:, None]
    fifth = ((b[:, None, 16:48] >> parts) & 1) << 4
    codes = _nibbles(b[:, 48:176].reshape(-1, 4, 32)).reshape(-1, 8, 32) | fifth
    return scales * codes.float() - minima


def _q6_k(b: Tensor) -> Tensor:
    scales = _halves(b, 208) * b[:, 192:208].contiguous().view(torch.int8).float()  # one per 16 elements
    low = _nibbles(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=b.device)[:, None]
    high = ((b[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4
    codes = (low | high).reshape(-1, 16, 16).float() - 32
    return scales[..., None] * codes


_UNPACK: dict[int, Callable[[Tensor], Tensor]] = {
    0: lambda b: b.contiguous().view(torch.float32),
    1: lambda b: b.contiguous().view(torch.float16).float(),
    30: lambda b: b.contiguous().view(torch.bfloat16).float(),
    2: _q4_0,
    3: _q4_1,
    6: _q5_0,
    7: _q5_1,
    8: _q8_0,
    12: _q4_k,
    13: _q5_k,
    14: _q6_k,
}

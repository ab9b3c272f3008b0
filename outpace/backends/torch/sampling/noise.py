"""`outpace.decoding.randomness` in torch: the same numbers, bit for bit, for many addresses at once.

Torch has no unsigned 64-bit arithmetic. Two's complement works instead: products and sums wrap to the same bits, and
clearing the copies of the sign makes a right shift logical. A seed above 2**63 is therefore passed as `signed(seed)`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.backends.torch.sampling.numerics import minus_log
from outpace.decoding.randomness import Purpose


def signed(word: int) -> int:
    """An unsigned 64-bit word as the signed one with the same bits."""
    return word - (1 << 64) if word >= 1 << 63 else word


_GOLDEN = signed(0x9E3779B97F4A7C15)
_FIRST = signed(0xBF58476D1CE4E5B9)
_SECOND = signed(0x94D049BB133111EB)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


# Computed once, so that no step launches kernels for constants.
_PURPOSE_WORDS = {purpose: int(_mix(torch.tensor(int(purpose)) + _GOLDEN)) for purpose in Purpose}


def keys(seed: Tensor, purpose: Purpose, *place: Tensor) -> Tensor:
    """`randomness.key` for int64 tensors that broadcast together."""
    k = _mix(_mix(seed + _GOLDEN) + _GOLDEN)
    k = _mix((k ^ _PURPOSE_WORDS[purpose]) + _GOLDEN)
    for word in place:
        k = _mix((k ^ _mix(word + _GOLDEN)) + _GOLDEN)
    return k


def uniforms(k: Tensor, index: Tensor | int = 0) -> Tensor:
    """`randomness.uniform`: float64, strictly between 0 and 1."""
    step = signed((index + 1) * 0x9E3779B97F4A7C15 % 2**64) if isinstance(index, int) else (index + 1) * _GOLDEN
    return (_shifted(_mix(k + step), 12).double() + 0.5) * 2.0**-52


def exponentials(k: Tensor, index: Tensor | int = 0) -> Tensor:
    """`randomness.exponentials`."""
    return minus_log(uniforms(k, index))

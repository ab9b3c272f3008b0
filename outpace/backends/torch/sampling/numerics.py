"""`outpace.decoding.numerics` in torch: the same IEEE operations in the same order for every row, and so the same bits.

Operations run one by one here, without fusion. Do not pass these functions to a compiler that fuses operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.decoding import numerics


def powers_of_two(x: Tensor) -> Tensor:
    """2^x for float32 x <= 0; 0 if x is too small."""
    x = x.clamp(min=numerics.SMALLEST_POWER)
    scale = x + numerics.ROUNDER.item()
    power = scale - numerics.ROUNDER.item()
    x = x - power
    power = x * numerics.EXP2_SHIFTED[0].item()
    for coefficient in numerics.EXP2_SHIFTED[1:]:
        power = (power + coefficient.item()) * x
    return (power + numerics.SHIFT.item()) * (scale.view(torch.int32) << 23).view(torch.float32)


def minus_log(u: Tensor) -> Tensor:
    """-log(u) for float64 0 < u < 1."""
    m, exponent = torch.frexp(u)
    t = (1.0 - m) / (m + 1.0)
    z = t * t
    r = z * numerics.LOG[-1]
    for coefficient in numerics.LOG[-2::-1]:
        r = (r + coefficient) * z
    return (r + 2.0) * t + exponent.double() * -numerics.LN_2


def total(x: Tensor) -> Tensor:
    """The sum over the last dimension: adds the second half to the first while many are left, then one by one."""
    n = x.shape[-1]
    while n > numerics.FEW:
        half = (n + 1) // 2
        folded = x[..., :half].clone()
        folded[..., : n - half] += x[..., half:n]
        x, n = folded, half
    sums = x[..., 0]
    for i in range(1, n):
        sums = sums + x[..., i]
    return sums

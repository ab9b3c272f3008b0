"""Sums, powers and logarithms as fixed sequences of IEEE operations: the same bits on every machine, in every language.

A library's own `exp`, `log` and `sum` round differently from one version, processor or language to the next. Where they
decide a token, that would let a seeded request say something else elsewhere, or let two implementations of one rule
disagree. What is here uses only additions, multiplications, divisions and exact conversions, none fused, in an order
that is written down; `backends/native/csrc/numerics.h` and the torch backend's `device_numerics.py` and
`kernels/numerics.py` are the same, line by line, and tests compare the bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LOG2_E = 1.4426950408889634

# 2^f = 1 + f * q(f) for |f| <= 1/2: minimax in relative error, 2e-7 with float32's own rounding included.
_EXP2 = (0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.0013264723820611835)
# Smaller powers are zero. What is left stays clear of subnormal numbers, also when it is normalised: some libraries
# make threads flush those to zero.
SMALLEST_POWER = -100
# Adding this to a float32 rounds it to a whole number, whose distance from the smallest power is then in the low bits.
ROUNDER = np.float32(1.5 * 2**23 - SMALLEST_POWER)
SHIFT = np.float32(2.0 ** (SMALLEST_POWER + 127))  # what those bits, read as an exponent, are too small by
EXP2_SHIFTED = tuple(np.float32(c) * SHIFT for c in reversed(_EXP2))

# -log(m) = t * (2 + z * r(z)), t = (1 - m) / (1 + m), z = t * t, for m in [1/2, 1): to 2e-16.
LOG = (
    0.6666666666666697, 0.39999999999560126, 0.285714286766617, 0.2222221255789046, 0.1818226110953518,
    0.1537327485849474, 0.13502342634960693, 0.10322668476649235, 0.1687070225687526,
)  # fmt: skip
LN_2 = 0.6931471805599453
FEW = 32  # numbers to be added one after the other


def powers_of_two(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """2^x for x <= 0, which it overwrites; 2^0 is exactly 1, and nearer to 2^SMALLEST_POWER than to twice that is 0."""
    if x.min() < SMALLEST_POWER:  # finding out takes a sixth of the time of doing it
        np.maximum(x, np.float32(SMALLEST_POWER), out=x)
    scale = x + ROUNDER
    power = scale - ROUNDER
    x -= power
    np.multiply(x, EXP2_SHIFTED[0], out=power)
    for coefficient in EXP2_SHIFTED[1:]:
        power += coefficient
        power *= x
    power += SHIFT
    exponents = scale.view(np.int32)
    np.left_shift(exponents, 23, out=exponents)
    power *= scale
    return power


def minus_log(u: NDArray[np.float64]) -> NDArray[np.float64]:
    """-log(u) for 0 < u < 1, above zero."""
    m, exponent = np.frexp(u)
    t = 1.0 - m
    m += 1.0
    t /= m
    z = t * t
    r = z * LOG[-1]
    for coefficient in LOG[-2::-1]:
        r += coefficient
        r *= z
    r += 2.0
    r *= t
    r += exponent * -LN_2
    return r


def total(x: NDArray[Any]) -> Any:
    """The sum: the second half is added to the first until few numbers are left, and those one after the other."""
    n = x.size
    if n > FEW:
        half = (n + 1) // 2
        sums = x[:half].copy()
        sums[: n - half] += x[half:]
        n = half
        while n > FEW:
            half = (n + 1) // 2
            sums[: n - half] += sums[half:n]
            n = half
        x = sums[:n]
    return np.add.accumulate(x)[-1]

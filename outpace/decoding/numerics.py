"""Sums, powers and logarithms as fixed sequences of IEEE operations: the same bits on every machine, in every language.

A library's `exp`, `log` and `sum` round differently between versions, processors and languages. A seeded request could
then emit other tokens on another machine, or two implementations of one rule could disagree. This module uses only
additions, multiplications, divisions and exact conversions, never fused, in a fixed order. The native backend's
`csrc/numerics.h` and the torch backend's `sampling/numerics.py` and `kernels/numerics.py` do the same, line by line;
tests compare the bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LOG2_E = 1.4426950408889634

# 2^f = 1 + f * q(f) for |f| <= 1/2: minimax in relative error, 2e-7 with float32's own rounding included.
_EXP2 = (0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.0013264723820611835)
# Smaller powers are zero. The others never become subnormal, even when normalised: some libraries make threads flush
# subnormals to zero.
SMALLEST_POWER = -100
# Adding this to a float32 rounds it to an integer. The low bits then hold that integer minus SMALLEST_POWER.
ROUNDER = np.float32(1.5 * 2**23 - SMALLEST_POWER)
SHIFT = np.float32(2.0 ** (SMALLEST_POWER + 127))  # the exponent made of those bits is too small by this factor
EXP2_SHIFTED = tuple(np.float32(c) * SHIFT for c in reversed(_EXP2))

# -log(m) = t * (2 + z * r(z)), t = (1 - m) / (1 + m), z = t * t, for m in [1/2, 1): to 2e-16.
LOG = (
    0.6666666666666697, 0.39999999999560126, 0.285714286766617, 0.2222221255789046, 0.1818226110953518,
    0.1537327485849474, 0.13502342634960693, 0.10322668476649235, 0.1687070225687526,
)  # fmt: skip
LN_2 = 0.6931471805599453
FEW = 32  # this many numbers are added one by one


def powers_of_two(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """2^x for x <= 0; overwrites x. 2^0 is exactly 1; x that rounds to SMALLEST_POWER or less gives 0."""
    if x.min() < SMALLEST_POWER:  # this check takes a sixth of the clamp's time
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
    """-log(u) for 0 < u < 1; the result is above zero."""
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
    """The sum: add the second half to the first until at most FEW numbers are left, then add those one by one."""
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

"""`decoding/numerics.py` and the noise of `decoding/randomness.py` in Triton: the same operations, so the same bits.

Launch kernels that use these with UNFUSED; else the compiler fuses products and sums.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from outpace.decoding import numerics

_SMALLEST = tl.constexpr(float(numerics.SMALLEST_POWER))
_ROUNDER = tl.constexpr(float(numerics.ROUNDER))
_SHIFT = tl.constexpr(float(numerics.SHIFT))
_E4, _E3, _E2, _E1, _E0 = (tl.constexpr(float(c)) for c in numerics.EXP2_SHIFTED)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = (tl.constexpr(c) for c in numerics.LOG)
_LN_2 = tl.constexpr(numerics.LN_2)
FEW = numerics.FEW
UNFUSED: dict[str, Any] = {"enable_fp_fusion": False}

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def powers_of_two(x):
    x = tl.maximum(x, _SMALLEST)
    scale = x + _ROUNDER
    x = x - (scale - _ROUNDER)
    power = x * _E4
    power = (power + _E3) * x
    power = (power + _E2) * x
    power = (power + _E1) * x
    power = (power + _E0) * x
    return (power + _SHIFT) * (scale.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _double(value, like):
    """A float64 constant: Triton would first round a Python number to float32."""
    return tl.full(like.shape, value, tl.float64)


@triton.jit
def minus_log(u):
    bits = u.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) - 1022).to(tl.float64)
    m = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    one = _double(1.0, u)
    t = (one - m) / (m + one)
    z = t * t
    r = z * _double(_L8, u)
    r = (r + _double(_L7, u)) * z
    r = (r + _double(_L6, u)) * z
    r = (r + _double(_L5, u)) * z
    r = (r + _double(_L4, u)) * z
    r = (r + _double(_L3, u)) * z
    r = (r + _double(_L2, u)) * z
    r = (r + _double(_L1, u)) * z
    r = (r + _double(_L0, u)) * z
    return (r + _double(2.0, u)) * t + exponent * _double(-_LN_2, u)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit
def noise_key(seed, PURPOSE: tl.constexpr, position):
    """`randomness.key`; seed and position are uint64."""
    k = _mix(_mix(seed + _GOLDEN) + _GOLDEN)
    k = _mix((k ^ _mix(seed * 0 + PURPOSE + _GOLDEN)) + _GOLDEN)
    return _mix((k ^ _mix(position + _GOLDEN)) + _GOLDEN)


@triton.jit
def exponential_noise(k, index):
    x = _mix(k + (index + 1) * _GOLDEN) >> 12
    return minus_log((x.to(tl.float64) + _double(0.5, x)) * _double(2.220446049250313e-16, x))

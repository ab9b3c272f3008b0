"""Keys and values rounded to 8 bits, each head of a token by its largest value: `storage/scaled.round_to_scaled`.

The same operations, so the same bits, whichever kernel writes a token.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TINY = tl.constexpr(2.0**-126)  # the smallest normal float32: the scale of zeros
_ROUNDER = tl.constexpr(1.5 * 2.0**23)  # adding it rounds a small float32 to an integer, half to even


@triton.jit
def scales_of(largest, dtype: tl.constexpr):
    """The scales of heads whose largest sizes are given."""
    if dtype == tl.int8:
        scales = tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
    else:
        scales = tl.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32))
    return tl.maximum(scales, _TINY)


@triton.jit
def codes_of(x, scales, dtype: tl.constexpr):
    """x [heads, numbers], scales [heads, 1]."""
    codes = tl.div_rn(x, tl.broadcast_to(scales, x.shape))
    if dtype == tl.int8:
        codes += _ROUNDER
        codes -= _ROUNDER
    else:
        codes = tl.minimum(tl.maximum(codes, -448.0), 448.0)
    return codes.to(dtype)

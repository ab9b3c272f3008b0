"""Makes a quantised copy of dense weights, by rounding to nearest."""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.backends.torch.storage import Weight
from outpace.backends.torch.storage.planar import int4, pack
from outpace.backends.torch.storage.scaled import FP8, round_to_scaled


def round_to_int4(weight: Tensor, group: int = 32, *, scale_dtype: torch.dtype = torch.float16) -> Weight:
    """Symmetric: codes of -8 to 7. The value of largest size in a group becomes -8 or 7 exactly, whichever it nears."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % group)).view(rows, -1, group)
    extreme = padded.gather(2, padded.abs().argmax(2, keepdim=True))
    scales = (extreme / -8).to(scale_dtype)
    divisor = torch.where(scales == 0, 1, scales).float()
    codes = (padded / divisor).round().clamp(-8, 7).to(torch.int8) + 8
    return pack(int4(group), codes.view(rows, -1)[:, :columns], scales.squeeze(2))


def quantise(weight: Tensor, kind: str, group: int = 32) -> Weight:
    """`kind`: int4, fp8 or int8."""
    if kind == "int4":
        return round_to_int4(weight, group)
    return round_to_scaled(weight, FP8 if kind == "fp8" else torch.int8)

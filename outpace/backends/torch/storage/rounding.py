"""Makes a quantised copy of dense weights, by rounding to nearest."""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.backends.torch import storage
from outpace.backends.torch.storage import Format, Weight
from outpace.backends.torch.storage.planar import Planar, PlanarFormat, int4, pack
from outpace.backends.torch.storage.scaled import FP8, Scaled, ScaledFormat, round_to_scaled
from outpace.backends.torch.storage.stacked import Stacked

# By the names of the setting `quantization`.
KINDS: dict[str, Format] = {
    "int4": int4(32),
    "int4-128": int4(128),
    "fp8": ScaledFormat(FP8),
    "int8": ScaledFormat(torch.int8),
}


def head_format(kind: str) -> Format:
    """How the output head is stored: 4 bits are too few for it."""
    return KINDS["fp8" if kind.startswith("int4") else kind]


def round_to_int4(weight: Tensor, format: PlanarFormat) -> Planar:
    """Symmetric: codes of -8 to 7. The value of largest size in a group becomes -8 exactly, so scales have a sign."""
    group, (rows, columns) = format.group, weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % group)).view(rows, -1, group)
    extreme = padded.gather(2, padded.abs().argmax(2, keepdim=True))
    scales = (extreme / -8).to(format.scale_dtype)
    divisor = torch.where(scales == 0, 1, scales).float()
    codes = (padded / divisor).round().clamp(-8, 7).to(torch.int8) + 8
    return pack(format, codes.view(rows, -1)[:, :columns], scales.squeeze(2))


def round_into(place: Planar | Scaled, weight: Tensor) -> None:
    """Fill `place` with the nearest values that its format has."""
    for begin, end in storage.slabs(*place.shape):
        rows = weight[begin:end].to(place.device)
        if isinstance(place, Planar):
            place.rows(begin, end).copy_(round_to_int4(rows, place.format))
        else:
            place.rows(begin, end).copy_(round_to_scaled(rows, place.values.dtype))


def quantise(weight: Weight, format: Format) -> Planar | Scaled:
    """A copy in another format, made slab by slab."""
    rows, columns = weight.shape
    made = storage.allocate(format, rows, columns, torch.float32, weight.device)
    assert isinstance(made, Planar | Scaled)
    first = 0
    for part in weight.parts if isinstance(weight, Stacked) else (weight,):
        for begin, end in storage.slabs(part.shape[0], columns):
            slab = part[begin:end] if isinstance(part, Tensor) else part.rows(begin, end).dequantise(torch.float32)
            round_into(made.rows(first + begin, first + end), slab)
        first += part.shape[0]
    return made

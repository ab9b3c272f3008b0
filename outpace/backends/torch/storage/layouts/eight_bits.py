"""FP8 and INT8: values in place of the weight, with a scale for the tensor, for every row, or for blocks of 128 x 128.

Scales of activations are not read: activations stay as they are, or are rounded by their own largest values.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outpace.backends.torch.storage import Format
from outpace.backends.torch.storage.layouts.base import Header
from outpace.backends.torch.storage.planar import fp8, pack
from outpace.backends.torch.storage.scaled import FP8, Scaled, ScaledFormat
from outpace.backends.torch.storage.stacked import Part
from outpace.models.hf_quantization import BLOCK, StoredQuantization

_IGNORED = ("input_scale", "input_zero_point", "weight_zero_point")


class ScaledRows:
    main = "weight"
    others: tuple[str, ...] = ("weight_scale",)
    ignored = _IGNORED

    def __init__(self, stored: StoredQuantization) -> None:
        pass

    def shape(self, main: tuple[int, ...]) -> tuple[int, int]:
        return main[0], main[1]

    def format(self, headers: Mapping[str, Header]) -> Format:
        return ScaledFormat(headers["weight"][1])

    def read(self, tensors: Mapping[str, Tensor]) -> Part:
        values = tensors["weight"]
        if values.dtype not in (FP8, torch.int8):
            raise ValueError(f"values as {values.dtype}")
        return Scaled(values, tensors["weight_scale"].float().reshape(-1).expand(len(values)).contiguous())


class FP8Blocks:
    """Every row gets the scales of its blocks, so that a kernel need not know of blocks."""

    main = "weight"
    others = ("weight_scale_inv", "weight_scale")  # two names of the same thing, which multiplies the values
    ignored = _IGNORED

    def __init__(self, stored: StoredQuantization) -> None:
        self._format = fp8(BLOCK, scale_dtype=torch.float32)

    def shape(self, main: tuple[int, ...]) -> tuple[int, int]:
        return main[0], main[1]

    def format(self, headers: Mapping[str, Header]) -> Format:
        return self._format

    def read(self, tensors: Mapping[str, Tensor]) -> Part:
        values = tensors["weight"]
        scales = next(tensors[name] for name in self.others if name in tensors).float()
        expected = tuple(-(-size // BLOCK) for size in values.shape)
        if values.dtype != FP8 or tuple(scales.shape) != expected:
            raise ValueError(f"values as {values.dtype}, scales of {list(scales.shape)} blocks for {list(expected)}")
        return pack(self._format, values.view(torch.uint8), scales.repeat_interleave(BLOCK, 0)[: len(values)])

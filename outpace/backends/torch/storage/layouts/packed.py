"""compressed-tensors, pack-quantized: words of eight columns; zero points in words of eight rows. Both plus 8."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from outpace.backends.torch.storage import Format
from outpace.backends.torch.storage.layouts.base import Header, four_bit_format, four_bits, nibbles
from outpace.backends.torch.storage.stacked import Part
from outpace.models.hf_quantization import StoredQuantization


class Packed:
    main = "weight_packed"
    others = ("weight_scale", "weight_zero_point")
    ignored = ("weight_shape", "weight_g_idx")

    def __init__(self, stored: StoredQuantization) -> None:
        self._stored = stored

    def shape(self, main: tuple[int, ...]) -> tuple[int, int]:
        return main[0], 8 * main[1]

    def format(self, headers: Mapping[str, Header]) -> Format:
        return four_bit_format(
            self._stored, headers["weight_scale"][1], has_zeros="weight_zero_point" in headers
        )  # fmt: skip

    def read(self, tensors: Mapping[str, Tensor]) -> Part:
        codes = nibbles(tensors["weight_packed"], 1)
        words = tensors.get("weight_zero_point")
        zeros = None if words is None else nibbles(words, 0)[: len(codes)]
        return four_bits(self._stored, codes, tensors["weight_scale"], zeros)

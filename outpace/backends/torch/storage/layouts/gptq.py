"""GPTQ: transposed; words of eight columns; zero points in words of eight rows, in its first version less 1."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from outpace.backends.torch.storage import Format
from outpace.backends.torch.storage.layouts.base import Header, four_bit_format, four_bits, nibbles
from outpace.backends.torch.storage.stacked import Part
from outpace.models.hf_quantization import StoredQuantization


class GPTQ:
    main = "qweight"
    others = ("scales", "qzeros")
    ignored = ("g_idx",)  # columns in order: a checkpoint with `desc_act` is refused

    def __init__(self, stored: StoredQuantization) -> None:
        self._stored = stored

    def shape(self, main: tuple[int, ...]) -> tuple[int, int]:
        return main[1], 8 * main[0]

    def format(self, headers: Mapping[str, Header]) -> Format:
        return four_bit_format(self._stored, headers["scales"][1], has_zeros=True)

    def read(self, tensors: Mapping[str, Tensor]) -> Part:
        codes = nibbles(tensors["qweight"], 0).T
        zeros = (nibbles(tensors["qzeros"], 1) + self._stored.zero_offset).T
        return four_bits(self._stored, codes, tensors["scales"].T, zeros)

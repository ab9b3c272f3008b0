"""AWQ (gemm): transposed; words of eight rows, in an order of their own."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from outpace.backends.torch.storage import Format
from outpace.backends.torch.storage.layouts.base import Header, four_bit_format, four_bits, nibbles
from outpace.backends.torch.storage.stacked import Part
from outpace.models.hf_quantization import StoredQuantization

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the row of each nibble


class AWQ:
    main = "qweight"
    others = ("scales", "qzeros")
    ignored: tuple[str, ...] = ()

    def __init__(self, stored: StoredQuantization) -> None:
        self._stored = stored

    def shape(self, main: tuple[int, ...]) -> tuple[int, int]:
        return 8 * main[1], main[0]

    def format(self, headers: Mapping[str, Header]) -> Format:
        return four_bit_format(self._stored, headers["scales"][1], has_zeros=True)

    def read(self, tensors: Mapping[str, Tensor]) -> Part:
        codes, zeros = nibbles(tensors["qweight"], 1, _ORDER).T, nibbles(tensors["qzeros"], 1, _ORDER).T
        return four_bits(self._stored, codes, tensors["scales"].T, zeros)

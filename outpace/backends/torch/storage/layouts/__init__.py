"""How quantised checkpoints lay out a matrix in several tensors, one file per layout."""

from __future__ import annotations

from collections.abc import Callable

from outpace.backends.torch.storage.layouts.awq import AWQ
from outpace.backends.torch.storage.layouts.base import Header, MatrixLayout
from outpace.backends.torch.storage.layouts.eight_bits import FP8Blocks, ScaledRows
from outpace.backends.torch.storage.layouts.gptq import GPTQ
from outpace.backends.torch.storage.layouts.packed import Packed
from outpace.models.hf_quantization import StoredQuantization

__all__ = ["Header", "MatrixLayout", "layout_for"]


_LAYOUTS: dict[str, Callable[[StoredQuantization], MatrixLayout]] = {
    "packed": Packed,
    "gptq": GPTQ,
    "awq": AWQ,
    "scaled": ScaledRows,
    "blocks": FP8Blocks,
}


def layout_for(stored: StoredQuantization) -> MatrixLayout:
    return _LAYOUTS[stored.layout](stored)

"""How a linear layer's weights are stored: dense tensors, or quantised ones that kernels unpack as they read them.

A `Format` describes one way to store a matrix; None stands for a dense tensor. A new format is one file here, with its
kernel, and a test against numbers computed without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor

from outpace.backends.torch.storage import planar, scaled
from outpace.backends.torch.storage.planar import Planar, PlanarFormat
from outpace.backends.torch.storage.scaled import Scaled, ScaledFormat
from outpace.backends.torch.storage.stacked import Part, Stacked

Weight = Tensor | Planar | Scaled | Stacked
Format = PlanarFormat | ScaledFormat
_SLAB = 1 << 24  # weights converted at once, which take up to 16 bytes each while that lasts


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The weights as numbers of `dtype`; a tensor is returned as it is."""
    return weight if isinstance(weight, Tensor) else weight.dequantise(dtype)


def plain_tensor(weight: Weight) -> Tensor:
    """The tensor itself, where no quantised weights can be."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"a plain tensor is needed here and the weights are {type(weight).__name__}")
    return weight


def allocate(format: Format | None, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Part:
    """Uninitialised memory for a matrix; `dtype` is that of a dense one."""
    if format is None:
        return torch.empty((rows, columns), dtype=dtype, device=device)
    if isinstance(format, PlanarFormat):
        return planar.allocate(format, rows, columns, device)
    return scaled.allocate(format, rows, columns, device)


def allocate_fused(
    formats: Sequence[Format | None], rows: Sequence[int], columns: int, dtype: torch.dtype, device: torch.device
) -> Weight:
    """Memory for matrices above each other. Neighbours of one format are one part."""
    runs = [
        (format, sum(n for _, n in run)) for format, run in groupby(zip(formats, rows, strict=True), lambda x: x[0])
    ]
    parts = tuple(allocate(format, n, columns, dtype, device) for format, n in runs)
    return parts[0] if len(parts) == 1 else Stacked(parts)


def split_rows(weight: Weight, sizes: Sequence[int]) -> list[Part]:
    """Views of a fused matrix's parts."""
    if isinstance(weight, Tensor):
        return list(weight.split(list(sizes)))
    return [weight.rows(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def take_rows(weight: Part, order: Tensor) -> Part:
    """A copy with the rows in another order."""
    order = order.to(weight.device)
    return weight[order] if isinstance(weight, Tensor) else weight.take_rows(order)


def slabs(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows to convert one after the other, so that the conversion of a large matrix takes little memory."""
    step = max(_SLAB // columns, 1)
    return ((begin, min(begin + step, rows)) for begin in range(0, rows, step))

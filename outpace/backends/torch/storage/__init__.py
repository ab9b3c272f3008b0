"""How a linear layer's weights are stored: dense tensors, or quantised ones that kernels unpack as they read them."""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.backends.torch.storage.planar import Planar
from outpace.backends.torch.storage.scaled import Scaled

Weight = Tensor | Planar | Scaled


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The weights as numbers of `dtype`; a tensor is returned as it is."""
    return weight if isinstance(weight, Tensor) else weight.dequantise(dtype)

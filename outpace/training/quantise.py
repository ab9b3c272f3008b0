"""Rounds weights as GGUF's Q4_0 does, so that a head learns with the weights it will be served with.

A block of 32 neighbours shares one scale: the element of largest magnitude becomes -8, with its sign in the scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32


def q4_0(weights: Tensor) -> Tensor:
    """The values after a round trip through Q4_0, in the same shape; rows that are no whole blocks stay as they are."""
    if weights.shape[-1] % BLOCK:
        return weights
    blocks = weights.detach().float().reshape(-1, BLOCK)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = largest / -8
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    codes = torch.trunc(blocks * inverse + 8.5).clamp(0, 15)
    return ((codes - 8) * scale.half().float()).reshape(weights.shape).to(weights.dtype)


def straight_through(weights: Tensor) -> Tensor:
    """Rounded in the forward pass; the gradient passes as if nothing had been rounded."""
    return weights + (q4_0(weights) - weights).detach()

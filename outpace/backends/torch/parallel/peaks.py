"""The largest logit of each rank and its token: all that a greedy request needs of logits that are split by tokens.

A row of peaks is the values of all ranks, then their tokens, in float32: a vocabulary has fewer than 2^24 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def num_columns(size: int) -> int:
    """Of the peaks of so many ranks."""
    return 2 * size


def peak(logits: Tensor, first: int) -> Tensor:
    """[rows, 2] of a rank's part of the vocabulary, [rows, tokens], which begins with token `first`."""
    if not logits.shape[1]:  # the vocabulary ends before this rank's part
        return torch.cat([logits.new_full((len(logits), 1), value) for value in (-torch.inf, first)], dim=1)
    place = logits.argmax(dim=1, keepdim=True)  # the first among equals
    return torch.cat([logits.gather(1, place), (place + first).float()], dim=1)


def combined(parts: list[Tensor]) -> Tensor:
    """[rows, 2 * ranks] of every rank's peak, in the order of the ranks."""
    return torch.stack(parts, dim=2).flatten(1)


def tokens_of(peaks: Tensor) -> Tensor:
    """The token with the largest logit of each row; of equals the lowest, which the lowest rank has."""
    values, tokens = peaks.chunk(2, dim=1)
    return tokens.gather(1, values.argmax(dim=1, keepdim=True))[:, 0].long()

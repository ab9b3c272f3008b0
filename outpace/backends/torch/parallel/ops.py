"""The operations of a layer for a rank's part of the weights: those of one device, and a sum over the ranks where a
layer needs one. All other kernels stay fused as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outpace.backends.torch.kernels.base import Hidden, Ops
from outpace.backends.torch.parallel.peaks import combined, num_columns, peak
from outpace.backends.torch.storage import Weight
from outpace.models.architecture import Experts

if TYPE_CHECKING:
    from outpace.backends.torch.parallel.group import Group


class ShardedOps:
    has_trees = False  # ranks do not move tokens of their caches

    def __init__(self, local: Ops, group: Group, vocab_size: int) -> None:
        self.local = local
        self._group = group
        self._vocab_size = vocab_size
        self.num_ranks = group.size
        # On whole activations, or on a rank's own part: the same as on one device.
        self.embed, self.norm, self.linear = local.embed, local.norm, local.linear
        self.norm_linear, self.norm_swiglu, self.attend = local.norm_linear, local.norm_swiglu, local.attend
        self.geglu, self.rotate_and_store = local.geglu, local.rotate_and_store

    def linear_add(self, x: Tensor, weight: Weight, bias: Tensor | None, h: Hidden, next_norm: Tensor) -> Hidden:
        """The product is summed before it is added to the residual stream, which would otherwise be rounded by every
        rank. So the next norm cannot begin in the kernel of the product."""
        return Hidden(h.residual + self._summed(x, weight, bias))

    def linear_norm_add(
        self, x: Tensor, weight: Weight, bias: Tensor | None, norm: Tensor, epsilon: float, h: Hidden, next_norm: Tensor
    ) -> Hidden:
        return Hidden(h.residual + self.local.norm(self._summed(x, weight, bias), norm, epsilon))

    def experts(
        self, x: Tensor, positions: Tensor, router: Tensor, gate_up: Weight, down: Weight, experts: Experts
    ) -> Tensor:
        """Every rank has a part of every expert's hidden elements."""
        return self._group.sum(self.local.experts(x, positions, router, gate_up, down, experts))

    def _summed(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        total = self._group.sum(self.local.linear(x, weight))
        return total if bias is None else total + bias

    def norm_logits(self, h: Hidden, norm: Tensor, epsilon: float, head: Weight, room: Tensor | None = None) -> Tensor:
        """All logits on rank 0. On other ranks their own, which nobody reads."""
        if not len(h.residual):
            return h.residual.new_empty((0, self._vocab_size), dtype=torch.float32)
        mine = self.local.norm_logits(h, norm, epsilon, head)
        parts = self._group.to_first(mine)
        if not parts:
            return mine
        logits = torch.cat(parts, dim=1)[:, : self._vocab_size]
        return logits.contiguous() if room is None else room.copy_(logits)

    def norm_peaks(self, h: Hidden, norm: Tensor, epsilon: float, head: Weight) -> Tensor:
        """The peaks of all ranks on rank 0 (`peaks.py`). On other ranks their own, which nobody reads."""
        if not len(h.residual):
            return h.residual.new_empty((0, num_columns(self._group.size)), dtype=torch.float32)
        logits = self.local.norm_logits(h, norm, epsilon, head)
        first = self._group.rank * logits.shape[1]
        mine = peak(logits[:, : max(self._vocab_size - first, 0)], first)
        return combined(self._group.to_first(mine) or [mine])


def local_ops(ops: Ops) -> Ops:
    """The operations of one device, for a draft head, which is whole on rank 0."""
    return ops.local if isinstance(ops, ShardedOps) else ops

"""A rank's part of a model: the forward pass of one device, with sums over the ranks in its operations."""

from __future__ import annotations

from torch import Tensor

from outpace.backends.torch.execution.step import StepShape
from outpace.backends.torch.kernels.base import Hidden
from outpace.backends.torch.model.model import Model
from outpace.backends.torch.parallel.ops import ShardedOps
from outpace.backends.torch.parallel.peaks import num_columns


class ShardedModel(Model):
    ops: ShardedOps

    def outputs(self, h: Hidden, shape: StepShape, room: Tensor | None) -> Tensor:
        if not shape.gives_peaks:
            return super().outputs(h, shape, room)
        peaks = self.ops.norm_peaks(h, self.weights.final_norm, self.config.epsilon, self.weights.head)
        return peaks if room is None else room.copy_(peaks)

    def num_columns(self, shape: StepShape) -> int:
        return num_columns(self.ops.num_ranks) if shape.gives_peaks else super().num_columns(shape)

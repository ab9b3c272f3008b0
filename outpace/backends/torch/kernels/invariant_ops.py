"""The operations of a layer on a GPU in one order of sums, whatever shares the step (`--batch-invariant`).

A table of its own beside `triton_ops.py`, which chooses kernels by the number of tokens: here one kernel does each
product (`fixed_gemm.py`), norms are kernels of their own with a program for each token, and attention divides every
context at the same places, with tiles of the same size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outpace.backends.torch.execution.step import StepInputs
from outpace.backends.torch.kernels import attention
from outpace.backends.torch.kernels.base import LLAMA, Cache, Hidden, Scores
from outpace.backends.torch.kernels.fixed_gemm import fixed_linear
from outpace.backends.torch.kernels.rotation import Rotation
from outpace.backends.torch.kernels.triton_ops import TritonOps
from outpace.backends.torch.storage import Weight
from outpace.backends.torch.storage.scaled import Scaled


class InvariantOps(TritonOps):
    has_trees = False  # their places in the cache are not their positions, by which contexts are divided

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        return self._product(x, weight)

    def norm_linear(self, h: Hidden, norm: Tensor, epsilon: float, weight: Weight, bias: Tensor | None) -> Tensor:
        return self._product(self._norm(h, norm, epsilon), weight, bias=bias)

    def linear_add(self, x: Tensor, weight: Weight, bias: Tensor | None, h: Hidden, next_norm: Tensor) -> Hidden:
        return Hidden(self._product(x, weight, h.residual, bias=bias, residual=h.residual))

    def norm_swiglu(self, h: Hidden, norm: Tensor, epsilon: float, weight: Weight, bias: Tensor | None) -> Tensor:
        return self._product(self._norm(h, norm, epsilon), weight, bias=bias, swiglu=True)

    def norm_logits(self, h: Hidden, norm: Tensor, epsilon: float, head: Weight, room: Tensor | None = None) -> Tensor:
        x = h.residual
        out = room if room is not None else x.new_empty((len(x), head.shape[0]), dtype=torch.float32)
        return self._product(self._norm(h, norm, epsilon), head, out) if len(x) else out

    def _attend(self, qkv: Tensor, cache: Cache, step: StepInputs, rotation: Rotation, scores: Scores) -> Tensor:
        assert scores == LLAMA, "checked when the model was loaded"
        return attention.attend_fixed(qkv, cache, step, rotation, dependent=self._dependent)

    def _product(self, x: Tensor, weight: Weight, out: Tensor | None = None, **fused: Any) -> Tensor:
        assert isinstance(weight, Tensor | Scaled), "checked when the model was loaded"
        if out is None:
            out = x.new_empty((len(x), weight.shape[0] // (2 if fused.get("swiglu") else 1)))
        fixed_linear(x, weight, out, dependent=self._dependent, **fused)
        return out

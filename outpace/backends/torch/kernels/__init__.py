"""The arithmetic of a layer: Triton kernels on a GPU, and a plain torch reference that tests compare them with."""

from __future__ import annotations

import torch

from outpace.backends.torch.kernels.base import Ops


def ops_for(device: torch.device, *, batch_invariant: bool = False) -> Ops:
    """`batch_invariant`: sums have one order, whatever shares the step."""
    if device.type != "cuda":
        from outpace.backends.torch.kernels.reference import InvariantReferenceOps, ReferenceOps

        return InvariantReferenceOps() if batch_invariant else ReferenceOps()
    if batch_invariant:
        from outpace.backends.torch.kernels.invariant_ops import InvariantOps

        return InvariantOps(device)
    from outpace.backends.torch.kernels.triton_ops import TritonOps

    return TritonOps(device)

"""The arithmetic of a layer: Triton kernels on a GPU, and a plain torch reference that tests compare them with."""

from __future__ import annotations

import torch

from outpace.backends.torch.kernels.base import Ops


def ops_for(device: torch.device) -> Ops:
    if device.type != "cuda":
        from outpace.backends.torch.kernels.reference import ReferenceOps

        return ReferenceOps()
    from outpace.backends.torch.kernels.triton_ops import TritonOps

    return TritonOps(device)

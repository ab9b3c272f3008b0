"""Weights of 8 bits, FP8 (e4m3) or integers, with one scale for each row: weight[n, k] = scale[n] * values[n, k].

Values lie in rows as in a dense matrix, so the kernels for dense weights read them, and torch's FP8 product too.
A scale for a whole tensor is stored as one for each row: then matrices with different scales can be fused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_CAPABILITY = (8, 9)  # of GPUs that have it: Ada and Hopper
_LARGEST = {FP8: 448.0, torch.int8: 127.0}


@dataclass(frozen=True, slots=True)
class ScaledFormat:
    dtype: torch.dtype  # FP8 or int8

    @property
    def name(self) -> str:
        return "FP8" if self.dtype == FP8 else "int8"


@dataclass(frozen=True, slots=True)
class Scaled:
    values: Tensor  # FP8 or int8 [rows, columns]
    scales: Tensor  # float32 [rows]

    @property
    def format(self) -> ScaledFormat:
        return ScaledFormat(self.values.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def tensors(self) -> list[Tensor]:
        return [self.values, self.scales]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def numel(self) -> int:
        return self.values.numel()

    def rows(self, begin: int, end: int) -> Scaled:
        """A view of some rows."""
        return Scaled(self.values[begin:end], self.scales[begin:end])

    def take_rows(self, order: Tensor) -> Scaled:
        """A copy with the rows in another order."""
        values = self.values.view(torch.uint8)[order].view(self.values.dtype)  # torch does not index FP8
        return Scaled(values, self.scales[order])

    def columns(self, begin: int, end: int) -> Scaled:
        """A view of some columns."""
        return Scaled(self.values[:, begin:end], self.scales)

    def copy_(self, other: Scaled) -> None:
        self.values.copy_(other.values)
        self.scales.copy_(other.scales)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        return (self.values.float() * self.scales[:, None]).to(dtype)


def is_fp8(weight: object) -> TypeGuard[Scaled]:
    return isinstance(weight, Scaled) and weight.values.dtype == FP8


def allocate(format: ScaledFormat, num_rows: int, num_columns: int, device: torch.device) -> Scaled:
    """Uninitialised memory for a matrix."""
    values = torch.empty((num_rows, num_columns), dtype=format.dtype, device=device)
    return Scaled(values, torch.empty(num_rows, dtype=torch.float32, device=device))


def round_to_scaled(weight: Tensor, kind: torch.dtype) -> Scaled:
    """Round to nearest, each row by its largest value."""
    largest = _LARGEST[kind]
    wide = weight.float()
    scales = (wide.abs().amax(1) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    wide = wide / scales[:, None]
    return Scaled((wide.round() if kind == torch.int8 else wide.clamp(-largest, largest)).to(kind), scales)

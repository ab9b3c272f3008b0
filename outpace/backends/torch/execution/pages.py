"""The memory of a paged KV cache: in the model's dtype, or in 8 bits with a scale for each token and head.

A scale for each token and head needs no calibration, and no token changes what others were rounded to: a sequence that
is rewound, forked or verified in other portions has the same cache. It takes 4 bytes beside the 64 to 256 of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.backends.torch.kernels.base import Cache
from outpace.backends.torch.storage.scaled import FP8, FP8_CAPABILITY
from outpace.config import KVCacheDtype
from outpace.errors import BackendError

PAGE_TOKENS = 32
_ROUNDED: dict[KVCacheDtype, torch.dtype] = {"fp8": FP8, "int8": torch.int8}


class Pages:
    """The pages of some layers. A page holds the same tokens in every layer."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        first: int = 0,
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        """`first`: positions before it are not attended to."""
        shape = (num_layers, 2, num_pages, num_kv_heads, page_tokens, head_dim)
        # Zeros, because attention multiplies masked values by 0, and 0 * NaN is NaN.
        self.numbers = torch.zeros(shape, dtype=dtype, device=device)
        self.scales = torch.zeros(shape[:-1], device=device) if is_rounded(dtype) else None
        self.caches = [
            Cache(
                self.numbers[i, 0],
                self.numbers[i, 1],
                first,
                None if self.scales is None else self.scales[i, 0],
                None if self.scales is None else self.scales[i, 1],
            )
            for i in range(num_layers)
        ]

    def move(self, pages: Tensor, slots: Tensor, to_pages: Tensor, to_slots: Tensor) -> None:
        """Move tokens to other places, which may be those of others that move; all int64 [tokens]."""
        for part in (self.numbers, self.scales):
            if part is not None:
                part[:, :, to_pages, :, to_slots] = part[:, :, pages, :, slots]

    def copy(self, source: int, target: int) -> None:
        """Copy a page."""
        for part in (self.numbers, self.scales):
            if part is not None:
                part[:, :, target] = part[:, :, source]


def is_rounded(dtype: torch.dtype) -> bool:
    return dtype in _ROUNDED.values()


def bytes_per_token(num_elements: int, head_dim: int, dtype: torch.dtype) -> int:
    """Of a token's keys and values, which have `num_elements` numbers in all."""
    return num_elements * dtype.itemsize + (4 * num_elements // head_dim if is_rounded(dtype) else 0)


def choose_cache_dtype(wanted: KVCacheDtype, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """`dtype`: that of the model."""
    if wanted == "auto":
        return dtype
    if dtype == torch.float16:  # its range is too small for weights that are multiplied by scales
        raise BackendError(
            f"kv_cache_dtype {wanted!r} needs dtype 'bfloat16' or 'float32' and the dtype is float16; set another "
            "dtype, or leave out kv_cache_dtype"
        )
    if wanted == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise BackendError(
            "kv_cache_dtype 'fp8' needs a GPU of compute capability 8.9; use kv_cache_dtype 'int8', or leave it out"
        )
    return _ROUNDED[wanted]

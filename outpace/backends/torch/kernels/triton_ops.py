"""The operations of a layer on a GPU: for few tokens our own streaming product, for many the library's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from outpace.backends.torch.kernels import attention, elementwise
from outpace.backends.torch.kernels.base import Cache
from outpace.backends.torch.kernels.linear import LinearConfig, Scratch, block_rows, stream_linear
from outpace.backends.torch.step import StepInputs

MAX_STREAMED_TOKENS = 16  # beyond, the library's product is faster, unless measured otherwise


class TritonOps:
    def __init__(
        self,
        device: torch.device,
        *,
        dependent_launch: bool | None = None,
        configs: Mapping[tuple[int, int, int], LinearConfig] | None = None,
    ) -> None:
        """`configs`: how to stream weights of (rows, columns) for up to so many tokens, where measured better."""
        properties = torch.cuda.get_device_properties(device)
        self._num_sms = properties.multi_processor_count
        # Kernels that begin while the previous one ends need Hopper or newer.
        self._dependent = properties.major >= 9 if dependent_launch is None else dependent_launch
        self._scratch = Scratch(device)
        self._configs = dict(configs or {})
        self.max_streamed_tokens = MAX_STREAMED_TOKENS

    def norm_linear(self, x: Tensor, norm: Tensor, epsilon: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        if config := self._config(x, weight):
            out = _room(x, weight.shape[0])
            return stream_linear(
                x, weight, out, self._scratch, config, self._num_sms, norm=norm, epsilon=epsilon, bias=bias
            )
        return functional.linear(elementwise.rms_norm(x, norm, epsilon), weight, bias)

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        if config := self._config(x, weight):
            return stream_linear(
                x, weight, residual, self._scratch, config, self._num_sms, bias=bias, residual=residual
            )
        if bias is not None:
            residual = residual + bias
        return torch.addmm(residual, x, weight.T)

    def norm_swiglu(self, x: Tensor, norm: Tensor, epsilon: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        if config := self._config(x, weight):
            out = _room(x, weight.shape[0] // 2)
            return stream_linear(
                x, weight, out, self._scratch, config, self._num_sms, norm=norm, epsilon=epsilon, bias=bias, swiglu=True
            )
        return elementwise.swiglu(functional.linear(elementwise.rms_norm(x, norm, epsilon), weight, bias))

    def norm_logits(self, x: Tensor, norm: Tensor, epsilon: float, head: Tensor) -> Tensor:
        if not len(x):
            return torch.empty((0, head.shape[0]), dtype=torch.float32, device=x.device)
        if config := self._config(x, head):
            out = _room(x, head.shape[0], torch.float32)
            return stream_linear(x, head, out, self._scratch, config, self._num_sms, norm=norm, epsilon=epsilon)
        h = elementwise.rms_norm(x, norm, epsilon)
        return torch.mm(h, head.T) if h.dtype == torch.float32 else torch.mm(h, head.T, out_dtype=torch.float32)

    def rotate_and_store(
        self,
        qkv: Tensor,
        cache: Cache,
        step: StepInputs,
        rope: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        epsilon: float,
    ) -> Tensor:
        return attention.rotate_and_store(qkv, cache, step, rope, q_norm, k_norm, epsilon, dependent=self._dependent)

    def attention(self, q: Tensor, cache: Cache, step: StepInputs) -> Tensor:
        return attention.attention(q, cache, step, self._num_sms, dependent=self._dependent)

    def _config(self, x: Tensor, weight: Tensor) -> LinearConfig | None:
        """How to stream this weight; None where the library should multiply."""
        measured = self._configs.get((*weight.shape, block_rows(len(x))))
        if measured is not None:
            return measured
        k = weight.shape[1]
        slice_size = next((size for size in (512, 256, 128, 64) if k % size == 0), None)
        if slice_size is None or len(x) > self.max_streamed_tokens:
            return None
        slice_size = min(slice_size, 256 if x.dtype != torch.float32 else 64)
        return LinearConfig(
            block_n=32, block_k=slice_size, num_warps=4, num_stages=4, prefetch=1, dependent_launch=self._dependent
        )


def _room(x: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty((len(x), width), dtype=dtype or x.dtype, device=x.device)

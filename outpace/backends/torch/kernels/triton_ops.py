"""The operations of a layer on a GPU: our own products for one token and for few tokens, the library's for many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional

from outpace.backends.torch.execution.step import StepInputs
from outpace.backends.torch.kernels import attention, compiling, elementwise, fp8, gemv, skinny_gemm
from outpace.backends.torch.kernels import experts as expert_kernels
from outpace.backends.torch.kernels.base import LLAMA, Cache, Hidden, Normed, Scores
from outpace.backends.torch.kernels.fp8 import RoundedConfig, RoundedTokens
from outpace.backends.torch.kernels.gemv import GemvConfig, gemv_linear
from outpace.backends.torch.kernels.linear import LinearConfig, Scratch, block_rows, default_config, stream_linear
from outpace.backends.torch.kernels.measured import GEMV_CONFIGS, SKINNY_GEMM_CONFIGS, STREAMED_CONFIGS
from outpace.backends.torch.kernels.measured_quantised import QUANTISED_CONFIGS
from outpace.backends.torch.kernels.planar_gemm import PlanarConfig, planar_linear, unpack
from outpace.backends.torch.kernels.reference import route
from outpace.backends.torch.kernels.rotation import Rotation, rotate_and_store
from outpace.backends.torch.kernels.skinny_gemm import SkinnyConfig, skinny_linear
from outpace.backends.torch.storage import Weight, dense
from outpace.backends.torch.storage.planar import Planar
from outpace.backends.torch.storage.scaled import Scaled, is_fp8
from outpace.backends.torch.storage.stacked import Stacked
from outpace.models.architecture import Experts

Config = LinearConfig | SkinnyConfig | GemvConfig | PlanarConfig | RoundedConfig
MAX_STREAMED_TOKENS = 16  # above this the library's product of dense weights is faster, except for `configs`
MAX_SCALED_TOKENS = 64  # above this, tokens are rounded too for weights in FP8, and INT8 is dequantised
MAX_HEAD_TOKENS = 1024  # above this, an output head of 8 bits is dequantised for the library's product
MAX_PLANAR_TOKENS = 256  # above this, unpacking the weights for the library's product takes less time


class TritonOps:
    has_trees = True

    def __init__(
        self,
        device: torch.device,
        *,
        dependent_launch: bool | None = None,
        configs: Mapping[tuple[int, int, int], Config] | None = None,
    ) -> None:
        """`configs`: overrides, by (rows, columns, most tokens) of a product."""
        compiling.watch()
        properties = torch.cuda.get_device_properties(device)
        self._num_sms = properties.multi_processor_count
        # Launching a kernel while the previous one ends needs Hopper or newer.
        self._dependent = properties.major >= 9 if dependent_launch is None else dependent_launch
        self._has_fp8_rows = properties.major >= 9
        self._scratch = Scratch(device)
        self._configs = dict(configs or {})

    def embed(self, tokens: Tensor, embedding: Tensor) -> Hidden:
        return Hidden(elementwise.embed(tokens, embedding, dependent=self._dependent))

    def norm(self, x: Tensor, norm: Tensor, epsilon: float) -> Tensor:
        return elementwise.rms_norm(x, norm, epsilon, dependent=self._dependent)

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        if isinstance(weight, Stacked):
            return torch.cat([self.linear(x, part) for part in weight.parts], 1)
        if config := self._config(len(x), weight):
            out = _room(x, weight.shape[0])
            self._multiply(x, weight, out, config)
            return out
        if self._multiplies_fp8(weight):
            return fp8.linear(fp8.round_rows(x), weight)
        return functional.linear(x, self._dense(weight, x.dtype))

    def norm_linear(self, h: Hidden, norm: Tensor, epsilon: float, weight: Weight, bias: Tensor | None) -> Tensor:
        if isinstance(weight, Stacked):
            biases = [None] * len(weight.parts) if bias is None else bias.tensor_split(weight.ends[:-1])
            parts = zip(weight.parts, biases, strict=True)
            return torch.cat([self.norm_linear(h, norm, epsilon, part, mine) for part, mine in parts], 1)
        if config := self._config(len(h.residual), weight):
            out = _room(h.residual, weight.shape[0])
            self._multiply(self._normed(h, norm, epsilon, config), weight, out, config, epsilon=epsilon, bias=bias)
            return out
        if self._multiplies_fp8(weight):
            return fp8.linear(fp8.round_normed(h.residual, norm, epsilon, dependent=self._dependent), weight, bias)
        return functional.linear(self._norm(h, norm, epsilon), self._dense(weight, h.residual.dtype), bias)

    def linear_add(self, x: Tensor, weight: Weight, bias: Tensor | None, h: Hidden, next_norm: Tensor) -> Hidden:
        residual = h.residual
        if config := self._config(len(x), weight):
            # With many tokens the next norm is a kernel of its own: every program would read all sums of squares.
            following = next_norm if len(x) <= MAX_STREAMED_TOKENS else None
            normed = self._multiply(x, weight, residual, config, bias=bias, residual=residual, next_norm=following)
            return Hidden(residual, normed)
        if bias is not None:
            residual.add_(bias)
        if self._multiplies_fp8(weight):
            return Hidden(residual.add_(fp8.linear(fp8.round_rows(x, dependent=self._dependent), weight)))
        # In place, because out of place copies the residual first.
        return Hidden(residual.addmm_(x, self._dense(weight, x.dtype).T))

    def linear_norm_add(
        self, x: Tensor, weight: Weight, bias: Tensor | None, norm: Tensor, epsilon: float, h: Hidden, next_norm: Tensor
    ) -> Hidden:
        product = self.linear(x, weight)
        if bias is not None:
            product.add_(bias)
        following = next_norm if len(x) <= MAX_STREAMED_TOKENS else None
        dependent = self._dependent
        return Hidden(
            h.residual, elementwise.add_normed(product, norm, epsilon, h.residual, following, dependent=dependent)
        )

    def geglu(self, gate_up: Tensor) -> Tensor:
        return elementwise.geglu(gate_up, dependent=self._dependent)

    def experts(
        self, x: Tensor, positions: Tensor, router: Tensor, gate_up: Weight, down: Weight, experts: Experts
    ) -> Tensor:
        chosen, weights = route(self.linear(x, router), experts)
        return expert_kernels.mixed(x, positions, chosen, weights, gate_up, down, experts.count)

    def norm_swiglu(self, h: Hidden, norm: Tensor, epsilon: float, weight: Weight, bias: Tensor | None) -> Tensor:
        if isinstance(weight, Stacked):
            return elementwise.swiglu(self.norm_linear(h, norm, epsilon, weight, bias), dependent=self._dependent)
        if config := self._config(len(h.residual), weight, is_swiglu=True):
            x, out = self._normed(h, norm, epsilon, config), _room(h.residual, weight.shape[0] // 2)
            self._multiply(x, weight, out, config, epsilon=epsilon, bias=bias, swiglu=True)
            return out
        if self._multiplies_fp8(weight):
            x8 = fp8.round_normed(h.residual, norm, epsilon, dependent=self._dependent)
            gate_up = fp8.linear(x8, weight, bias)
        else:
            gate_up = functional.linear(self._norm(h, norm, epsilon), self._dense(weight, h.residual.dtype), bias)
        return elementwise.swiglu(gate_up, dependent=self._dependent)

    def norm_logits(self, h: Hidden, norm: Tensor, epsilon: float, head: Weight, room: Tensor | None = None) -> Tensor:
        num_tokens = len(h.residual)
        config = self._config(num_tokens, head) if num_tokens else None
        if config is None and isinstance(head, Scaled) and num_tokens <= MAX_HEAD_TOKENS and head.shape[1] % 64 == 0:
            config = planar_config(num_tokens)  # logits of rounded activations would not be good enough
        if config or not num_tokens:
            out = _room(h.residual, head.shape[0], torch.float32) if room is None else room
        if not num_tokens:
            return out
        if config:
            self._multiply(self._normed(h, norm, epsilon, config), head, out, config, epsilon=epsilon)
            return out
        x = self._norm(h, norm, epsilon)
        weight = self._dense(head, x.dtype)
        if x.dtype == torch.float32:
            return torch.mm(x, weight.T, out=room)
        return torch.mm(x, weight.T, out_dtype=torch.float32, out=room)

    def attend(
        self,
        qkv: Tensor,
        cache: Cache,
        step: StepInputs,
        rope: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        epsilon: float,
        scores: Scores = LLAMA,
    ) -> Tensor:
        rotation = Rotation(rope, q_norm, k_norm, epsilon)
        return self._attend(qkv, cache, step, rotation, scores)

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
        return rotate_and_store(qkv, cache, step, Rotation(rope, q_norm, k_norm, epsilon), dependent=self._dependent)

    def _attend(self, qkv: Tensor, cache: Cache, step: StepInputs, rotation: Rotation, scores: Scores) -> Tensor:
        return attention.attend(qkv, cache, step, rotation, self._num_sms, scores=scores, dependent=self._dependent)

    def _norm(self, h: Hidden, norm: Tensor, epsilon: float) -> Tensor:
        return self.norm(h.residual, norm, epsilon)

    def _normed(self, h: Hidden, norm: Tensor, epsilon: float, config: Config) -> Tensor | Normed | RoundedTokens:
        """As the product with this config takes it."""
        if isinstance(config, RoundedConfig):
            return fp8.round_normed(h.residual, norm, epsilon, terms=config.terms, dependent=self._dependent)
        return h.normed or self._norm(h, norm, epsilon)

    def _multiplies_fp8(self, weight: Weight) -> TypeGuard[Scaled]:
        """Whether the library's FP8 product takes this weight; it needs Hopper for scales of rows."""
        return self._has_fp8_rows and is_fp8(weight) and not any(size % 16 for size in weight.shape)

    def _dense(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        return unpack(weight, dtype) if isinstance(weight, Planar) else dense(weight, dtype)

    def _multiply(
        self, x: Tensor | Normed | RoundedTokens, weight: Weight, out: Tensor, config: Config, **fused: Any
    ) -> Normed | None:
        assert not isinstance(weight, Stacked)
        if isinstance(config, RoundedConfig):
            self._multiply_rounded(x, weight, out, config, **fused)
            return None
        assert not isinstance(x, RoundedTokens)
        if isinstance(config, PlanarConfig):
            assert not isinstance(weight, Tensor)
            return planar_linear(x, weight, out, self._scratch, config, dependent=self._dependent, **fused)
        assert not isinstance(weight, Planar)
        if isinstance(config, GemvConfig):
            return gemv_linear(x, weight, out, config, dependent=self._dependent, **fused)
        if isinstance(config, SkinnyConfig):
            return skinny_linear(x, weight, out, config, dependent=self._dependent, **fused)
        assert isinstance(config, LinearConfig)
        return stream_linear(x, weight, out, self._scratch, config, self._num_sms, **fused)

    def _multiply_rounded(
        self,
        x: Tensor | Normed | RoundedTokens,
        weight: Weight,
        out: Tensor,
        config: RoundedConfig,
        *,
        epsilon: float = 0.0,
        next_norm: Tensor | None = None,
        **fused: Any,
    ) -> None:
        """A norm before it is part of the rounding, so it leaves the next one to the next product."""
        assert is_fp8(weight) and not isinstance(x, Normed)
        if isinstance(x, Tensor):
            x = fp8.round_rows(x, terms=config.terms, dependent=self._dependent)
        fp8.rounded_linear(x, weight, out, self._scratch, config, dependent=self._dependent, **fused)

    def _config(self, num_tokens: int, weight: Weight, *, is_swiglu: bool = False) -> Config | None:
        rows, k = weight.shape
        if isinstance(weight, Tensor):
            return self.config_for(num_tokens, rows, k, weight.dtype, is_swiglu=is_swiglu)
        if given := self._given(num_tokens, rows, k):
            return given
        if isinstance(weight, Stacked):
            return None
        bucket = 1 if num_tokens == 1 else block_rows(num_tokens)
        if measured := QUANTISED_CONFIGS.get((weight.format.name, rows, k, bucket)):
            return measured
        if isinstance(weight, Planar):
            return planar_config(num_tokens) if num_tokens <= MAX_PLANAR_TOKENS else None
        return scaled_config(num_tokens, rows, k, is_swiglu=is_swiglu)

    def _given(self, num_tokens: int, rows: int, k: int) -> Config | None:
        return self._configs.get((rows, k, 1 if num_tokens == 1 else block_rows(num_tokens)))

    def config_for(
        self, num_tokens: int, rows: int, k: int, dtype: torch.dtype, *, is_swiglu: bool = False
    ) -> Config | None:
        """The config for a dense weight of `rows` rows and `k` columns; None: use the library's product."""
        if given := self._given(num_tokens, rows, k):
            return given
        n = rows // (2 if is_swiglu else 1)
        if num_tokens == 1:
            return GEMV_CONFIGS.get((rows, k)) or gemv.default_config(n, k, is_swiglu=is_swiglu)
        if num_tokens > MAX_STREAMED_TOKENS or k % 64:
            return None
        if dtype == torch.float32:
            return LinearConfig(32, 64, num_warps=4, num_stages=4, dependent_launch=self._dependent)
        if num_tokens <= skinny_gemm.MAX_TOKENS and (rows, k) in SKINNY_GEMM_CONFIGS:
            return SKINNY_GEMM_CONFIGS[rows, k]
        config = STREAMED_CONFIGS.get((rows, k)) or default_config(n, k, is_swiglu=is_swiglu)
        return replace(config, dependent_launch=self._dependent)


def planar_config(num_tokens: int) -> PlanarConfig:
    """For weights of 4 to 8 bits."""
    if num_tokens <= 16:
        return PlanarConfig(16, 8, num_warps=8)
    return PlanarConfig(64, 1, num_warps=4, splits=4, bands=4, unroll=1)


def scaled_config(num_tokens: int, rows: int, k: int, *, is_swiglu: bool) -> Config | None:
    if num_tokens == 1:
        return gemv.default_config(rows // (2 if is_swiglu else 1), k, is_swiglu=is_swiglu)
    if num_tokens > MAX_SCALED_TOKENS or k % 64:
        return None
    return planar_config(num_tokens)


def _room(x: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty((len(x), width), dtype=dtype or x.dtype, device=x.device)

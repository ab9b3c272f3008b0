"""The target in plain torch, for training: whole texts at once, without a cache, with taps.

It uses the torch backend's loader and fused weights, so an architecture is described once. The backend's own forward
pass serves ragged rows over a paged cache in inference mode, and autograd accepts no tensors from there; it writes the
answers (`answers.py`), where a cache is what is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from outpace.backends.torch.device import usable_bytes
from outpace.backends.torch.kernels.reference import rms_norm, rotate, swiglu
from outpace.backends.torch.model.loader import load_weights, open_checkpoint, weight_bytes
from outpace.backends.torch.model.weights import Weights
from outpace.backends.torch.storage import dense
from outpace.errors import ModelError, OutpaceError
from outpace.models.architecture import Architecture
from outpace.models.families import BY_CLASS_NAME
from outpace.models.fingerprint import fingerprint
from outpace.training.batches import Batch
from outpace.training.compiling import compiled


@dataclass(frozen=True, slots=True)
class Features:
    """What a head reads of a batch."""

    taps: Tensor  # [tokens, num_taps, width]: residuals after whole layers
    last: Tensor  # [tokens, width]: after the final norm, ready for the target's output matrix


class Target:
    def __init__(self, config: Architecture, weights: Weights, *, compile: bool = False) -> None:
        self.config = config
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.name = "target"
        self.fingerprint = ""
        self._rope = torch.zeros(0, config.head_dim, device=self.device)
        self._before = compiled(_before_attention, enabled=compile)
        self._after = compiled(_after_attention, enabled=compile)

    @staticmethod
    def load(path: Path, device: torch.device, dtype: torch.dtype, *, compile: bool = False) -> Target:
        try:
            checkpoint = open_checkpoint(path)
        except OutpaceError as error:
            raise ModelError(f"no head can be trained for {path.name}: {error}") from error
        if not checkpoint.config.is_llama_like:
            raise ModelError(
                f"no head can be trained for {path.name}: its family is {checkpoint.config.family}, and training knows "
                "layers like those of Llama, Mistral, Qwen2 and Qwen3 only; name a model of these"
            )
        needed, usable = weight_bytes(checkpoint, dtype), usable_bytes(device, 0.95)
        if usable is not None and needed > usable:
            raise ModelError(
                f"{checkpoint.name} needs {needed / 1e9:.1f} GB for its weights and {device} has {usable / 1e9:.1f} GB "
                "free; use a larger device"
            )
        # cuDNN plans anew for every shape, and a batch's length changes from step to step.
        torch.backends.cuda.enable_cudnn_sdp(False)
        target = Target(checkpoint.config, load_weights(checkpoint, dtype, device), compile=compile)
        target.name, target.fingerprint = checkpoint.name, fingerprint(path)
        return target

    @property
    def class_name(self) -> str:
        """As in a config.json."""
        return next(name for name, family in BY_CLASS_NAME.items() if family.name == self.config.family)

    def rope(self, positions: Tensor, longest: int) -> Tensor:
        """Cosines and sines, float32 [tokens, head_dim]; no position is `longest` or more."""
        if len(self._rope) < longest:
            self._rope = torch.from_numpy(self.config.rope.table(2 * longest)).to(self.device)
        return self._rope[positions]

    @torch.no_grad()
    def features(self, batch: Batch, taps: tuple[int, ...]) -> Features:
        config, weights = self.config, self.weights
        rope = self.rope(batch.positions(), batch.length)
        x = functional.embedding(batch.tokens, weights.embedding)
        found = []
        for number, layer in enumerate(weights.layers, start=1):
            q, k, v = self._before(
                x, layer.attention_norm, dense(layer.qkv, self.dtype), layer.qkv_bias, layer.q_norm, layer.k_norm,
                rope, config.num_heads, config.num_kv_heads, config.epsilon,
            )  # fmt: skip
            x = self._after(
                x, causal(q, k, v, batch.length), dense(layer.out, self.dtype), layer.out_bias, layer.mlp_norm,
                dense(layer.gate_up, self.dtype), layer.gate_up_bias, dense(layer.down, self.dtype), layer.down_bias,
                config.epsilon,
            )  # fmt: skip
            if number in taps:
                found.append(x)
        return Features(torch.stack(found, dim=1), rms_norm(x, weights.final_norm, config.epsilon))


def causal(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """Causal attention of rows of `length` tokens: q [tokens, heads, dim] to [tokens, heads * dim]."""
    shares = k.shape[1] != q.shape[1]
    q, k, v = (each.view(-1, length, *each.shape[1:]).transpose(1, 2) for each in (q, k, v))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shares)
    return mixed.transpose(1, 2).reshape(-1, mixed.shape[1] * mixed.shape[3])


# Tensors one by one and not as a Layer: compiled code then serves all layers.


def _before_attention(
    x: Tensor,
    norm: Tensor,
    qkv: Tensor,
    bias: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    rope: Tensor,
    num_heads: int,
    num_kv_heads: int,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    heads = functional.linear(rms_norm(x, norm, epsilon), qkv, bias).view(len(x), num_heads + 2 * num_kv_heads, -1)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, epsilon), rms_norm(k, k_norm, epsilon)
    return rotate(q, rope), rotate(k, rope), v.contiguous()


def _after_attention(
    x: Tensor,
    mixed: Tensor,
    out: Tensor,
    out_bias: Tensor | None,
    norm: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    epsilon: float,
) -> Tensor:
    x = x + functional.linear(mixed, out, out_bias)
    x_gate_up = functional.linear(rms_norm(x, norm, epsilon), gate_up, gate_up_bias)
    return x + functional.linear(swiglu(x_gate_up), down, down_bias)

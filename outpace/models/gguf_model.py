"""Reads a model's architecture and the role of each tensor from a GGUF header.

A file with any unknown tensor or setting is Unsupported, so that an unknown variant runs on llama.cpp instead of giving
wrong results. Only small float tensors are read here; `model_file.py` packs the matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outpace.models.architecture import Architecture
from outpace.models.families import BY_GGUF_NAME, Family
from outpace.models.gguf_header import GGUFHeader, Scalar, TensorInfo
from outpace.models.rope import Rope, unscaled, yarn

F32, F16, BF16 = 0, 1, 30
OUTSIDE = -1  # layer number of tensors outside the layers


# The numbers are those in csrc/model.h.
MATRICES = {
    "token_embd.weight": 0, "output.weight": 1, "attn_q.weight": 2, "attn_k.weight": 3, "attn_v.weight": 4,
    "attn_output.weight": 5, "ffn_gate.weight": 6, "ffn_up.weight": 7, "ffn_down.weight": 8,
}  # fmt: skip
VECTORS = {
    "output_norm.weight": 0, "attn_norm.weight": 1, "ffn_norm.weight": 2, "attn_q.bias": 3, "attn_k.bias": 4,
    "attn_v.bias": 5, "attn_output.bias": 6, "attn_q_norm.weight": 7, "attn_k_norm.weight": 8,
}  # fmt: skip
OPTIONAL = {"output.weight", "attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias"}
QK_NORMS = {"attn_q_norm.weight", "attn_k_norm.weight"}
OUTSIDE_NAMES = {"token_embd.weight", "output.weight", "output_norm.weight"}
ROPE_FACTORS = "rope_freqs.weight"
TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

# Keys that change the arithmetic and that no supported family sets.
_REFUSED_KEYS = {
    "expert_count": "a mixture of experts",
    "attention.sliding_window": "attention over a sliding window",
    "attention.scale": "a custom attention scale",
    "attention.clamp_kqv": "clamped attention inputs",
    "attention.temperature_length": "an attention temperature that depends on length",
    "logit_scale": "scaled logits",
    "final_logit_softcapping": "capped logits",
    "attn_logit_softcapping": "capped attention scores",
    "embedding_scale": "scaled embeddings",
    "residual_scale": "scaled residuals",
    "rope.scaling.attn_factor": "a custom RoPE attention factor",
}


class Unsupported(Exception):
    """Why a file is not supported, as a clause."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the file and its role in the model."""

    info: TensorInfo
    layer: int
    number: int
    is_matrix: bool

    @property
    def rows(self) -> int:
        return self.info.shape[1]

    @property
    def cols(self) -> int:
        return self.info.shape[0]


@dataclass(frozen=True, slots=True)
class Description:
    """What a backend needs to know about a file."""

    architecture: Architecture
    tensors: tuple[Tensor, ...]

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(tensor.info.shape) for tensor in self.tensors)


class _Metadata:
    def __init__(self, header: GGUFHeader) -> None:
        self._values, self._prefix = header.metadata, header.architecture

    def get(self, key: str) -> Scalar | None:
        return self._values.get(f"{self._prefix}.{key}")

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < 1 << 24:
            raise Unsupported(f"it has no usable {self._prefix}.{key} ({value!r})")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool | str) or value is None or not math.isfinite(value):
            raise Unsupported(f"it has no usable {self._prefix}.{key} ({value!r})")
        return float(value)


def describe(header: GGUFHeader, data: NDArray[np.uint8], supports: Callable[[int, int, int], Any]) -> Description:
    """Describe the file, or raise Unsupported. `data` is the file from its first tensor on;
    `supports(type, rows, cols)` says whether the library has a kernel for such a matrix."""
    family = BY_GGUF_NAME.get(header.architecture)
    if family is None:
        raise Unsupported(
            f"its architecture is {header.architecture or 'unknown'!r}; supported are {', '.join(BY_GGUF_NAME)}"
        )
    metadata = _Metadata(header)
    for key, meaning in _REFUSED_KEYS.items():
        if metadata.get(key):
            raise Unsupported(f"it has {meaning} ({header.architecture}.{key})")
    by_name = {info.name: info for info in header.tensors}
    factors = by_name.pop(ROPE_FACTORS, None)
    architecture = _architecture(metadata, family, by_name, None if factors is None else read_vector(factors, data))
    tensors = tuple(_place(info, family, architecture) for info in by_name.values())
    _check_complete(by_name, family, architecture)
    for tensor in tensors:
        if tensor.is_matrix and not supports(tensor.info.type, tensor.rows, tensor.cols):
            kind = TYPE_NAMES.get(tensor.info.type, f"type {tensor.info.type}")
            raise Unsupported(
                f"it holds {tensor.info.name} as {kind} of {tensor.rows} x {tensor.cols}, which has no kernel"
            )
        if not tensor.is_matrix and tensor.info.type not in (F32, F16, BF16):
            raise Unsupported(f"its tensor {tensor.info.name} is quantised, but floats are expected")
    return Description(architecture, tensors)


def _architecture(
    metadata: _Metadata, family: Family, by_name: dict[str, TensorInfo], factors: NDArray[np.float32] | None
) -> Architecture:
    width, num_heads = metadata.whole("embedding_length"), metadata.whole("attention.head_count")
    num_kv_heads = metadata.whole("attention.head_count_kv", num_heads)
    head_dim = metadata.whole("attention.key_length", max(width // num_heads, 1))
    if metadata.whole("attention.value_length", head_dim) != head_dim:
        raise Unsupported("it has keys and values of different lengths")
    if num_heads % num_kv_heads or head_dim % 8 or width % 8:
        raise Unsupported(f"it has {num_heads} heads of {head_dim} over {num_kv_heads}, which do not divide evenly")
    num_rotated = metadata.whole("rope.dimension_count", head_dim)
    if num_rotated > head_dim or num_rotated % 2:
        raise Unsupported(f"it rotates {num_rotated} of {head_dim} elements of a head")
    embedding = by_name.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise Unsupported("it has no token_embd.weight")
    return Architecture(
        family=family.name,
        num_layers=metadata.whole("block_count"),
        width=width,
        hidden=metadata.whole("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_rotated=num_rotated,
        vocab_size=embedding.shape[1],
        context=metadata.whole("context_length"),
        epsilon=_epsilon(metadata),
        halves_rotated=not family.is_permuted,
        rope=_rope(metadata, num_rotated, factors),
        tied="output.weight" not in by_name,
        qkv_bias="blk.0.attn_q.bias" in by_name,
        out_bias="blk.0.attn_output.bias" in by_name,
        has_qk_norm=family.has_qk_norm,
    )


def _epsilon(metadata: _Metadata) -> float:
    value = metadata.number("attention.layer_norm_rms_epsilon")
    if not 0 < value < 1:
        raise Unsupported(f"it has an RMS norm epsilon of {value}")
    return value


def _rope(metadata: _Metadata, num_rotated: int, factors: NDArray[np.float32] | None) -> Rope:
    """RoPE frequencies with the file's scaling."""
    base = metadata.number("rope.freq_base", 10000.0)
    if base <= 1:  # its logarithm is a divisor
        raise Unsupported(f"it has a RoPE base of {base}")
    frequencies = unscaled(base, num_rotated)
    if factors is not None:
        if factors.size != frequencies.size or not (factors > 0).all():
            raise Unsupported(f"it holds {factors.size} RoPE factors for {frequencies.size} pairs")
        frequencies = frequencies / factors
    kind = metadata.get("rope.scaling.type") or ("linear" if metadata.get("rope.scale_linear") else "none")
    if kind == "none":
        return Rope(frequencies)
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0))
    if factor <= 0:
        raise Unsupported(f"it has a RoPE scaling factor of {factor}")
    if kind == "linear":
        return Rope(frequencies / factor)
    if kind == "yarn":
        original = metadata.whole("rope.scaling.original_context_length")
        fast = metadata.number("rope.scaling.yarn_beta_fast", 32.0)
        slow = metadata.number("rope.scaling.yarn_beta_slow", 1.0)
        if fast <= 0 or slow <= 0:
            raise Unsupported(f"it has YaRN betas of {fast} and {slow}")
        return yarn(frequencies, factor, base, original, fast, slow)
    raise Unsupported(f"it has an unknown RoPE scaling, {kind!r}")


def _place(info: TensorInfo, family: Family, architecture: Architecture) -> Tensor:
    layer, name = OUTSIDE, info.name
    if name.startswith("blk."):
        _, number, name = name.split(".", 2) if name.count(".") >= 2 else ("", "", "")
        layer = int(number) if number.isascii() and number.isdigit() and len(number) < 6 else OUTSIDE
    is_known = (name in MATRICES or name in VECTORS) and (family.has_qk_norm or name not in QK_NORMS)
    is_outside = name in OUTSIDE_NAMES
    if not is_known or is_outside != (layer == OUTSIDE) or layer >= architecture.num_layers:
        raise Unsupported(f"it has an unknown tensor {info.name!r}")
    expected = _expected_shape(name, architecture)
    if info.shape != expected:
        raise Unsupported(f"it holds {info.name} of shape {list(info.shape)} where {list(expected)} is expected")
    return Tensor(info, layer, MATRICES.get(name, VECTORS.get(name, 0)), name in MATRICES)


def _expected_shape(name: str, a: Architecture) -> tuple[int, ...]:
    q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    return {
        "token_embd.weight": (a.width, a.vocab_size),
        "output.weight": (a.width, a.vocab_size),
        "attn_q.weight": (a.width, q),
        "attn_k.weight": (a.width, kv),
        "attn_v.weight": (a.width, kv),
        "attn_output.weight": (q, a.width),
        "ffn_gate.weight": (a.width, a.hidden),
        "ffn_up.weight": (a.width, a.hidden),
        "ffn_down.weight": (a.hidden, a.width),
        "attn_q.bias": (q,),
        "attn_k.bias": (kv,),
        "attn_v.bias": (kv,),
        "attn_q_norm.weight": (a.head_dim,),
        "attn_k_norm.weight": (a.head_dim,),
    }.get(name, (a.width,))


def _check_complete(by_name: dict[str, TensorInfo], family: Family, architecture: Architecture) -> None:
    required = (MATRICES.keys() | VECTORS.keys()) - OPTIONAL - (set() if family.has_qk_norm else QK_NORMS)
    for name in sorted(required):
        prefixes = [""] if name in OUTSIDE_NAMES else [f"blk.{i}." for i in range(architecture.num_layers)]
        for prefix in prefixes:
            if prefix + name not in by_name:
                raise Unsupported(f"it has no tensor {prefix}{name}")


def read_vector(info: TensorInfo, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """A small float tensor's values."""
    if info.num_bytes is None or info.offset + info.num_bytes > data.size:
        raise Unsupported(f"it ends before the end of its tensor {info.name}")
    raw = data[info.offset : info.offset + info.num_bytes]
    if info.type == F32:
        return raw.view(np.float32).copy()
    if info.type == F16:
        return raw.view(np.float16).astype(np.float32)
    if info.type == BF16:
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    raise Unsupported(f"its tensor {info.name} is quantised, but floats are expected")

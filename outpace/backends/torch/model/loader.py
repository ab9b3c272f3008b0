"""Loads a folder of safetensors, or a GGUF file, into weights on a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outpace.backends.torch.model.gguf_quants import as_planar, can_dequantise, dequantise, planar_format
from outpace.backends.torch.model.weights import (
    EMBEDDING,
    HEAD,
    FormatOf,
    Weights,
    all_dense,
    allocate,
    fill,
    num_weight_bytes,
)
from outpace.backends.torch.storage import Format
from outpace.backends.torch.storage.planar import PlanarFormat
from outpace.backends.torch.storage.rounding import KINDS, head_format
from outpace.backends.torch.storage.scaled import FP8_CAPABILITY, Scaled, ScaledFormat
from outpace.backends.torch.storage.stacked import Part
from outpace.errors import BackendError, ModelError
from outpace.models.architecture import Architecture
from outpace.models.gguf_header import TensorInfo, read_header
from outpace.models.gguf_model import OUTSIDE, Description, Unsupported, describe
from outpace.models.gguf_model import Tensor as PlacedTensor


class Checkpoint(Protocol):
    """A model on disk whose header was read; its weights were not read yet."""

    config: Architecture
    tied: bool
    name: str

    def stored(self, name: str) -> Format | None:
        """The format of a matrix in the file; None: dense, or a format that no kernel reads."""
        ...

    def tensors(self, device: torch.device, formats: FormatOf) -> Iterator[tuple[str, Part]]:
        """Every tensor under its Hugging Face name, one at a time. Those whose wanted format is the file's are given
        as they are stored, others dense. A tied head with a format is given too."""
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    if not path.is_dir():
        return GGUFFile(path)  # a machine that trains from a GGUF needs torch and no schemas
    from outpace.backends.torch.model.safetensors_folder import SafetensorsFolder

    return SafetensorsFolder(path)


def rounded(kind: str) -> FormatOf:
    """Every matrix of the layers in a format of `rounding.KINDS`; the embedding stays dense, because it is looked up
    and not multiplied."""

    def format_of(name: str) -> Format | None:
        return (
            head_format(kind) if name == HEAD else KINDS[kind] if name.endswith(("_proj.weight", "fc.weight")) else None
        )

    return format_of


def choose_formats(checkpoint: Checkpoint, wanted: str, dtype: torch.dtype, device: torch.device) -> FormatOf:
    """`wanted`: the setting `quantization`. Without a GPU there are no kernels that unpack weights as they read them:
    every product would dequantise its matrix first, so "auto" does that once."""
    is_auto = wanted == "auto" and device.type == "cuda" and dtype == torch.bfloat16
    if wanted in KINDS or wanted == "stored":
        check_device(wanted, dtype, device)
        check_experts(wanted, checkpoint.config)
        return rounded(wanted) if wanted in KINDS else _readable(checkpoint, device)
    return _readable(checkpoint, device) if is_auto else all_dense


def _readable(checkpoint: Checkpoint, device: torch.device) -> FormatOf:
    """The formats of the file, without those that no kernel or not this GPU can read."""
    has_fp8 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY

    def format_of(name: str) -> Format | None:
        stored = checkpoint.stored(name)
        is_unread = ".experts." in name and not isinstance(stored, ScaledFormat)
        return None if is_unread or (stored == KINDS["fp8"] and not has_fp8) else stored

    return format_of


def check_experts(wanted: str, config: Architecture) -> None:
    """Raise BackendError for a format that the kernels for experts do not read."""
    if config.experts is not None and isinstance(KINDS.get(wanted), PlanarFormat):
        raise BackendError(
            f"quantization {wanted!r} does not cover a model with {config.experts.count} experts, which are dense or "
            "have 8 bits and a scale for each row; use quantization 'fp8' or 'int8'"
        )


def choose_head_formats(wanted: str, dtype: torch.dtype, device: torch.device) -> FormatOf:
    """For a draft head, which is small: dense unless it is to be rounded."""
    if wanted not in KINDS:
        return all_dense
    check_device(wanted, dtype, device)
    return rounded(wanted)


def check_device(wanted: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise BackendError if the kernels for quantised weights do not run here."""
    if device.type != "cuda":
        return
    if dtype != torch.bfloat16:
        raise BackendError(
            f"quantization {wanted!r} needs dtype bfloat16 on a GPU and the dtype is "
            f"{str(dtype).removeprefix('torch.')}; set dtype 'bfloat16', or quantization 'none'"
        )
    if wanted in ("int4", "int4-128", "fp8") and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise BackendError(
            f"quantization {wanted!r} stores the output head, or all weights, in FP8, which needs a GPU of compute "
            "capability 8.9; use quantization 'int8'"
        )


def check_invariant(checkpoint: Checkpoint, dtype: torch.dtype, formats: FormatOf, num_devices: int) -> None:
    """Raise BackendError if a setting has no kernels whose sums do not depend on the step."""
    if num_devices > 1:
        raise BackendError(
            f"batch_invariant is set, but how {num_devices} devices add their parts depends on the step; use one device"
        )
    if not checkpoint.config.is_llama_like or any(checkpoint.config.windows):
        raise BackendError(
            f"batch_invariant is set, but models of the family {checkpoint.config.family} have no kernels whose sums "
            "do not depend on the step; Llama, Mistral, Qwen2 and Qwen3 have"
        )
    meta = allocate(checkpoint.config, tied=checkpoint.tied, dtype=dtype, device=torch.device("meta"), formats=formats)
    if any(not isinstance(weight, Tensor | Scaled) for weight in meta.tensors):
        raise BackendError(
            "batch_invariant needs weights that are dense or have 8 bits with a scale per row; set quantization "
            "'none', 'fp8' or 'int8'"
        )


def load_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, formats: FormatOf = all_dense
) -> Weights:
    weights = allocate(checkpoint.config, tied=checkpoint.tied, dtype=dtype, device=device, formats=formats)
    fill(weights, checkpoint.config, checkpoint.tensors(device, formats), checkpoint.name)
    return weights


def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype, formats: FormatOf = all_dense) -> int:
    return num_weight_bytes(checkpoint.config, tied=checkpoint.tied, dtype=dtype, formats=formats)


@dataclass(frozen=True, slots=True)
class _Renaming:
    """The Hugging Face name of a GGUF tensor; if its rows are permuted, the config field with the number of heads."""

    name: str
    permuted_heads: str | None = None


_LAYER_NAMES = {
    "attn_norm.weight": _Renaming("input_layernorm.weight"),
    "ffn_norm.weight": _Renaming("post_attention_layernorm.weight"),
    "attn_q.weight": _Renaming("self_attn.q_proj.weight", "num_heads"),
    "attn_k.weight": _Renaming("self_attn.k_proj.weight", "num_kv_heads"),
    "attn_v.weight": _Renaming("self_attn.v_proj.weight"),
    "attn_q.bias": _Renaming("self_attn.q_proj.bias", "num_heads"),
    "attn_k.bias": _Renaming("self_attn.k_proj.bias", "num_kv_heads"),
    "attn_v.bias": _Renaming("self_attn.v_proj.bias"),
    "attn_q_norm.weight": _Renaming("self_attn.q_norm.weight"),
    "attn_k_norm.weight": _Renaming("self_attn.k_norm.weight"),
    "attn_output.weight": _Renaming("self_attn.o_proj.weight"),
    "attn_output.bias": _Renaming("self_attn.o_proj.bias"),
    "ffn_gate.weight": _Renaming("mlp.gate_proj.weight"),
    "ffn_up.weight": _Renaming("mlp.up_proj.weight"),
    "ffn_down.weight": _Renaming("mlp.down_proj.weight"),
}
_OUTSIDE_NAMES = {
    "token_embd.weight": EMBEDDING,
    "output.weight": HEAD,
    "output_norm.weight": "model.norm.weight",
}


class GGUFFile:
    """A GGUF file. Dequantised, it is the same arithmetic as for a Hugging Face model, on the values in the file."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self.name = str(header.metadata.get("general.name") or path.stem)
        self._data = np.memmap(path, np.uint8, mode="r")[header.data_offset :]
        try:
            self._description: Description = describe(header, self._data, lambda kind, rows, cols: can_dequantise(kind))
        except Unsupported as reason:
            raise ModelError(f"the torch backend cannot run {path}: {reason}") from reason
        self.config = self._description.architecture
        self.tied = bool(self.config.tied)
        if self.config.num_rotated != self.config.head_dim:
            raise ModelError(
                f"the model applies RoPE to {self.config.num_rotated} of {self.config.head_dim} elements of a head; "
                "the torch backend needs all of them: use another backend"
            )
        named = {_renamed(placed).name: placed.info for placed in self._description.tensors}
        self._kinds = {name: info.type for name, info in named.items() if name.endswith("_proj.weight")}
        self._kinds[HEAD] = named[EMBEDDING if self.tied else HEAD].type

    def stored(self, name: str) -> Format | None:
        return planar_format(self._kinds[name]) if name in self._kinds else None

    def tensors(self, device: torch.device, formats: FormatOf) -> Iterator[tuple[str, Part]]:
        for placed in self._description.tensors:
            renaming = _renamed(placed)
            heads = renaming.permuted_heads if not self.config.halves_rotated else None
            data = self._bytes(placed.info, device, getattr(self.config, heads) if heads else None)
            names = [renaming.name]
            if renaming.name == EMBEDDING and self.tied and formats(HEAD) is not None:
                names.append(HEAD)
            for name in names:
                format = formats(name)
                if format is not None and format == self.stored(name):
                    yield name, as_planar(data, placed.info.type, placed.cols)
                else:
                    yield name, dequantise(data, placed.info.type).reshape(placed.info.shape[::-1])

    def _bytes(self, info: TensorInfo, device: torch.device, num_heads: int | None) -> Tensor:
        """[rows, bytes of a row]"""
        assert info.num_bytes is not None, "a type that can be dequantised has a size"
        data = torch.from_numpy(self._data[info.offset : info.offset + info.num_bytes].copy()).to(device)
        data = data.view(info.shape[-1], -1)
        return data if num_heads is None else _halves_together(data, num_heads)


def _renamed(placed: PlacedTensor) -> _Renaming:
    name = placed.info.name
    if placed.layer == OUTSIDE:
        return _Renaming(_OUTSIDE_NAMES[name])
    found = _LAYER_NAMES[name.split(".", 2)[2]]
    return replace(found, name=f"model.layers.{placed.layer}.{found.name}")


def _halves_together(tensor: Tensor, num_heads: int) -> Tensor:
    """Reorder rows: in Llama's GGUFs RoPE pairs neighbours; our kernels pair the first half with the second."""
    half = tensor.shape[0] // num_heads // 2
    return tensor.reshape(num_heads, half, 2, -1).transpose(1, 2).reshape(tensor.shape)

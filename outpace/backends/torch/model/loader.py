"""Loads a folder of safetensors, or a GGUF file, into weights on a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outpace.backends.torch.model.gguf_quants import can_dequantise, dequantise
from outpace.backends.torch.model.weights import HEAD, Weights, allocate, fill, num_weight_bytes
from outpace.errors import ModelError
from outpace.models.architecture import Architecture
from outpace.models.gguf_header import read_header
from outpace.models.gguf_model import OUTSIDE, Description, Unsupported, describe


class Checkpoint(Protocol):
    """A model on disk whose header was read; its weights were not read yet."""

    config: Architecture
    tied: bool
    name: str

    def tensors(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Every tensor under its Hugging Face name, one at a time."""
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    if not path.is_dir():
        return GGUFFile(path)  # a machine that trains from a GGUF needs torch and no schemas
    from outpace.backends.torch.model.safetensors_folder import SafetensorsFolder

    return SafetensorsFolder(path)


def load_weights(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Weights:
    weights = allocate(checkpoint.config, tied=checkpoint.tied, dtype=dtype, device=device)
    fill(weights, checkpoint.config, checkpoint.tensors(device), checkpoint.name)
    return weights


def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    return num_weight_bytes(checkpoint.config, tied=checkpoint.tied, dtype=dtype)


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
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": HEAD,
    "output_norm.weight": "model.norm.weight",
}


class GGUFFile:
    """A GGUF file, dequantised: the same arithmetic as for a Hugging Face model, on the values in the file."""

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

    def tensors(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        for placed in self._description.tensors:
            info = placed.info
            assert info.num_bytes is not None, "a type that can be dequantised has a size"
            data = torch.from_numpy(self._data[info.offset : info.offset + info.num_bytes].copy()).to(device)
            tensor = dequantise(data, info.type).reshape(info.shape[::-1])
            if placed.layer == OUTSIDE:
                yield _OUTSIDE_NAMES[info.name], tensor
                continue
            renaming = _LAYER_NAMES[info.name.split(".", 2)[2]]
            if renaming.permuted_heads and not self.config.halves_rotated:
                tensor = _halves_together(tensor, getattr(self.config, renaming.permuted_heads))
            yield f"model.layers.{placed.layer}.{renaming.name}", tensor


def _halves_together(tensor: Tensor, num_heads: int) -> Tensor:
    """Reorder rows: in Llama's GGUFs RoPE pairs neighbours; our kernels pair the first half with the second."""
    half = tensor.shape[0] // num_heads // 2
    return tensor.reshape(num_heads, half, 2, -1).transpose(1, 2).reshape(tensor.shape)

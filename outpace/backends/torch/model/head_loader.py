"""Opens a draft head: the GGUF file that `outpace distill` writes, or a folder in one of the formats people bring."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outpace.backends.torch.model.gguf_quants import can_dequantise, dequantise
from outpace.backends.torch.model.head_weights import HeadWeights, allocate_head
from outpace.backends.torch.model.weights import FormatOf, all_dense, copy_into, named_layer_tensors, one_part
from outpace.backends.torch.storage.stacked import Part
from outpace.core import MeasuredAcceptance
from outpace.models.architecture import Architecture
from outpace.models.fingerprint import fingerprint
from outpace.models.gguf_header import TensorInfo, read_header
from outpace.models.head_file import HeadConfig
from outpace.models.head_gguf import check_fits, describe_head

# The names inside a layer, in the GGUF and in our own.
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


class HeadCheckpoint(Protocol):
    """A head on disk that was found to fit the target; its weights were not read yet."""

    config: HeadConfig
    measured: MeasuredAcceptance | None  # how often its tokens were right on held-out prompts

    def load(self, dtype: torch.dtype, device: torch.device, formats: FormatOf = all_dense) -> HeadWeights:
        """Matrices with a format are rounded to it."""
        ...


def open_head(path: Path, target_path: Path, target: Architecture, target_name: str) -> HeadCheckpoint:
    if not path.is_dir():
        return GGUFHead(path, target_path, target, target_name)
    from outpace.backends.torch.model.head_folder import HeadFolder  # schemas, which training does not need

    return HeadFolder(path, target_path, target, target_name)


class GGUFHead:
    def __init__(self, path: Path, target_path: Path, target: Architecture, target_name: str) -> None:
        header = read_header(path)
        self._data = np.memmap(path, np.uint8, mode="r")[header.data_offset :]
        d = describe_head(path, header, self._data, lambda kind, rows, cols: can_dequantise(kind))
        check_fits(path, d, target, target_name, fingerprint(target_path))
        self._description = d
        self.measured = None if d.measured is None else MeasuredAcceptance(*d.measured)
        self.config = HeadConfig(
            width=d.width, hidden=d.hidden, num_heads=d.num_heads, num_kv_heads=d.num_kv_heads, head_dim=d.head_dim,
            vocab_size=target.vocab_size, draft_vocab_size=d.vocab_size, taps=d.taps, epsilon=d.epsilon,
        )  # fmt: skip

    def load(self, dtype: torch.dtype, device: torch.device, formats: FormatOf = all_dense) -> HeadWeights:
        d = self._description
        stored = {placed.info.name: placed.info for placed in d.tensors}
        weights = allocate_head(self.config, dtype, device, formats)
        weights.tap_norm = torch.empty((len(d.taps), d.width), dtype=dtype, device=device)
        layer = named_layer_tensors(weights.layer, self.config)
        places: dict[str, Part] = {f"blk.0.{ours}": layer[theirs] for ours, theirs in _LAYER_NAMES.items()}
        places |= {
            "blk.0.token_norm.weight": weights.token_norm, "fuse.weight": one_part(weights.fuse),
            "tap_norm.weight": weights.tap_norm, "output_norm.weight": weights.final_norm,
            "output.weight": one_part(weights.head),
        }  # fmt: skip
        for name, place in places.items():
            copy_into(place, self._read(stored[name], device).reshape(place.shape))
        weights.ids.copy_(torch.from_numpy(d.target_ids.astype(np.int64)))
        return weights

    def _read(self, info: TensorInfo, device: torch.device) -> Tensor:
        assert info.num_bytes is not None, "a type that can be dequantised has a size"
        data = torch.from_numpy(self._data[info.offset : info.offset + info.num_bytes].copy()).to(device)
        return dequantise(data, info.type)

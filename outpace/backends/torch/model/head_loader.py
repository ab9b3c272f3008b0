"""Loads a draft head into weights on a device, from the GGUF file that `outpace distill` writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outpace.backends.torch.model.gguf_quants import can_dequantise, dequantise
from outpace.backends.torch.model.head import HeadWeights
from outpace.backends.torch.model.weights import Layer
from outpace.models.architecture import Architecture
from outpace.models.fingerprint import gguf_fingerprint
from outpace.models.gguf_header import read_header
from outpace.models.head_gguf import HeadDescription, check_fits, describe_head


class HeadCheckpoint:
    """A head on disk whose header was read and found to fit the target."""

    def __init__(self, path: Path, target_path: Path, target: Architecture, target_name: str) -> None:
        header = read_header(path)
        self._data = np.memmap(path, np.uint8, mode="r")[header.data_offset :]
        self.description: HeadDescription = describe_head(
            path, header, self._data, lambda kind, rows, cols: can_dequantise(kind)
        )
        fingerprint = gguf_fingerprint(target_path, read_header(target_path))
        check_fits(path, self.description, target, target_name, fingerprint)

    @property
    def num_parameters(self) -> int:
        return sum(tensor.rows * tensor.cols for tensor in self.description.tensors if tensor.is_matrix)

    def load(self, dtype: torch.dtype, device: torch.device) -> HeadWeights:
        d = self.description
        by_name: dict[str, Tensor] = {}
        for placed in d.tensors:
            info = placed.info
            assert info.num_bytes is not None, "a type that can be dequantised has a size"
            data = torch.from_numpy(self._data[info.offset : info.offset + info.num_bytes].copy()).to(device)
            by_name[info.name] = dequantise(data, info.type).reshape(info.shape[::-1]).to(dtype)
        block = {name.removeprefix("blk.0."): tensor for name, tensor in by_name.items()}
        layer = Layer(
            attention_norm=block["attn_norm.weight"],
            qkv=torch.cat([block[f"attn_{x}.weight"] for x in "qkv"]),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            out=block["attn_output.weight"],
            out_bias=None,
            mlp_norm=block["ffn_norm.weight"],
            gate_up=torch.cat([block["ffn_gate.weight"], block["ffn_up.weight"]]),
            gate_up_bias=None,
            down=block["ffn_down.weight"],
            down_bias=None,
        )
        return HeadWeights(
            fuse=by_name["fuse.weight"],
            tap_norms=by_name["tap_norm.weight"].view(len(d.taps), d.width),
            token_norm=block["token_norm.weight"],
            layer=layer,
            final_norm=by_name["output_norm.weight"],
            head=by_name["output.weight"],
            ids=torch.from_numpy(d.target_ids.astype(np.int64)).to(device),
        )

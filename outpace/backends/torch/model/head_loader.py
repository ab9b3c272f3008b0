"""Opens a draft head: the GGUF file that `outpace distill` writes, or a folder in one of the formats people bring."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outpace.backends.torch.model.gguf_quants import can_dequantise, dequantise
from outpace.backends.torch.model.head_weights import HeadWeights
from outpace.backends.torch.model.weights import Layer
from outpace.core import MeasuredAcceptance
from outpace.models.architecture import Architecture
from outpace.models.fingerprint import fingerprint
from outpace.models.gguf_header import read_header
from outpace.models.head_file import HeadConfig
from outpace.models.head_gguf import check_fits, describe_head


class HeadCheckpoint(Protocol):
    """A head on disk that was found to fit the target; its weights were not read yet."""

    config: HeadConfig
    measured: MeasuredAcceptance | None  # how often its tokens were right on held-out prompts

    @property
    def num_parameters(self) -> int: ...

    def load(self, dtype: torch.dtype, device: torch.device) -> HeadWeights: ...


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
            kind="eagle3", num_layers=1, width=d.width, hidden=d.hidden, num_heads=d.num_heads,
            num_kv_heads=d.num_kv_heads, head_dim=d.head_dim, vocab_size=target.vocab_size,
            draft_vocab_size=d.vocab_size, taps=d.taps, epsilon=d.epsilon,
        )  # fmt: skip

    @property
    def num_parameters(self) -> int:
        return sum(tensor.rows * tensor.cols for tensor in self._description.tensors if tensor.is_matrix)

    def load(self, dtype: torch.dtype, device: torch.device) -> HeadWeights:
        d = self._description
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
            tap_norm=by_name["tap_norm.weight"].view(len(d.taps), d.width),
            token_norm=block["token_norm.weight"],
            layer=layer,
            final_norm=by_name["output_norm.weight"],
            head=by_name["output.weight"],
            ids=torch.from_numpy(d.target_ids.astype(np.int64)).to(device),
        )

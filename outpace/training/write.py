"""A head on disk: the checkpoint that training resumes from, the `speculators` folder, and the native file.

A checkpoint is cut into small files, so that it can travel from the machine with the GPU to one that packs it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from outpace.core import MeasuredAcceptance
from outpace.errors import ModelError, OutpaceError, UsageError
from outpace.models import head_gguf
from outpace.models.head_file import HeadConfig, read_head_config, write_config
from outpace.training.shards import load_sharded, save_sharded
from outpace.training.train import Progress

QUANTISATIONS = ("Q4_0", "Q4_1", "Q8_0")
_STEM = "checkpoint"
_KEPT = "kept"
_MEASURED_POSITIONS = 4

# Names in the native file, by the name in the `speculators` format.
_GGUF_NAMES = {
    "fc.weight": "fuse.weight",
    "layers.0.input_layernorm.weight": "blk.0.token_norm.weight",
    "layers.0.hidden_norm.weight": "blk.0.attn_norm.weight",
    "layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    config: HeadConfig
    parameters: dict[str, Tensor]  # float32
    kept: Tensor  # int64 [draft vocabulary]: the target's token ids, ascending
    progress: Progress


def save_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    tensors = {name: p.detach().to(torch.bfloat16) for name, p in checkpoint.parameters.items()}
    tensors[_KEPT] = checkpoint.kept.to(torch.int32)
    save_sharded(tensors, folder, _STEM, metadata={"progress": json.dumps(asdict(checkpoint.progress))})
    write_config(checkpoint.config, folder)


def load_checkpoint(folder: Path) -> Checkpoint:
    try:
        tensors, metadata = load_sharded(folder, _STEM)
    except FileNotFoundError as error:
        raise UsageError(f"{folder} holds no checkpoint of `outpace distill`; check the folder's name") from error
    kept = tensors.pop(_KEPT).long()
    parameters = {name: tensor.float() for name, tensor in tensors.items()}
    return Checkpoint(read_head_config(folder), parameters, kept, Progress(**json.loads(metadata["progress"])))


def pack(folder: Path, quantisation: str = "Q4_0") -> list[Path]:
    """Write model.safetensors and head.gguf from the checkpoint."""
    checkpoint = load_checkpoint(folder)
    return [
        _write_safetensors(checkpoint, folder),
        _write_gguf(checkpoint, measured_in(folder), folder / head_gguf.FILE, quantisation),
    ]


def _write_safetensors(checkpoint: Checkpoint, folder: Path) -> Path:
    kept = checkpoint.kept
    tensors = {name: p.to(torch.bfloat16).contiguous() for name, p in checkpoint.parameters.items()}
    tensors["d2t"] = kept - torch.arange(len(kept))
    tensors["t2d"] = torch.zeros(checkpoint.config.vocab_size, dtype=torch.bool).index_fill(0, kept, True)
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def measured_in(folder: Path) -> MeasuredAcceptance | None:
    """What the last evaluation in the training's log found; None if there is none."""
    try:
        lines = (folder / "training.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [values["evaluation"] for values in map(json.loads, lines) if "evaluation" in values]
    if not found:
        return None
    totals = [1.0, *found[-1]["tokens_a_step"]["all"]]
    reached = [b - a for a, b in pairwise(totals)]
    chances = [b / a if a > 0 else 0.0 for a, b in pairwise([1.0, *reached])]
    return MeasuredAcceptance(tuple(chances[:_MEASURED_POSITIONS]), tuple(found[-1]["overlap"][:_MEASURED_POSITIONS]))


def _write_gguf(checkpoint: Checkpoint, measured: MeasuredAcceptance | None, path: Path, quantisation: str) -> Path:
    try:
        import gguf
    except ImportError as error:
        raise OutpaceError(
            f"writing {path.name} needs the package gguf; pip install 'outpace[distill]', then `outpace distill pack "
            f"{path.parent}` (the rest of the head is written)"
        ) from error
    c = checkpoint.config
    writer = gguf.GGUFWriter(path, head_gguf.ARCHITECTURE)
    values: dict[str, Any] = {
        "format": head_gguf.FORMAT, "width": c.width, "hidden": c.hidden, "num_heads": c.num_heads,
        "num_kv_heads": c.num_kv_heads, "head_dim": c.head_dim, "epsilon": float(c.epsilon),
        "taps": ",".join(map(str, c.taps)), "target": str(c.target["fingerprint"]),
        "target_name": str(c.target["name"])[:200],
    }  # fmt: skip
    if measured is not None:
        values["acceptance_greedy"] = ",".join(f"{chance:.3f}" for chance in measured.greedy)
        values["acceptance_sampled"] = ",".join(f"{chance:.3f}" for chance in measured.sampled)
    for key, value in values.items():
        add: Any = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{head_gguf.ARCHITECTURE}.{key}", value)
    kind = getattr(gguf.GGMLQuantizationType, quantisation)
    for name, array in gguf_tensors(checkpoint.parameters, len(c.taps)).items():
        if array.ndim == 1:
            writer.add_tensor(name, array)
        elif array.shape[1] % 32:
            raise ModelError(f"{name} has rows of {array.shape[1]} elements, which {quantisation} cannot pack by 32")
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.add_tensor("target_ids", checkpoint.kept.numpy().astype(np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(parameters: Mapping[str, Tensor], num_taps: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """The arrays of the native file, by their names there."""
    norms = torch.cat([parameters[f"fc_norm.{i}.weight"] for i in range(num_taps)])
    found = {new: parameters[old].float().numpy() for old, new in _GGUF_NAMES.items()}
    return found | {"tap_norm.weight": norms.float().numpy()}

"""Tensors in safetensors files of limited size, large ones cut along their first axis.

Small files are easy to move between machines. Parts of a cut tensor are named `name#0`, `name#1`, ... and joined when
read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outpace.errors import ModelError

MAX_BYTES = 15 << 20


def save_sharded(
    tensors: Mapping[str, Tensor], folder: Path, stem: str, *, metadata: Mapping[str, str] | None = None,
    max_bytes: int = MAX_BYTES,
) -> list[Path]:  # fmt: skip
    """Write `stem.safetensors`, or `stem-00001-of-00002.safetensors` and so on. Replaces older ones."""
    shards = _distribute({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, max_bytes)
    count = len(shards)
    names = [f"{stem}.safetensors"] if count == 1 else [
        f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    old = set(_files(folder, stem))
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / f".{name}.part", metadata=dict(metadata or {}))
    for name in names:  # a reader, or an interruption, never meets a half-written file
        os.replace(folder / f".{name}.part", folder / name)
    for path in old - {folder / name for name in names}:
        path.unlink()
    return [folder / name for name in names]


def _distribute(tensors: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        for key, part in _cut(name, tensor, max_bytes):
            if used + part.nbytes > max_bytes and shards[-1]:
                shards.append({})
                used = 0
            shards[-1][key] = part
            used += part.nbytes
    return shards


def _cut(name: str, tensor: Tensor, max_bytes: int) -> list[tuple[str, Tensor]]:
    if tensor.nbytes <= max_bytes:
        return [(name, tensor)]
    rows = max(max_bytes // (tensor.nbytes // len(tensor)), 1)
    return [(f"{name}#{i}", part.contiguous()) for i, part in enumerate(tensor.split(rows))]


def _files(folder: Path, stem: str) -> list[Path]:
    whole = folder / f"{stem}.safetensors"
    return [whole] if whole.is_file() else sorted(folder.glob(f"{stem}-?????-of-?????.safetensors"))


def load_sharded(folder: Path, stem: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata; raises FileNotFoundError if there are none."""
    files = _files(folder, stem)
    if not files:
        raise FileNotFoundError(folder / f"{stem}.safetensors")
    if "-of-" in files[0].name and len(files) != int(files[0].stem.rsplit("-", 1)[1]):
        raise ModelError(f"{folder} lacks some of the files {files[0].stem.split('-')[0]}-*; copy all of them")
    parts: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                metadata |= file.metadata() or {}
                parts |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read ({error}); copy it again, or start over without it") from error
    joined: dict[str, Tensor] = {name: tensor for name, tensor in parts.items() if "#" not in name}
    for name in dict.fromkeys(key.split("#")[0] for key in parts if "#" in key):
        pieces = [parts[f"{name}#{i}"] for i in range(sum(key.split("#")[0] == name for key in parts))]
        joined[name] = torch.cat(pieces)
    return joined, metadata

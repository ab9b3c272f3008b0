"""A Hugging Face model on disk: config.json and one or more shards of safetensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outpace.backends.torch.model.weights import EMBEDDING, HEAD, FormatOf, check_shapes
from outpace.backends.torch.storage import Format
from outpace.backends.torch.storage.stacked import Part
from outpace.errors import ModelError
from outpace.models.hf_config import read_config
from outpace.models.hf_schema import ShardIndex, read_json, validate

INDEX = "model.safetensors.index.json"


class SafetensorsFolder:
    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.config = read_config(folder)
        self._shards = find_shards(folder)
        shapes = {name: shape for shard in self._shards for name, shape in tensor_shapes(shard).items()}
        self.tied = HEAD not in shapes if self.config.tied is None else self.config.tied
        check_shapes(shapes, self.config, tied=self.tied, source=self.name)

    def stored(self, name: str) -> Format | None:
        return None

    def tensors(self, device: torch.device, formats: FormatOf) -> Iterator[tuple[str, Part]]:
        for shard in self._shards:
            for name in tensor_shapes(shard):
                if name == HEAD and self.tied:
                    continue
                tensor = read_tensor(shard, name, device)
                yield name, tensor
                if name == EMBEDDING and self.tied and formats(HEAD) is not None:
                    yield HEAD, tensor


def find_shards(folder: Path) -> list[Path]:
    index = folder / INDEX
    try:
        values = read_json(index)
    except FileNotFoundError:
        shards = sorted(folder.glob("*.safetensors"))
        if not shards:
            raise ModelError(
                f"{folder} holds no .safetensors file; name a folder that has the model's weights in it"
            ) from None
        return shards
    listed = sorted(set(validate(ShardIndex, values, str(index)).weight_map.values()))
    for name in listed:
        if Path(name).name != name:  # a path may lead out of the folder
            raise ModelError(f"{index} lists the shard {name!r:.80}, which is not a file's name; download it again")
        if not (folder / name).is_file():
            raise ModelError(f"{folder} lacks the shard {name:.80} that its index lists; download it again")
    return [folder / name for name in listed]


def tensor_shapes(shard: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(shard, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{shard} is damaged ({error}); download it again") from error


def read_tensor(shard: Path, name: str, device: torch.device) -> Tensor:
    try:
        with safe_open(shard, framework="pt", device=str(device)) as file:
            tensor: Tensor = file.get_tensor(name)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{shard} cannot be read at {name} ({error}); download it again") from error
    return tensor

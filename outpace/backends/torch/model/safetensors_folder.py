"""A Hugging Face model on disk: config.json and one or more shards of safetensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outpace.backends.torch.model.naming import Naming, split
from outpace.backends.torch.model.weights import EMBEDDING, HEAD, FormatOf, check_shapes
from outpace.backends.torch.storage import Format, dense
from outpace.backends.torch.storage.layouts import MatrixLayout, layout_for
from outpace.backends.torch.storage.stacked import Part
from outpace.errors import ModelError
from outpace.models.hf_config import read_config, read_family, read_stored_quantization
from outpace.models.hf_schema import ShardIndex, read_json, validate

INDEX = "model.safetensors.index.json"


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8,
    "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
_CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale")  # of a quantised cache, which this backend does not have


class SafetensorsFolder:
    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.config = read_config(folder)
        stored = read_stored_quantization(folder)
        self._layout = None if stored is None else layout_for(stored)
        shards = find_shards(folder)
        self._shards = {name: shard for shard in shards for name in tensor_shapes(shard)}
        self._naming = Naming(read_family(folder), self.config)
        shapes = {
            name: shape
            for shard in shards
            for name, shape in tensor_shapes(shard).items()
            if not self._naming.is_ignored(name)
        }
        self._quantised: dict[str, dict[str, str]] = {}  # by the matrix: its tensors, by their endings
        self._formats: dict[str, Format] = {}
        if self._layout is not None:
            shapes = self._find_quantised(self._layout, shapes)
        self._pieces = {name: self._naming.pieces(name, shape, self.name) for name, shape in shapes.items()}
        self._formats = {
            piece.name: self._formats[name]
            for name, pieces in self._pieces.items()
            for piece in pieces
            if name in self._formats
        }
        shapes = {
            piece.name: (piece.end - piece.begin, *shapes[name][1:]) if shapes[name] else ()
            for name, pieces in self._pieces.items()
            for piece in pieces
        }
        self.tied = HEAD not in shapes if self.config.tied is None else self.config.tied
        check_shapes(shapes, self.config, tied=self.tied, source=self.name, spelled=self._naming.stored)

    def _find_quantised(
        self, layout: MatrixLayout, shapes: dict[str, tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]]:  # fmt: skip
        """The shapes of all tensors, with each quantised matrix as one under the name of its weight."""
        found = {name: shape for name, shape in shapes.items() if not name.endswith(_CACHE_SCALES)}
        for name in shapes:
            module, _, ending = name.rpartition(".")
            parts = {each: f"{module}.{each}" for each in (layout.main, *layout.others) if f"{module}.{each}" in shapes}
            if ending != layout.main or len(parts) == 1:  # some matrices of a quantised model are dense
                continue
            if len(shapes[name]) != 2:
                raise ModelError(f"{self.name} holds {name} of shape {list(shapes[name])}; download it again")
            for each in (*parts, *layout.ignored):
                found.pop(f"{module}.{each}", None)
            matrix = f"{module}.weight"
            found[matrix] = layout.shape(shapes[name])
            self._quantised[matrix] = parts
            headers = {each: (shapes[part], self._dtype(part)) for each, part in parts.items()}
            try:
                self._formats[matrix] = layout.format(headers)
            except KeyError as error:
                raise ModelError(f"{self.name} lacks {module}.{error.args[0]}; download it again") from error
        return found

    def _dtype(self, name: str) -> torch.dtype:
        stored = tensor_dtype(self._shards[name], name)
        if stored not in _DTYPES:
            raise ModelError(f"{self.name} holds {name} as {stored}, which is not read; get it in another format")
        return _DTYPES[stored]

    def stored(self, name: str) -> Format | None:
        return self._formats.get(EMBEDDING if name == HEAD and self.tied else name)

    def tensors(self, device: torch.device, formats: FormatOf) -> Iterator[tuple[str, Part]]:
        for stored, pieces in self._pieces.items():
            if self.tied and pieces[0].name == HEAD:
                continue
            for name, part in split(self._read(stored, device), pieces):
                tensor = self._naming.ordered(name, part)
                yield name, tensor if formats(name) == self._formats.get(name) else dense(tensor, torch.float32)
                if name == EMBEDDING and self.tied and formats(HEAD) is not None:
                    yield HEAD, tensor if formats(HEAD) == self.stored(HEAD) else dense(tensor, torch.float32)

    def _read(self, name: str, device: torch.device) -> Part:
        if self._layout is None or name not in self._quantised:
            return read_tensor(self._shards[name], name, device)
        parts = self._quantised[name]
        tensors = {each: read_tensor(self._shards[part], part, device) for each, part in parts.items()}
        try:
            return self._layout.read(tensors)
        except (RuntimeError, ValueError, KeyError) as error:
            raise ModelError(
                f"{self.name} holds {name} in tensors that do not belong together ({str(error).splitlines()[0]}); "
                "download it again"
            ) from error


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


def tensor_dtype(shard: Path, name: str) -> str:
    """As safetensors name it."""
    with safe_open(shard, framework="pt") as file:
        return str(file.get_slice(name).get_dtype())


def read_tensor(shard: Path, name: str, device: torch.device) -> Tensor:
    try:
        with safe_open(shard, framework="pt", device=str(device)) as file:
            tensor: Tensor = file.get_tensor(name)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{shard} cannot be read at {name} ({error}); download it again") from error
    return tensor

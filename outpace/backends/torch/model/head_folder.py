"""A draft head in a folder: config.json, and weights in safetensors or in a PyTorch file. Nothing in it is trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from outpace.backends.torch.model.head_weights import HeadWeights, allocate_head, named_head_tensors
from outpace.backends.torch.model.safetensors_folder import INDEX, find_shards, read_tensor, tensor_shapes
from outpace.backends.torch.model.weights import FormatOf, all_dense, copy_into
from outpace.core import MeasuredAcceptance
from outpace.errors import ModelError
from outpace.models.architecture import Architecture
from outpace.models.head_file import HeadConfig
from outpace.models.head_formats import canonical, read_head
from outpace.models.head_formats.fit import check_fits

_SAFETENSORS, _PICKLED = "model.safetensors", "pytorch_model.bin"
_CHECKPOINT = "checkpoint*.safetensors"  # what `outpace distill train` leaves
_OFFSETS = "d2t"  # of draft token i: the target's token is i + d2t[i]
# t2d says the same as d2t; the verifier's tensors are parts of the target, needed for training only.
_IGNORED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "layers.0.self_attn.rotary_emb.inv_freq")
_INTEGERS = (torch.int64, torch.int32, torch.int16)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class HeadFolder:
    """A head on disk that was found to fit the target; its weights were not read yet."""

    measured: MeasuredAcceptance | None = None  # nobody measured it here

    def __init__(self, folder: Path, target_path: Path, target: Architecture, target_name: str) -> None:
        self._source = f"the draft head {folder}"
        self._file = _open_file(folder)
        self._names = {canonical(name): name for name in self._file.shapes}
        self.config: HeadConfig = read_head(folder, self._names.keys(), target.num_layers)
        check_fits(folder, self.config, target, target_name, target_path)
        places = named_head_tensors(allocate_head(self.config, torch.float16, torch.device("meta")), self.config)
        self._shapes = {name: tuple(place.shape) for name, place in places.items()}
        self._check_tensors()

    def load(self, dtype: torch.dtype, device: torch.device, formats: FormatOf = all_dense) -> HeadWeights:
        weights = allocate_head(self.config, dtype, device, formats)
        for name, place in named_head_tensors(weights, self.config).items():
            tensor = self._read(name, _FLOATS)
            if not tensor.isfinite().all():
                raise ModelError(f"{self._source} has values in {name} that are not finite; download it again")
            copy_into(place, tensor)
        weights.ids.copy_(self._target_ids())
        return weights

    def _check_tensors(self) -> None:
        """Compare the tensors with the config before any memory is allocated for them."""
        vocabulary = {_OFFSETS: (self.config.draft_vocab_size,)} if self._has_own_vocabulary else {}
        expected = self._shapes | vocabulary
        missing = [name for name in expected if name not in self._names]
        if missing:
            raise ModelError(f"{self._source} has no tensor {missing[0]}; it is damaged, so download it again")
        for name, stored in self._names.items():
            found = self._file.shapes[stored]
            if name not in expected and name not in (*_IGNORED, _OFFSETS):
                raise ModelError(
                    f"{self._source} has an unknown tensor {name:.80}; it needs a feature that is not read"
                )
            if name in expected and found != expected[name]:
                raise ModelError(
                    f"{self._source} holds {name} of shape {list(found)} and its config.json asks for "
                    f"{list(expected[name])}; the files do not belong together, download them again"
                )

    @property
    def _has_own_vocabulary(self) -> bool:
        return self.config.draft_vocab_size != self.config.vocab_size

    def _target_ids(self) -> Tensor:
        """The target's token of every draft token."""
        ids = torch.arange(self.config.draft_vocab_size)
        if self._has_own_vocabulary:
            ids += self._read(_OFFSETS, _INTEGERS)
        if ids.min() < 0 or ids.max() >= self.config.vocab_size or len(ids.unique()) != len(ids):
            raise ModelError(
                f"{self._source} has tokens in d2t outside the target's {self.config.vocab_size}, or twice; "
                "it is damaged, so download it again"
            )
        return ids

    def _read(self, name: str, dtypes: tuple[torch.dtype, ...]) -> Tensor:
        tensor = self._file.read(self._names[name])
        if tensor.dtype not in dtypes:
            raise ModelError(
                f"{self._source} holds {name} as {str(tensor.dtype).removeprefix('torch.')}, which is not read; "
                "get the head in bfloat16, float16 or float32"
            )
        return tensor


class _File(Protocol):
    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> Tensor: ...


class _Safetensors:
    def __init__(self, paths: list[Path]) -> None:
        self._paths = {name: path for path in paths for name in tensor_shapes(path)}
        self.shapes = {name: shape for path in paths for name, shape in tensor_shapes(path).items()}

    def read(self, name: str) -> Tensor:
        return read_tensor(self._paths[name], name, torch.device("cpu"))


class _PickledTensors:
    """A file of `torch.save`, read by torch's restricted unpickler, which makes tensors and plain containers only."""

    def __init__(self, path: Path) -> None:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # an unpickler may raise anything for a damaged file
            raise ModelError(
                f"{path} is not a file of tensors alone ({type(error).__name__}); download it again, or convert it to "
                "safetensors"
            ) from error
        if not isinstance(found, dict) or not all(_is_dense(value) for value in found.values()):
            raise ModelError(f"{path} holds something else than named tensors; convert it to safetensors")
        self._tensors: dict[str, Tensor] = {str(name): tensor for name, tensor in found.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def _is_dense(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized


def _open_file(folder: Path) -> _File:
    """`outpace distill` keeps other safetensors in the same folder, so the usual names come first."""
    if (folder / _SAFETENSORS).is_file():
        return _Safetensors([folder / _SAFETENSORS])
    if not (folder / INDEX).is_file() and (folder / _PICKLED).is_file():
        return _PickledTensors(folder / _PICKLED)
    if any(folder.glob(_CHECKPOINT)):
        raise ModelError(
            f"the draft head {folder} is a checkpoint of training; write its weights first: "
            f"outpace distill pack {folder}"
        )
    return _Safetensors(find_shards(folder))

"""Which part of a model a rank holds.

Attention is split by heads and the MLP by its hidden elements, so each needs one sum over the ranks at its end. If
there are fewer key heads than ranks, some ranks hold the same one. The output head is split by tokens. The embedding is
whole on every rank: a step reads a few of its rows, and splitting it would need one more sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from outpace.backends.torch.model.loader import Checkpoint
from outpace.backends.torch.model.weights import HEAD, FormatOf, Weights, all_dense, allocate, fill
from outpace.backends.torch.storage import Format, dense
from outpace.backends.torch.storage import allocate as allocate_matrix
from outpace.backends.torch.storage.planar import Planar, PlanarFormat
from outpace.backends.torch.storage.rounding import quantise
from outpace.backends.torch.storage.scaled import Scaled
from outpace.backends.torch.storage.stacked import Part
from outpace.errors import UsageError
from outpace.models.architecture import Architecture

_BY_QUERY, _BY_KEY, _BY_HIDDEN = ("q_proj",), ("k_proj", "v_proj"), ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class Shard:
    rank: int
    size: int  # number of ranks

    def check(self, config: Architecture) -> None:
        """Raises if the model cannot be split among so many ranks."""
        if not _fits(config, self.size):
            fitting = [str(size) for size in range(1, config.num_heads + 1) if _fits(config, size)]
            raise UsageError(
                f"the model has {config.num_heads} heads, {config.num_kv_heads} key heads and {config.hidden} hidden "
                f"elements, which {self.size} ranks cannot share evenly; set tensor_parallel_size to one of "
                f"{', '.join(fitting)}"
            )

    def of(self, config: Architecture) -> Architecture:
        """The architecture of this rank's part."""
        return replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=max(config.num_kv_heads // self.size, 1),
            hidden=config.hidden // self.size,
        )

    def num_vocab_rows(self, config: Architecture) -> int:
        """Tokens of which each rank computes the logits; the last rank's may end in padding."""
        return -(-config.vocab_size // self.size)

    def formats(self, whole: FormatOf, config: Architecture) -> FormatOf:
        """How this rank stores its matrices, if the whole model's are stored as `whole` says: dense where a part would
        divide what a format stores together."""
        mine = self.of(config)
        columns = {"o_proj": mine.q_size, "down_proj": mine.hidden}

        def format_of(name: str) -> Format | None:
            format = whole(name)
            kind = name.split(".")[-2] if "." in name else ""
            is_divided = isinstance(format, PlanarFormat) and columns.get(kind, 0) % format.quantum != 0
            return None if is_divided else format

        return format_of

    def part(self, name: str, tensor: Part, config: Architecture) -> Part:
        """This rank's part of a tensor of the whole model, whose architecture is `config`."""
        if name == HEAD:
            return self._vocab_rows(tensor)
        kind, end = name.split(".")[-2:] if "." in name else (name, "")
        mine = self.of(config)
        first_key = self.rank * config.num_kv_heads // self.size
        if kind in _BY_QUERY:
            return _rows(tensor, self.rank * mine.q_size, mine.q_size)
        if kind in _BY_KEY:
            return _rows(tensor, first_key * config.head_dim, mine.kv_size)
        if kind in _BY_HIDDEN:
            return _rows(tensor, self.rank * mine.hidden, mine.hidden)
        if kind == "o_proj" and end == "weight":
            return _columns(tensor, self.rank * mine.q_size, mine.q_size)
        if kind == "down_proj" and end == "weight":
            return _columns(tensor, self.rank * mine.hidden, mine.hidden)
        return tensor

    def _vocab_rows(self, head: Part) -> Part:
        num_tokens = head.shape[0]
        rows = -(-num_tokens // self.size)
        begin = min(self.rank * rows, num_tokens)
        count = min(rows, num_tokens - begin)
        mine = _rows(head, begin, count)
        if isinstance(mine, Tensor):
            return functional.pad(mine, (0, 0, 0, rows - count))
        padded = allocate_matrix(mine.format, rows, mine.shape[1], torch.float32, mine.device)
        assert isinstance(padded, Planar | Scaled)
        for each in padded.tensors:
            each.zero_()
        padded.rows(0, count).copy_(mine)  # type: ignore[arg-type]
        return padded


def _rows(tensor: Part, begin: int, count: int) -> Part:
    return tensor.narrow(0, begin, count) if isinstance(tensor, Tensor) else tensor.rows(begin, begin + count)


def _columns(tensor: Part, begin: int, count: int) -> Part:
    return tensor.narrow(1, begin, count) if isinstance(tensor, Tensor) else tensor.columns(begin, begin + count)


def _fits(config: Architecture, size: int) -> bool:
    shares_keys = config.num_kv_heads % size == 0 or size % config.num_kv_heads == 0
    return config.num_heads % size == 0 and config.hidden % size == 0 and shares_keys


def allocate_shard(
    checkpoint: Checkpoint, shard: Shard, dtype: torch.dtype, device: torch.device, formats: FormatOf
) -> Weights:
    """Tensors for a rank's part of a model; `formats` are the rank's. A tied head is set after the embedding is
    filled."""
    config, own = checkpoint.config, formats(HEAD)
    layers: FormatOf = lambda name: None if name == HEAD else formats(name)  # noqa: E731
    weights = allocate(shard.of(config), tied=True, dtype=dtype, device=device, formats=layers)
    if not checkpoint.tied or own is not None:
        weights.head = allocate_matrix(own, shard.num_vocab_rows(config), config.width, dtype, device)
    return weights


def load_shard(
    checkpoint: Checkpoint, shard: Shard, dtype: torch.dtype, device: torch.device, formats: FormatOf = all_dense
) -> Weights:
    """A rank's part of a model whose matrices are stored as `formats` says."""
    config, mine = checkpoint.config, shard.formats(formats, checkpoint.config)
    weights = allocate_shard(checkpoint, shard, dtype, device, mine)

    def parts() -> Iterator[tuple[str, Part]]:
        for name, tensor in checkpoint.tensors(device, mine):
            wanted = formats(name)
            if wanted is not None and wanted != checkpoint.stored(name):
                tensor = quantise(tensor, wanted)  # before it is split: the same values as on one device
                tensor = tensor if mine(name) is not None else dense(tensor, dtype)
            yield name, shard.part(name, tensor, config)

    fill(weights, shard.of(config), parts(), checkpoint.name)
    if checkpoint.tied and mine(HEAD) is None:
        head = shard.part(HEAD, weights.embedding, config)
        assert isinstance(head, Tensor)
        weights.head = head
    return weights


def num_shard_bytes(checkpoint: Checkpoint, shard: Shard, dtype: torch.dtype, formats: FormatOf = all_dense) -> int:
    """Bytes of a rank's weights; allocates nothing."""
    mine = shard.formats(formats, checkpoint.config)
    return allocate_shard(checkpoint, shard, dtype, torch.device("meta"), mine).num_bytes

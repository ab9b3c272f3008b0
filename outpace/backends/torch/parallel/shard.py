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
from outpace.backends.torch.model.weights import HEAD, Weights, all_dense, allocate, fill
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

    def part(self, name: str, tensor: Tensor, config: Architecture) -> Tensor:
        """This rank's part of a tensor of the whole model, whose architecture is `config`."""
        if name == HEAD:
            return self._vocab_rows(tensor)
        kind, end = name.split(".")[-2:] if "." in name else (name, "")
        mine = self.of(config)
        first_key = self.rank * config.num_kv_heads // self.size
        if kind in _BY_QUERY:
            return tensor.narrow(0, self.rank * mine.q_size, mine.q_size)
        if kind in _BY_KEY:
            return tensor.narrow(0, first_key * config.head_dim, mine.kv_size)
        if kind in _BY_HIDDEN:
            return tensor.narrow(0, self.rank * mine.hidden, mine.hidden)
        if kind == "o_proj" and end == "weight":
            return tensor.narrow(1, self.rank * mine.q_size, mine.q_size)
        if kind == "down_proj" and end == "weight":
            return tensor.narrow(1, self.rank * mine.hidden, mine.hidden)
        return tensor

    def _vocab_rows(self, head: Tensor) -> Tensor:
        rows = -(-len(head) // self.size)
        mine = head[self.rank * rows : (self.rank + 1) * rows]
        return functional.pad(mine, (0, 0, 0, rows - len(mine)))


def _fits(config: Architecture, size: int) -> bool:
    shares_keys = config.num_kv_heads % size == 0 or size % config.num_kv_heads == 0
    return config.num_heads % size == 0 and config.hidden % size == 0 and shares_keys


def allocate_shard(
    config: Architecture, shard: Shard, *, tied: bool, dtype: torch.dtype, device: torch.device
) -> Weights:
    """Tensors for a rank's part of a model. A tied head is set after the embedding is filled."""
    weights = allocate(shard.of(config), tied=True, dtype=dtype, device=device)
    if not tied:
        weights.head = torch.empty((shard.num_vocab_rows(config), config.width), dtype=dtype, device=device)
    return weights


def load_shard(checkpoint: Checkpoint, shard: Shard, dtype: torch.dtype, device: torch.device) -> Weights:
    config = checkpoint.config
    weights = allocate_shard(config, shard, tied=checkpoint.tied, dtype=dtype, device=device)

    def parts() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in checkpoint.tensors(device, all_dense):
            assert isinstance(tensor, Tensor)
            yield name, shard.part(name, tensor, config)

    fill(weights, shard.of(config), parts(), checkpoint.name)
    if checkpoint.tied:
        weights.head = shard.part(HEAD, weights.embedding, config)
    return weights


def num_shard_bytes(checkpoint: Checkpoint, shard: Shard, dtype: torch.dtype) -> int:
    """Bytes of a rank's weights; allocates nothing."""
    made = allocate_shard(
        checkpoint.config, shard, tied=checkpoint.tied, dtype=dtype, device=torch.device("meta")
    )  # fmt: skip
    return made.num_bytes

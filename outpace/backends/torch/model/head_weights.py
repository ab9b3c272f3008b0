"""The tensors of a draft head, and the place of each checkpoint tensor in them, by the names of `speculators`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.backends.torch import storage
from outpace.backends.torch.model.weights import (
    FormatOf,
    Layer,
    all_dense,
    allocate_layer,
    named_layer_tensors,
    one_part,
)
from outpace.backends.torch.storage import Weight
from outpace.backends.torch.storage.stacked import Part
from outpace.models.head_file import HeadConfig


@dataclass(slots=True)
class HeadWeights:
    fuse: Weight  # [width, taps * target's width]
    tap_norm: Tensor | None  # [taps, target's width]: one norm per tap; [taps * target's width]: one for all
    token_norm: Tensor
    layer: Layer  # qkv is [q + 2 kv, 2 width]: token, then state
    final_norm: Tensor
    head: Weight  # [draft vocabulary, width]
    ids: Tensor  # int64 [draft vocabulary]: the target's tokens
    embedding: Tensor | None = None  # [vocabulary, width]; None: the target's

    @property
    def num_bytes(self) -> int:
        named = [getattr(self.layer, name) for name in Layer.__dataclass_fields__]
        mine = [self.fuse, self.tap_norm, self.token_norm, self.final_norm, self.head, self.ids, self.embedding]
        return sum(tensor.nbytes for tensor in [*mine, *named] if tensor is not None)


def allocate_head(
    config: HeadConfig, dtype: torch.dtype, device: torch.device, formats: FormatOf = all_dense
) -> HeadWeights:
    """Uninitialised tensors for a head's weights."""

    def room(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    c, num_taps = config, len(config.taps)
    norms = {"none": None, "each": (num_taps, c.tap_width), "joint": (num_taps * c.tap_width,)}
    norm = norms[c.tap_norm]
    return HeadWeights(
        fuse=storage.allocate(formats("fc.weight"), c.width, num_taps * c.tap_width, dtype, device),
        tap_norm=room(*norm) if norm is not None else None,
        token_norm=room(c.width),
        layer=allocate_layer(c, inputs=2 * c.width, dtype=dtype, device=device, formats=formats),
        final_norm=room(c.width),
        head=storage.allocate(formats("lm_head.weight"), c.draft_vocab_size, c.width, dtype, device),
        ids=torch.empty(c.draft_vocab_size, dtype=torch.int64, device=device),
        embedding=room(c.vocab_size, c.width) if c.has_embedding else None,
    )


def named_head_tensors(weights: HeadWeights, config: HeadConfig) -> dict[str, Part]:
    """A view for every tensor that a checkpoint must have, except its vocabulary."""
    w = weights
    found: dict[str, Part] = {
        "fc.weight": one_part(w.fuse), "norm.weight": w.final_norm, "lm_head.weight": one_part(w.head),
    }  # fmt: skip
    layer = named_layer_tensors(w.layer, config)
    layer["hidden_norm.weight"], layer["input_layernorm.weight"] = w.layer.attention_norm, w.token_norm
    found |= {f"layers.0.{name}": place for name, place in layer.items()}
    if w.tap_norm is not None and config.tap_norm == "each":
        found |= {f"fc_norm.{i}.weight": place for i, place in enumerate(w.tap_norm)}
    elif w.tap_norm is not None:
        found["input_norm.weight"] = w.tap_norm
    if w.embedding is not None:
        found["embed_tokens.weight"] = w.embedding
    return found

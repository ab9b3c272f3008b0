"""The tensors of a model, fused for the forward pass, and the place of each checkpoint tensor in them.

Queries, keys and values are one matrix, gate and up another: one kernel launch each. A checkpoint is copied tensor by
tensor into place; a missing or unknown tensor, or another shape, is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outpace.backends.torch import storage
from outpace.backends.torch.storage import Format, Weight, dense, split_rows
from outpace.backends.torch.storage.rounding import round_into
from outpace.backends.torch.storage.stacked import Part
from outpace.errors import ModelError
from outpace.models.architecture import Architecture

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FormatOf = Callable[[str], Format | None]  # how to store a matrix, by its Hugging Face name; None: dense
_IGNORED_ENDINGS = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")  # buffers that old checkpoints carry


def all_dense(name: str) -> Format | None:
    return None


class LayerConfig(Protocol):
    """What `allocate_layer` reads: the sizes and options of a model's layers, or of a draft head's."""

    @property
    def width(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def q_size(self) -> int: ...
    @property
    def kv_size(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def out_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def has_qk_norm(self) -> bool: ...


@dataclass(slots=True)
class Layer:
    attention_norm: Tensor  # [width]
    qkv: Weight  # [q + 2 kv, inputs]; the inputs are the width, in a draft head twice that
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    out: Weight  # [width, q]
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Weight  # [2 hidden, width]; of several experts, one after the other
    gate_up_bias: Tensor | None
    down: Weight  # [width, hidden]; likewise
    down_bias: Tensor | None
    attention_output_norm: Tensor | None = None
    mlp_output_norm: Tensor | None = None
    router: Tensor | None = None  # [experts, width]


@dataclass(slots=True)
class Weights:
    embedding: Tensor  # [vocab_size, width]
    head: Weight  # [vocab_size, width]; the embedding itself if tied
    final_norm: Tensor
    layers: list[Layer]

    @property
    def tensors(self) -> list[Weight]:
        named = [getattr(layer, name) for layer in self.layers for name in Layer.__dataclass_fields__]
        outside = [self.embedding, self.final_norm, *([] if self.head is self.embedding else [self.head])]
        return [tensor for tensor in [*outside, *named] if tensor is not None]

    @property
    def dense_head(self) -> Tensor:
        """For training, which loads dense weights."""
        assert isinstance(self.head, Tensor)
        return self.head

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def allocate(
    config: Architecture, *, tied: bool, dtype: torch.dtype, device: torch.device, formats: FormatOf = all_dense
) -> Weights:
    """Uninitialised tensors for a model's weights. A tied head in a format of its own is a copy of the embedding."""
    c = config
    norm_dtype = _norm_dtype(c, dtype)
    layers = [
        allocate_layer(
            c, inputs=c.width, dtype=dtype, device=device, norm_dtype=norm_dtype, has_output_norms=c.has_output_norms,
            num_experts=c.experts.count if c.experts else 0,
            formats=lambda name, prefix=f"model.layers.{i}.": formats(prefix + name),  # type: ignore[misc]
        )
        for i in range(c.num_layers)
    ]  # fmt: skip
    embedding = torch.empty((c.vocab_size, c.width), dtype=dtype, device=device)
    own = formats(HEAD)
    head = embedding if tied and own is None else storage.allocate(own, c.vocab_size, c.width, dtype, device)
    return Weights(embedding, head, torch.empty(c.width, dtype=norm_dtype, device=device), layers)


def _norm_dtype(config: Architecture, dtype: torch.dtype) -> torch.dtype:
    """1 + a small weight needs more bits than the weight."""
    return torch.float32 if config.has_offset_norms else dtype


def allocate_layer(
    config: LayerConfig,
    *,
    inputs: int,
    dtype: torch.dtype,
    device: torch.device,
    formats: FormatOf = all_dense,
    norm_dtype: torch.dtype | None = None,
    has_output_norms: bool = False,
    num_experts: int = 0,
) -> Layer:
    """Uninitialised tensors for one layer; `inputs`: the width of what queries, keys and values are computed from.
    `formats`: by the names inside the layer."""

    def room(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def norm(width: int) -> Tensor:
        return torch.empty(width, dtype=norm_dtype or dtype, device=device)

    def maybe(wanted: bool, *shape: int) -> Tensor | None:
        return room(*shape) if wanted else None

    def fused(names: Iterable[str], rows: list[int], columns: int) -> Weight:
        return storage.allocate_fused([formats(f"{name}_proj.weight") for name in names], rows, columns, dtype, device)

    c = config
    mlps = [f"mlp.experts.{e}" for e in range(num_experts)] or ["mlp"]
    return Layer(
        attention_norm=norm(c.width),
        qkv=fused((f"self_attn.{x}" for x in "qkv"), [c.q_size, c.kv_size, c.kv_size], inputs),
        qkv_bias=maybe(c.qkv_bias, c.q_size + 2 * c.kv_size),
        q_norm=norm(c.head_dim) if c.has_qk_norm else None,
        k_norm=norm(c.head_dim) if c.has_qk_norm else None,
        out=fused(["self_attn.o"], [c.width], c.q_size),
        out_bias=maybe(c.out_bias, c.width),
        mlp_norm=norm(c.width),
        gate_up=fused([f"{mlp}.{x}" for mlp in mlps for x in ("gate", "up")], [c.hidden] * 2 * len(mlps), c.width),
        gate_up_bias=maybe(c.mlp_bias, 2 * c.hidden),
        down=fused([f"{mlp}.down" for mlp in mlps], [c.width] * len(mlps), c.hidden),
        down_bias=maybe(c.mlp_bias, c.width),
        attention_output_norm=norm(c.width) if has_output_norms else None,
        mlp_output_norm=norm(c.width) if has_output_norms else None,
        router=maybe(num_experts > 0, num_experts, c.width),
    )


def num_weight_bytes(config: Architecture, *, tied: bool, dtype: torch.dtype, formats: FormatOf = all_dense) -> int:
    """Bytes that `allocate` will use; allocates nothing."""
    return allocate(config, tied=tied, dtype=dtype, device=torch.device("meta"), formats=formats).num_bytes


def check_shapes(
    found: Mapping[str, tuple[int, ...]],
    config: Architecture,
    *,
    tied: bool,
    source: str,
    spelled: Callable[[str], str] = str,
) -> None:
    """Compare a checkpoint's tensors with its config before any memory is allocated for them. `spelled`: the
    checkpoint's own name for a tensor."""
    made = allocate(config, tied=tied, dtype=torch.float16, device=torch.device("meta"))
    expected = {name: tuple(place.shape) for name, place in named_tensors(made, config).items()}
    for name, shape in found.items():
        if name in expected:
            _check_shape(spelled(name), shape, expected[name], source)
    _check_none_missing([spelled(name) for name in expected if name not in found], source)


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...], source: str) -> None:
    if found != expected:
        raise ModelError(
            f"{source} holds {name} of shape {list(found)} and its config.json asks for {list(expected)}; "
            "the files do not belong together, download them again"
        )


def _check_none_missing(missing: list[str], source: str) -> None:
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{source} lacks {missing[0]}{more}; download it again, with all its shards")


def fill(weights: Weights, config: Architecture, checkpoint: Iterable[tuple[str, Part]], source: str) -> None:
    """Copy every tensor of a checkpoint, under its Hugging Face name, to its place. A dense tensor whose place has a
    format is rounded to it."""
    places = named_tensors(weights, config)
    shapes = {name: tuple(place.shape) for name, place in places.items()}
    for name, tensor in checkpoint:
        place = places.pop(name, None)
        if place is None:
            if (name == HEAD and weights.head is weights.embedding) or name.endswith(_IGNORED_ENDINGS):
                continue
            cause = "twice" if name in shapes else "but its config.json has no such tensor"
            raise ModelError(f"{source} holds {name} {cause}; the files do not belong together, download them again")
        _check_shape(name, tuple(tensor.shape), shapes[name], source)
        if config.has_offset_norms and name.endswith("norm.weight"):
            tensor = 1 + dense(tensor, torch.float32).float()
        copy_into(place, tensor)
    _check_none_missing(list(places), source)


def copy_into(place: Part, tensor: Part) -> None:
    """A dense tensor is rounded to the format of its place."""
    if isinstance(place, Tensor):
        place.copy_(dense(tensor, place.dtype))
    elif isinstance(tensor, Tensor):
        round_into(place, tensor)
    else:
        assert type(place) is type(tensor)
        place.copy_(tensor)  # type: ignore[arg-type]


def named_tensors(weights: Weights, config: Architecture) -> dict[str, Part]:
    """A view for every tensor a checkpoint must have, by its Hugging Face name."""
    found: dict[str, Part] = {EMBEDDING: weights.embedding, "model.norm.weight": weights.final_norm}
    if weights.head is not weights.embedding:
        found[HEAD] = one_part(weights.head)
    for i, layer in enumerate(weights.layers):
        found |= {f"model.layers.{i}.{name}": place for name, place in named_layer_tensors(layer, config).items()}
    return found


def one_part(weight: Weight) -> Part:
    [found] = split_rows(weight, [weight.shape[0]])
    return found


def named_layer_tensors(layer: Layer, config: LayerConfig) -> dict[str, Part]:
    """The same for one layer, by the names inside it."""
    placed: dict[str, Part | None] = {
        "input_layernorm.weight": layer.attention_norm,
        "post_attention_layernorm.weight": layer.mlp_norm,
        "self_attn.q_norm.weight": layer.q_norm,
        "self_attn.k_norm.weight": layer.k_norm,
        "self_attn.o_proj.weight": one_part(layer.out),
        "self_attn.o_proj.bias": layer.out_bias,
        "attention_output_norm.weight": layer.attention_output_norm,
        "mlp_output_norm.weight": layer.mlp_output_norm,
        "mlp.gate.weight": layer.router,
        "mlp.down_proj.bias": layer.down_bias,
    }
    qkv = [config.q_size, config.kv_size, config.kv_size]
    for end, fused in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
        if fused is not None:
            names = [f"self_attn.{x}_proj.{end}" for x in "qkv"]
            placed |= dict(zip(names, split_rows(fused, qkv), strict=True))
    mlps = ["mlp"] if layer.router is None else [f"mlp.experts.{e}" for e in range(len(layer.router))]
    for end, fused in (("weight", layer.gate_up), ("bias", layer.gate_up_bias)):
        if fused is not None:
            names = [f"{mlp}.{x}_proj.{end}" for mlp in mlps for x in ("gate", "up")]
            placed |= dict(zip(names, split_rows(fused, [config.hidden] * len(names)), strict=True))
    names = [f"{mlp}.down_proj.weight" for mlp in mlps]
    placed |= dict(zip(names, split_rows(layer.down, [config.width] * len(mlps)), strict=True))
    return {name: place for name, place in placed.items() if place is not None}

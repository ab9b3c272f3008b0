"""Reads a model's shape and its bytes from the header of a GGUF file, of any architecture."""

from __future__ import annotations

import math
from pathlib import Path

from outpace.errors import ModelError
from outpace.models.gguf_header import GGUFHeader, Scalar
from outpace.plan.shapes import Experts, Latent, Shape

_DEFAULT_CONTEXT = 2048


def shape_of_gguf(header: GGUFHeader, path: Path) -> Shape:
    """From the metadata, and from the shapes of tensors where the metadata holds lists."""
    metadata = _Metadata(header, path)
    tensors = {info.name: info.shape for info in header.tensors}
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise ModelError(f"{path} has no token_embd.weight, so it is not a language model; name the model's GGUF file")
    width, heads = metadata.whole("embedding_length"), metadata.whole("attention.head_count")
    head_dim = metadata.whole("attention.key_length", max(width // heads, 1))
    keys = tensors.get("blk.0.attn_k.weight")
    kv_heads = metadata.whole("attention.head_count_kv", keys[1] // head_dim if keys else heads)
    hidden = metadata.whole("feed_forward_length", metadata.whole("expert_feed_forward_length", 4 * width))
    window = metadata.whole("attention.sliding_window", 0, least=0)
    layers, context = metadata.whole("block_count"), metadata.whole("context_length", _DEFAULT_CONTEXT)
    mixture, latent = metadata.experts(hidden), metadata.latent()
    try:
        return Shape(
            layers=layers,
            width=width,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=embedding[1],
            context=context,
            tied="output.weight" not in tensors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            out_bias="blk.0.attn_output.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            norms_per_layer=4 if "blk.0.post_ffw_norm.weight" in tensors else 2,
            window=window,
            windowed_layers=layers // 2 if window else 0,
            experts=mixture,
            latent=latent,
        )
    except ModelError as error:
        raise ModelError(f"{path} does not describe a model: {error}; convert the model again") from error


def gguf_bytes(header: GGUFHeader, path: Path) -> tuple[float, float, float]:
    """Bytes of the layers, of the embeddings, and of the output head (0: the embeddings serve as it)."""
    layers = embedding = output = 0.0
    for info in header.tensors:
        if info.num_bytes is None:
            raise ModelError(f"{path} holds {info.name} in a type that is not known; update Outpace")
        if info.name == "token_embd.weight":
            embedding += info.num_bytes
        elif info.name == "output.weight":
            output += info.num_bytes
        else:
            layers += info.num_bytes
    return layers, embedding, output


def num_gguf_parameters(header: GGUFHeader) -> int:
    return sum(math.prod(info.shape) for info in header.tensors)


class _Metadata:
    def __init__(self, header: GGUFHeader, path: Path) -> None:
        self._values, self._prefix, self._path = header.metadata, header.architecture, path

    def get(self, key: str) -> Scalar | None:
        return self._values.get(f"{self._prefix}.{key}")

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not int or not least <= value < 1 << 24:
            raise ModelError(f"{self._path} has no usable {self._prefix}.{key} ({value!r}); convert the model again")
        return value

    def experts(self, hidden: int) -> Experts | None:
        count = self.whole("expert_count", 0, least=0)
        if count < 2:
            return None
        return Experts(
            count,
            min(self.whole("expert_used_count", 2), count),
            self.whole("expert_feed_forward_length", hidden),
            self.whole("expert_shared_count", 0, least=0),
            self.whole("leading_dense_block_count", 0, least=0),
        )

    def latent(self) -> Latent | None:
        rank = self.whole("attention.kv_lora_rank", 0, least=0)
        if not rank:
            return None
        rope = self.whole("rope.dimension_count", 64)
        whole = self.whole("attention.key_length_mla", self.whole("attention.key_length"))
        value = self.whole("attention.value_length_mla", self.whole("attention.value_length"))
        return Latent(rank, rope, max(whole - rope, 1), value, self.whole("attention.q_lora_rank", 0, least=0))

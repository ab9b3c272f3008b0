"""Reads the GGUF file of a draft head: its sizes, the target it was trained for, and the role of each tensor.

A head is one layer that reads the target's hidden states after some layers, its taps (csrc/model.h has the arithmetic).
Matrices use RoPE on the two halves of a head. `target_ids` lists the tokens that the head can draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outpace.errors import ModelError
from outpace.models.architecture import Architecture
from outpace.models.gguf_header import GGUFHeader, TensorInfo
from outpace.models.gguf_model import F32, OUTSIDE, Tensor, read_vector

Chances = tuple[float, ...]
FILE = "head.gguf"  # in a head's folder
ARCHITECTURE = "outpace-head"
FORMAT = 1
I32 = 26

# The numbers are those in csrc/model.h.
MATRICES = {
    "output.weight": 1, "blk.0.attn_q.weight": 2, "blk.0.attn_k.weight": 3, "blk.0.attn_v.weight": 4,
    "blk.0.attn_output.weight": 5, "blk.0.ffn_gate.weight": 6, "blk.0.ffn_up.weight": 7, "blk.0.ffn_down.weight": 8,
    "fuse.weight": 9,
}  # fmt: skip
VECTORS = {
    "output_norm.weight": 0, "blk.0.attn_norm.weight": 1, "blk.0.ffn_norm.weight": 2, "tap_norm.weight": 9,
    "blk.0.token_norm.weight": 10,
}  # fmt: skip
TARGET_IDS = "target_ids"


@dataclass(frozen=True, slots=True)
class HeadDescription:
    target: str  # fingerprint of the model it was trained for
    target_name: str
    taps: tuple[int, ...]  # numbers of layers, ascending
    width: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    epsilon: float
    measured: tuple[Chances, Chances] | None  # how often each token was right on held-out prompts: greedy, sampled
    target_ids: NDArray[np.int32]
    tensors: tuple[Tensor, ...]

    @property
    def cache_elements_per_token(self) -> int:
        """Keys and values of an entry, and the hidden states that the target keeps."""
        return 2 * self.num_kv_heads * self.head_dim + len(self.taps) * self.width


def describe_head(
    path: Path, header: GGUFHeader, data: NDArray[np.uint8], supports: Callable[[int, int, int], Any]
) -> HeadDescription:
    """Describe the file, or raise ModelError. `data` is the file from its first tensor on."""
    reader = _Reader(path, header)
    reader.check(header.architecture == ARCHITECTURE, "it is not a draft head")
    version = reader.whole("format")
    reader.check(version == FORMAT, f"it has format {version} and this version of Outpace reads {FORMAT}")
    width, num_heads, head_dim = reader.whole("width"), reader.whole("num_heads"), reader.whole("head_dim")
    num_kv_heads, hidden = reader.whole("num_kv_heads"), reader.whole("hidden")
    taps = reader.taps()
    reader.check(num_heads % num_kv_heads == 0, f"{num_heads} heads do not divide evenly over {num_kv_heads}")
    by_name = {info.name: info for info in header.tensors}
    ids = by_name.pop(TARGET_IDS, None)
    reader.check(ids is not None and ids.type == I32 and len(ids.shape) == 1, f"it has no usable tensor {TARGET_IDS}")
    assert ids is not None
    target_ids = data[ids.offset : ids.offset + 4 * ids.shape[0]].view(np.int32)
    reader.check(target_ids.size == ids.shape[0] > 0, "it ends before the end of its tensors")
    shapes = _shapes(width, hidden, num_heads * head_dim, num_kv_heads * head_dim, len(taps), target_ids.size)
    reader.check(by_name.keys() == shapes.keys(), _difference(set(by_name), set(shapes)))
    tensors = [reader.place(by_name[name], shape, supports) for name, shape in shapes.items()]
    for tensor in tensors:
        if not tensor.is_matrix:
            reader.check(bool(np.isfinite(read_vector(tensor.info, data)).all()), f"{tensor.info.name} is not finite")
    return HeadDescription(
        target=reader.text("target"),
        target_name=reader.text("target_name"),
        taps=taps,
        width=width,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=int(target_ids.size),
        epsilon=reader.epsilon(),
        measured=reader.measured(),
        target_ids=target_ids.copy(),
        tensors=tuple(tensors),
    )


def check_fits(path: Path, head: HeadDescription, target: Architecture, target_name: str, fingerprint: str) -> None:
    """Raise ModelError if the head was trained for another model."""
    remedy = "name that model, or train a head for this one: outpace distill"
    if head.target != fingerprint:
        raise ModelError(
            f"the draft head {path} was trained for {head.target_name} ({head.target}) and the model is {target_name} "
            f"({fingerprint}); {remedy}"
        )
    known = head.target_ids
    fits = head.width == target.width and head.taps[-1] <= target.num_layers and head.head_dim >= target.num_rotated
    if not fits or known.min() < 0 or known.max() >= target.vocab_size or len(set(known.tolist())) != known.size:
        raise ModelError(f"the sizes of the draft head {path} do not fit the model {target_name}; {remedy}")


class _Reader:
    def __init__(self, path: Path, header: GGUFHeader) -> None:
        self._path = path
        self._values = header.metadata

    def check(self, ok: bool, cause: str) -> None:
        if not ok:
            raise ModelError(f"the draft head {self._path} cannot be used: {cause}; write it again: outpace distill")

    def whole(self, key: str) -> int:
        value = self._values.get(f"{ARCHITECTURE}.{key}")
        self.check(type(value) is int and 0 < value < 1 << 24, f"it has no usable {key} ({value!r})")
        assert isinstance(value, int)
        return value

    def text(self, key: str) -> str:
        value = self._values.get(f"{ARCHITECTURE}.{key}")
        self.check(isinstance(value, str) and 0 < len(value) <= 200, f"it has no usable {key}")
        assert isinstance(value, str)
        return value

    def epsilon(self) -> float:
        value = self._values.get(f"{ARCHITECTURE}.epsilon")
        self.check(isinstance(value, float) and 0 < value < 1, f"it has no usable epsilon ({value!r})")
        assert isinstance(value, float)
        return value

    def measured(self) -> tuple[Chances, Chances] | None:
        """Written as text, such as "0.65,0.62,0.61"."""
        if self._values.get(f"{ARCHITECTURE}.acceptance_greedy") is None:
            return None
        return self._chances("acceptance_greedy"), self._chances("acceptance_sampled")

    def _chances(self, key: str) -> Chances:
        try:
            chances = tuple(float(part) for part in self.text(key).split(","))
        except ValueError:
            chances = ()
        self.check(bool(chances) and all(0 <= chance <= 1 for chance in chances), f"it has no usable {key}")
        return chances

    def taps(self) -> tuple[int, ...]:
        """Written as text, such as "3,15,30"."""
        parts = self.text("taps").split(",")
        self.check(all(p.isascii() and p.isdigit() and len(p) < 6 for p in parts), "its taps are not numbers of layers")
        taps = tuple(int(part) for part in parts)
        self.check(taps[0] > 0 and list(taps) == sorted(set(taps)) and len(taps) <= 64, "its taps are not in order")
        return taps

    def place(self, info: TensorInfo, shape: tuple[int, ...], supports: Callable[[int, int, int], Any]) -> Tensor:
        self.check(info.shape == shape, f"it holds {info.name} of shape {list(info.shape)}, not {list(shape)}")
        is_matrix = info.name in MATRICES
        usable = supports(info.type, shape[1], shape[0]) if is_matrix else info.type == F32
        self.check(bool(usable), f"it holds {info.name} in a type that is not supported")
        layer = 0 if info.name.startswith("blk.") else OUTSIDE
        return Tensor(info, layer, (MATRICES if is_matrix else VECTORS)[info.name], is_matrix)


def _shapes(width: int, hidden: int, q: int, kv: int, num_taps: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, fastest dimension first as in GGUF."""
    return {
        "fuse.weight": (num_taps * width, width),
        "tap_norm.weight": (num_taps * width,),
        "blk.0.token_norm.weight": (width,),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.attn_q.weight": (2 * width, q),
        "blk.0.attn_k.weight": (2 * width, kv),
        "blk.0.attn_v.weight": (2 * width, kv),
        "blk.0.attn_output.weight": (q, width),
        "blk.0.ffn_norm.weight": (width,),
        "blk.0.ffn_gate.weight": (width, hidden),
        "blk.0.ffn_up.weight": (width, hidden),
        "blk.0.ffn_down.weight": (hidden, width),
        "output_norm.weight": (width,),
        "output.weight": (width, vocab_size),
    }


def _difference(found: set[str], wanted: set[str]) -> str:
    missing, unknown = sorted(wanted - found), sorted(found - wanted)
    return f"it has no tensor {missing[0]}" if missing else f"it has an unknown tensor {unknown[0]}" if unknown else ""

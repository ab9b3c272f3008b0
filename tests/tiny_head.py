"""Writes a small random draft head for a small random model, and computes its drafts in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from outpace.config import SamplingParams
from outpace.core import Request
from outpace.decoding.sampling import Shaper
from outpace.models.fingerprint import fingerprint
from tests.numpy_reference import Floats, ReferenceModel
from tests.requests_helper import make_request
from tests.tiny_gguf import VOCAB_SIZE

IDS = tuple(range(3, VOCAB_SIZE, 2))  # the tokens it can draft


def write_head(
    path: Path,
    target: Path,
    *,
    kind: str = "F32",
    seed: int = 1,
    width: int = 64,
    hidden: int = 32,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    taps: str = "1,2",
    metadata: dict[str, Any] | None = None,
    change: dict[str, Any] | None = None,
) -> Path:
    """`metadata` replaces keys; `change` replaces tensors by arrays, or drops them (None)."""
    import gguf

    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "outpace-head")
    keys: dict[str, Any] = {
        "format": 1, "width": width, "hidden": hidden, "num_heads": num_heads, "num_kv_heads": num_kv_heads,
        "head_dim": head_dim, "epsilon": 1e-5, "taps": taps, "target_name": "tiny",
        "target": fingerprint(target),
    }  # fmt: skip
    for key, value in (keys | (metadata or {})).items():
        add: Any = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"outpace-head.{key}", value)
    count, q, kv = taps.count(",") + 1, num_heads * head_dim, num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fuse.weight": (width, count * width),
        "tap_norm.weight": (count * width,),
        "blk.0.token_norm.weight": (width,),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.attn_q.weight": (q, 2 * width),
        "blk.0.attn_k.weight": (kv, 2 * width),
        "blk.0.attn_v.weight": (kv, 2 * width),
        "blk.0.attn_output.weight": (width, q),
        "blk.0.ffn_norm.weight": (width,),
        "blk.0.ffn_gate.weight": (hidden, width),
        "blk.0.ffn_up.weight": (hidden, width),
        "blk.0.ffn_down.weight": (width, hidden),
        "output_norm.weight": (width,),
        "output.weight": (len(IDS), width),
    }
    tensors: dict[str, Any] = {}
    for name, shape in shapes.items():
        scale = 1.5 / np.sqrt(shape[-1]) if len(shape) == 2 else 0.1
        tensors[name] = (rng.normal(size=shape) * scale + (len(shape) == 1)).astype(np.float32)
    tensors["target_ids"] = np.array(IDS, np.int32)
    quantisation = getattr(gguf.GGMLQuantizationType, kind)
    for name, values in (tensors | (change or {})).items():
        if values is None:
            continue
        if values.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, quantisation), raw_dtype=quantisation)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def request_of(length: int, seq: int = 0, text: int = 0, **params: Any) -> Request:
    """A request with a random text, which `text` numbers. Greedy if nothing else is given."""
    rng = np.random.default_rng(text)
    request = make_request([int(token) for token in rng.integers(0, VOCAB_SIZE, length)])
    request.params = SamplingParams(**({"temperature": 0.0} | params))
    request.shaper = Shaper(request.params, request.prompt, frozenset())
    request.seed = request.params.seed or 0
    request.seq = seq
    return request


class ReferenceHead:
    def __init__(self, path: Path, target: Path, *, rounds_taps: bool = True) -> None:
        import gguf

        self.target = ReferenceModel.load(target)
        self._rounds_taps = rounds_taps
        reader = gguf.GGUFReader(path)
        fields = {name.removeprefix("outpace-head."): field.contents() for name, field in reader.fields.items()}
        self.taps = [int(tap) for tap in fields["taps"].split(",")]
        # The layer's attention is an ordinary one, with wider inputs and rotated halves.
        self._layer = replace(
            self.target, architecture="halves", num_heads=fields["num_heads"], num_kv_heads=fields["num_kv_heads"],
            head_dim=fields["head_dim"], num_rotated=self.target.num_rotated,
        )  # fmt: skip
        self.tensors: dict[str, Any] = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape([int(n) for n in t.shape[::-1]])
            for t in reader.tensors
            if t.name != "target_ids"
        }

    def draft(self, tokens: list[int], depth: int, path: Sequence[int] = ()) -> tuple[list[int], list[Floats]]:
        """The likeliest tokens after a text, one after another, and the logits of each over the head's vocabulary; or,
        instead of the first of them, those of a path."""
        taps = self.target.residuals(tokens[:-1], self.taps)
        taps = [_rounded(tap) for tap in taps] if self._rounds_taps else taps
        norm, t, width = self.target._norm, self.tensors, taps[0].shape[-1]
        weights = t["tap_norm.weight"].reshape(-1, width)
        fused = np.concatenate([norm(tap, weight) for tap, weight in zip(taps, weights, strict=True)], -1)
        states, drafted, logits = fused @ t["fuse.weight"].T, list[int](), list[Floats]()
        text = tokens[1:]
        for _ in range(depth):
            last = self._last_state(states, text)
            logits.append(np.asarray(norm(last, t["output_norm.weight"]) @ t["output.weight"].T, np.float32))
            place = len(drafted)
            drafted.append(path[place] if place < len(path) else IDS[int(logits[-1].argmax())])
            states, text = np.concatenate([states, last[None]]), [*text, drafted[-1]]
        return drafted, logits

    def _last_state(self, states: Floats, tokens: list[int]) -> Floats:
        t, norm = self.tensors, self.target._norm
        layer = {name.removeprefix("blk.0."): values for name, values in t.items()}
        embedded = self.target.tensors["token_embd.weight"][tokens]
        joined = np.concatenate(
            [norm(embedded, layer["token_norm.weight"]), norm(states, layer["attn_norm.weight"])], -1
        )
        x = states + self._layer._attention(layer, np.asarray(joined, np.float32))
        h = norm(x, layer["ffn_norm.weight"])
        gate, up = h @ layer["ffn_gate.weight"].T, h @ layer["ffn_up.weight"].T
        return np.asarray((x + (gate / (1 + np.exp(-gate)) * up) @ layer["ffn_down.weight"].T)[-1], np.float32)


def _rounded(x: Floats) -> Floats:
    """Rounded to bfloat16, as taps are stored."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)

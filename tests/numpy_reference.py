"""A decoder in float32 numpy, written from the papers: what every backend should compute, apart from rounding.

It reads a GGUF with the `gguf` package, dequantises every tensor, and runs whole sequences without a cache. It uses
no code of the native backend, so it cannot share its mistakes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass
class ReferenceModel:
    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_rotated: int
    epsilon: float
    rope_base: float
    rope_factor: float  # linear scaling
    tensors: dict[str, Floats]

    @classmethod
    def load(cls, path: Path) -> ReferenceModel:
        import gguf

        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer")}
        architecture = fields["general.architecture"]

        def get(key: str, default: Any = None) -> Any:
            return fields.get(f"{architecture}.{key}", default)

        width, heads = get("embedding_length"), get("attention.head_count")
        head_dim = get("attention.key_length", width // heads)
        tensors = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type)
            .reshape([int(n) for n in t.shape[::-1]])
            .astype(np.float32)
            for t in reader.tensors
        }
        return cls(
            architecture, get("block_count"), heads, get("attention.head_count_kv", heads), head_dim,
            get("rope.dimension_count", head_dim), get("attention.layer_norm_rms_epsilon"), get("rope.freq_base", 1e4),
            get("rope.scaling.factor", 1.0), tensors,
        )  # fmt: skip

    def logits(self, tokens: list[int]) -> Floats:
        """Logits after every token, [len(tokens), vocab_size]."""
        head = self.tensors.get("output.weight", self.tensors["token_embd.weight"])
        return np.asarray(self.states(tokens) @ head.T, np.float32)

    def states(self, tokens: list[int]) -> Floats:
        """Hidden states after the final norm, [len(tokens), width]."""
        (x,) = self.residuals(tokens, [self.num_layers])
        return self._norm(x, self.tensors["output_norm.weight"])

    def residuals(self, tokens: list[int], after: list[int]) -> list[Floats]:
        """The residual stream after these numbers of layers, each [len(tokens), width]."""
        x, found = self.tensors["token_embd.weight"][tokens], list[Floats]()
        for i in range(self.num_layers):
            layer = {
                name.removeprefix(f"blk.{i}."): t for name, t in self.tensors.items() if re.match(rf"blk\.{i}\.", name)
            }
            x = x + self._attention(layer, self._norm(x, layer["attn_norm.weight"]))
            h = self._norm(x, layer["ffn_norm.weight"])
            gate, up = h @ layer["ffn_gate.weight"].T, h @ layer["ffn_up.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["ffn_down.weight"].T
            if i + 1 in after:
                found.append(x)
        return found

    def _norm(self, x: Floats, weight: Floats) -> Floats:
        return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.epsilon)) * weight, np.float32)

    def _attention(self, layer: dict[str, Floats], h: Floats) -> Floats:
        n, dim = len(h), self.head_dim

        def project(name: str, heads: int) -> Floats:
            y = h @ layer[f"attn_{name}.weight"].T + layer.get(f"attn_{name}.bias", np.float32(0))
            return np.asarray(y, np.float32).reshape(n, heads, dim)

        q, k = project("q", self.num_heads), project("k", self.num_kv_heads)
        v = project("v", self.num_kv_heads)
        if "attn_q_norm.weight" in layer:
            q, k = self._norm(q, layer["attn_q_norm.weight"]), self._norm(k, layer["attn_k_norm.weight"])
        q, k = self._rope(q), self._rope(k)
        group = self.num_heads // self.num_kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.float32(np.sqrt(dim))
        scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(n, -1)
        return np.asarray(
            mixed @ layer["attn_output.weight"].T + layer.get("attn_output.bias", np.float32(0)), np.float32
        )

    def _rope(self, x: Floats) -> Floats:
        """x is [tokens, heads, dim]. Rotated pairs are neighbours in Llama's files, and the two halves elsewhere."""
        half = self.num_rotated // 2
        frequencies = self.rope_base ** (-np.arange(half) / half) / self.rope_factor
        if "rope_freqs.weight" in self.tensors:
            frequencies = frequencies / self.tensors["rope_freqs.weight"]
        angles = np.outer(np.arange(len(x)), frequencies)[:, None, :]
        cosines, sines = np.cos(angles), np.sin(angles)
        first, second = (
            (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
            if self.architecture == "llama"
            else (slice(0, half), slice(half, 2 * half))
        )
        out = x.copy()
        out[..., first] = x[..., first] * cosines - x[..., second] * sines
        out[..., second] = x[..., first] * sines + x[..., second] * cosines
        return out


def mean_kl(reference: Floats, other: Floats) -> float:
    """Mean over positions of KL(reference || other) between next-token distributions, from logits."""

    def log_softmax(x: Floats) -> NDArray[np.float64]:
        shifted = x.astype(np.float64) - x.max(-1, keepdims=True)
        return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))

    p, q = log_softmax(reference), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(-1).mean())

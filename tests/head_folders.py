"""Writes small random draft heads in the formats that people bring, and computes them in numpy.

The numpy head reads one token at a time and is told its options by the test, so it shares nothing with the readers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.numpy_reference import Floats


@dataclass(frozen=True, kw_only=True)
class Options:
    """The defaults fit `write_model(..., num_layers=8)` of tiny_gguf."""

    form: Literal["safeailab", "speculators"] = "safeailab"
    taps: tuple[int, ...] = (2, 4, 5)
    tap_norm: Literal["none", "each", "joint"] = "none"
    norm_before_residual: bool = False
    norm_output: bool = False
    has_embedding: bool = False
    bias: bool = False
    qk_norm: bool = False
    width: int = 64
    target_width: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    epsilon: float = 1e-4
    theta: float = 700.0
    vocab_size: int = 280
    draft_vocab_size: int = 150
    config: dict[str, Any] = field(default_factory=dict)  # replaces keys; None drops one
    layer_config: dict[str, Any] = field(default_factory=dict)  # the same for the layer's keys


def write_head_folder(folder: Path, options: Options, *, seed: int = 3) -> Path:
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    tensors = random_tensors(options, seed)
    if options.form == "safeailab":
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(head_config(options)))
    return folder


def random_tensors(o: Options, seed: int = 3) -> dict[str, Any]:
    """Under the names of `speculators`."""
    d, q, kv, hidden, fused = o.width, o.num_heads * o.head_dim, o.num_kv_heads * o.head_dim, 48, o.target_width
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (d,), "hidden_norm.weight": (d,), "post_attention_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (q, 2 * d), "self_attn.k_proj.weight": (kv, 2 * d),
        "self_attn.v_proj.weight": (kv, 2 * d), "self_attn.o_proj.weight": (d, q),
        "mlp.gate_proj.weight": (hidden, d), "mlp.up_proj.weight": (hidden, d), "mlp.down_proj.weight": (d, hidden),
    }  # fmt: skip
    if o.qk_norm:
        layer |= {"self_attn.q_norm.weight": (o.head_dim,), "self_attn.k_norm.weight": (o.head_dim,)}
    if o.bias:
        matrices = [name for name in layer if name.endswith("_proj.weight")]
        layer |= {name.replace("weight", "bias"): layer[name][:1] for name in matrices}
    shapes = {f"layers.0.{name}": shape for name, shape in layer.items()}
    shapes |= {"fc.weight": (d, len(o.taps) * fused), "norm.weight": (d,), "lm_head.weight": (o.draft_vocab_size, d)}
    if o.has_embedding:
        shapes["embed_tokens.weight"] = (o.vocab_size, d)
    if o.tap_norm == "joint":
        shapes["input_norm.weight"] = (len(o.taps) * fused,)
    if o.tap_norm == "each":
        shapes |= {f"fc_norm.{i}.weight": (fused,) for i in range(len(o.taps))}
    rng = np.random.default_rng(seed)
    tensors: dict[str, Any] = {}
    for name, shape in shapes.items():
        scale = 1.5 / np.sqrt(shape[-1]) if len(shape) == 2 else 0.2
        tensors[name] = (rng.normal(size=shape) * scale + name.endswith("norm.weight")).astype(np.float32)
    kept = np.sort(rng.permutation(o.vocab_size)[: o.draft_vocab_size])
    tensors["d2t"] = kept - np.arange(o.draft_vocab_size)
    tensors["t2d"] = np.isin(np.arange(o.vocab_size), kept)
    return tensors


def head_config(o: Options) -> dict[str, Any]:
    layer: dict[str, Any] = {
        "model_type": "qwen3" if o.qk_norm else "llama", "hidden_act": "silu", "hidden_size": o.width,
        "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": o.num_heads,
        "num_key_value_heads": o.num_kv_heads, "head_dim": o.head_dim, "rms_norm_eps": o.epsilon,
        "rope_theta": o.theta, "vocab_size": o.vocab_size, "attention_bias": o.bias, "mlp_bias": o.bias,
        "max_position_embeddings": 128,
    }  # fmt: skip
    head: dict[str, Any] = {"draft_vocab_size": o.draft_vocab_size, "target_hidden_size": o.target_width}
    if o.form == "safeailab":
        config = layer | {"architectures": ["LlamaForCausalLM"]} | head | o.layer_config
    else:
        config = head | {
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": "someone/target", "architectures": ["LlamaForCausalLM"]},
            },
            "transformer_layer_config": layer | o.layer_config,
            "eagle_aux_hidden_state_layer_ids": list(o.taps),
            "norm_before_residual": o.norm_before_residual,
            "norm_before_fc": o.tap_norm == "joint",
            "fc_norm": o.tap_norm == "each",
            "norm_output": o.norm_output,
        }
    return {key: value for key, value in (config | o.config).items() if value is not None}


class DullHead:
    """A head that reads one token at a time. The n-th token that it reads is at RoPE position n."""

    def __init__(self, options: Options, tensors: dict[str, Any], target_embedding: Floats | None = None) -> None:
        self._o = options
        self._t = {name.replace("midlayer.", "layers.0."): np.asarray(t) for name, t in tensors.items()}
        self._embedding = self._t.get("embed_tokens.weight", target_embedding)
        self._keys: list[Floats] = []
        self._values: list[Floats] = []
        self.ids = np.arange(options.draft_vocab_size) + self._t["d2t"]

    def rewind(self, num_read: int) -> None:
        del self._keys[num_read:], self._values[num_read:]

    def fuse(self, taps: Floats) -> Floats:
        """`taps` [number of taps, target's width]: of one position."""
        if self._o.tap_norm == "joint":
            taps = self._norm(taps.reshape(-1), "input_norm").reshape(taps.shape)
        if self._o.tap_norm == "each":
            taps = np.stack([self._norm(tap, f"fc_norm.{i}") for i, tap in enumerate(taps)])
        return self._times(taps.reshape(-1), "fc")

    def read(self, state: Floats, token: int) -> tuple[Floats, Floats]:
        """Logits over the draft vocabulary, and the state for the next token if that one is drafted."""
        o = self._o
        assert self._embedding is not None
        embedded, normed = self._norm(self._embedding[token], "input_layernorm"), self._norm(state, "hidden_norm")
        h = (normed if o.norm_before_residual else state) + self._attention(np.concatenate([embedded, normed]))
        m = self._norm(h, "post_attention_layernorm")
        gate, up = self._times(m, "mlp.gate_proj"), self._times(m, "mlp.up_proj")
        h = h + self._times(gate / (1 + np.exp(-gate)) * up, "mlp.down_proj")
        out = self._norm(h, "norm")
        return self._times(out, "lm_head"), out if o.norm_output else h

    def _attention(self, x: Floats) -> Floats:
        o, position = self._o, len(self._keys)
        q = self._times(x, "self_attn.q_proj").reshape(o.num_heads, o.head_dim)
        k = self._times(x, "self_attn.k_proj").reshape(o.num_kv_heads, o.head_dim)
        v = self._times(x, "self_attn.v_proj").reshape(o.num_kv_heads, o.head_dim)
        if o.qk_norm:
            q, k = self._norm(q, "self_attn.q_norm"), self._norm(k, "self_attn.k_norm")
        self._keys.append(self._turned(k, position))
        self._values.append(v)
        mixed = []
        for number, query in enumerate(self._turned(q, position)):
            shared = number // (o.num_heads // o.num_kv_heads)
            scores = np.array([key[shared] @ query for key in self._keys]) / np.sqrt(o.head_dim)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            mixed.append(sum(w * value[shared] for w, value in zip(weights, self._values, strict=True)))
        return self._times(np.concatenate(mixed), "self_attn.o_proj")

    def _turned(self, heads: Floats, position: int) -> Floats:
        half = self._o.head_dim // 2
        angles = position * self._o.theta ** (-np.arange(half) / half)
        a, b = heads[:, :half], heads[:, half:]
        turned = [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)]
        return np.concatenate(turned, 1)

    def _norm(self, x: Floats, name: str) -> Floats:
        weight = self._find(f"{name}.weight")
        assert weight is not None
        return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + self._o.epsilon) * weight)

    def _times(self, x: Floats, name: str) -> Floats:
        weight, bias = self._find(f"{name}.weight"), self._find(f"{name}.bias")
        assert weight is not None
        return np.asarray(weight @ x + (0 if bias is None else bias))

    def _find(self, name: str) -> Floats | None:
        return self._t.get(name, self._t.get(f"layers.0.{name}"))


def drafted(head: DullHead, taps: list[Floats], tokens: list[int], depth: int) -> list[int]:
    """The likeliest tokens after a text, one after another. `taps`: each [len(tokens) - 1, target's width]."""
    head.rewind(0)
    for position, token in enumerate(tokens[1:]):
        logits, state = head.read(head.fuse(np.stack([tap[position] for tap in taps])), token)
    found = [int(head.ids[logits.argmax()])]
    while len(found) < depth:
        logits, state = head.read(state, found[-1])
        found.append(int(head.ids[logits.argmax()]))
    return found

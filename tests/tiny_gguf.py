"""Writes small random models of every family and tensor type that the native backend supports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCAB_SIZE = 280
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *K_QUANTS)
FAMILIES = ("llama", "qwen2", "qwen3")


def byte_tokens() -> list[str]:
    """The 256 bytes in GPT-2's encoding, and more tokens to fill the vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)] + [
        f"<|{i}|>" for i in range(VOCAB_SIZE - 256)
    ]


def _random_k_quant(rng: np.random.Generator, kind: str, rows: int, cols: int, scale: float) -> NDArray[np.uint8]:
    """Random codes with scales of a sensible size; the `gguf` package cannot quantise to these types."""
    size, halves, largest = {"Q4_K": (144, (0, 2), 15), "Q5_K": (176, (0, 2), 31), "Q6_K": (210, (208,), 32)}[kind]
    blocks = rng.integers(0, 256, (rows, cols // 256, size), np.uint8)
    for at in halves:
        d = rng.uniform(0.5, 1.0, (rows, cols // 256, 1)) * scale / (largest * 32)
        blocks[..., at : at + 2] = d.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def write_model(
    path: Path,
    family: str = "llama",
    kind: str = "F32",
    *,
    seed: int = 0,
    width: int = 64,
    hidden: int = 96,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    num_layers: int = 2,
    tied: bool = True,
    rope_factors: bool = False,
    metadata: dict[str, Any] | None = None,
    change: dict[str, Any] | None = None,
) -> Path:
    """`metadata` adds keys under the architecture's name; `change` replaces tensors by arrays, or drops them (None)."""
    import gguf

    if kind in K_QUANTS:
        width, hidden, num_heads, num_kv_heads, head_dim = 256, 512, 4, 2, head_dim or 64
    dim = head_dim or width // num_heads
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(num_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if head_dim:
        writer.add_key_length(dim)
        writer.add_value_length(dim)
        writer.add_rope_dimension_count(dim)
    for key, value in (metadata or {}).items():
        add: Any = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{family}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = byte_tokens()
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * (len(tokens) - 256))
    writer.add_token_merges([f"{tokens[97]} {tokens[98]}"])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(257)

    quantisation = getattr(gguf.GGMLQuantizationType, kind)

    def matrix(name: str, rows: int, cols: int) -> None:
        scale = 1.5 / np.sqrt(cols) if "embd" not in name else 1.0
        if kind in K_QUANTS:
            writer.add_tensor(name, _random_k_quant(rng, kind, rows, cols, scale), raw_dtype=quantisation)
        else:
            values = (rng.normal(size=(rows, cols)) * scale).astype(np.float32)
            writer.add_tensor(name, gguf.quants.quantize(values, quantisation), raw_dtype=quantisation)

    def vector(name: str, n: int, centre: float) -> None:
        writer.add_tensor(name, (centre + 0.1 * rng.normal(size=n)).astype(np.float32))

    q, kv = num_heads * dim, num_kv_heads * dim
    plans: dict[str, tuple[Any, ...]] = {"token_embd.weight": (matrix, VOCAB_SIZE, width)}
    for i in range(num_layers):
        plans |= {
            f"blk.{i}.attn_norm.weight": (vector, width, 1.0),
            f"blk.{i}.attn_q.weight": (matrix, q, width),
            f"blk.{i}.attn_k.weight": (matrix, kv, width),
            f"blk.{i}.attn_v.weight": (matrix, kv, width),
            f"blk.{i}.attn_output.weight": (matrix, width, q),
            f"blk.{i}.ffn_norm.weight": (vector, width, 1.0),
            f"blk.{i}.ffn_gate.weight": (matrix, hidden, width),
            f"blk.{i}.ffn_up.weight": (matrix, hidden, width),
            f"blk.{i}.ffn_down.weight": (matrix, width, hidden),
        }
        if family == "qwen2":
            plans |= {f"blk.{i}.attn_{x}.bias": (vector, n, 0.0) for x, n in (("q", q), ("k", kv), ("v", kv))}
        if family == "qwen3":
            plans |= {f"blk.{i}.attn_{x}_norm.weight": (vector, dim, 1.0) for x in "qk"}
    plans["output_norm.weight"] = (vector, width, 1.0)
    if not tied:
        plans["output.weight"] = (matrix, VOCAB_SIZE, width)
    if rope_factors:
        plans["rope_freqs.weight"] = (vector, dim // 2, 2.0)
    for name, (make, *arguments) in plans.items():
        if name not in (change or {}):
            make(name, *arguments)
    for name, values in (change or {}).items():
        if values is not None:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

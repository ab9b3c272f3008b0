"""Hostile GGUF files: a small valid file with a few of its parts changed."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

from outpace.models.gguf_header import BLOCK_SIZES
from tests.fuzz.gguf_bytes import (
    ARRAY,
    FLOAT32,
    SIZES,
    STRING,
    UINT32,
    RawGGUF,
    Value,
    float32,
    read_gguf,
    text,
    uint32,
)
from tests.fuzz.templates import random_template
from tests.tiny_gguf import FAMILIES, write_model

WHOLE = (
    0,
    1,
    2,
    3,
    7,
    8,
    63,
    64,
    255,
    4095,
    4096,
    65_535,
    1 << 20,
    (1 << 24) - 1,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
)
REAL = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e38, -1e38, math.nan, math.inf, -math.inf, 0.5, 1e-5)
WORDS = (
    "", "llama", "none", "no_vocab", "gpt2", "bert", "t5", "rwkv", "plamo2", "replit", "mamba", "gemma", "phi3",
    "falcon", "linear", "yarn", "longrope", "default", "llama-bpe", "qwen2", "deepseek-llm", "tekken", "smollm",
    "gpt-4o", "mean",
)  # fmt: skip
KEYS = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor",
    "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "expert_count", "expert_used_count", "attention.sliding_window", "attention.clamp_kqv", "logit_scale",
    "vocab_size", "leading_dense_block_count", "attention.causal", "pooling_type", "tensor_data_layout",
)  # fmt: skip
GLOBAL_KEYS = (
    "general.architecture", "general.alignment", "general.type", "general.file_type", "split.count", "split.no",
    "general.sampling.temp", "general.sampling.top_k", "general.sampling.top_p",
    "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id", "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.padding_token_id",
    "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix",
    "tokenizer.ggml.token_type_count", "tokenizer.ggml.precompiled_charsmap", "tokenizer.chat_template",
)  # fmt: skip
ARRAYS = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type", "tokenizer.ggml.scores")


def random_text(rng: random.Random) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(rng.randrange(12))
    if kind == 1:
        return bytes([rng.randrange(256)]) * rng.choice((1, 300, 100_000))
    return rng.choice(WORDS).encode()


def random_value(rng: random.Random) -> Value:
    kind = rng.randrange(6)
    if kind == 0:
        return float32(rng.choice(REAL))
    if kind == 1:
        return text(random_text(rng))
    if kind == 2:
        other = rng.choice(tuple(SIZES))
        return Value(other, rng.choice((b"\0", b"\xff", b"\x7f", b"\x01")) * SIZES[other])
    if kind == 3:
        items = [struct.pack("<I", rng.choice(WHOLE)) for _ in range(rng.choice((0, 1, 2, 300)))]
        return Value(ARRAY, element=rng.choice((UINT32, FLOAT32)), items=items)
    return uint32(rng.choice(WHOLE))


def random_key(rng: random.Random, raw: RawGGUF) -> str:
    architecture = raw.get("general.architecture").data.decode(errors="replace") if _has_name(raw) else "llama"
    return rng.choice((f"{architecture}.{rng.choice(KEYS)}", rng.choice(GLOBAL_KEYS)))


def _has_name(raw: RawGGUF) -> bool:
    return any(name == b"general.architecture" for name, _ in raw.keys)


def set_key(rng: random.Random, raw: RawGGUF) -> None:
    raw.set(random_key(rng, raw), random_value(rng))


def set_same_kind(rng: random.Random, raw: RawGGUF) -> None:
    """Another value of the same type, which a check of types alone would accept."""
    _, value = rng.choice(raw.keys)
    if value.kind == STRING:
        value.data = random_text(rng)
    elif value.kind == FLOAT32:
        value.data = struct.pack("<f", rng.choice(REAL))
    elif value.kind == UINT32:
        value.data = struct.pack("<I", rng.choice(WHOLE))


def drop_key(rng: random.Random, raw: RawGGUF) -> None:
    if raw.keys:
        del raw.keys[rng.randrange(len(raw.keys))]


def repeat_key(rng: random.Random, raw: RawGGUF) -> None:
    raw.keys.append(deepcopy(rng.choice(raw.keys)))


def lie_about_length(rng: random.Random, raw: RawGGUF) -> None:
    _, value = rng.choice(raw.keys)
    value.claimed = rng.choice((0, 1, 1 << 20, 1 << 31, 1 << 62, (1 << 64) - 1))


def change_array(rng: random.Random, raw: RawGGUF) -> None:
    arrays = [value for _, value in raw.keys if value.kind == ARRAY and value.items]
    if not arrays:
        return
    array = rng.choice(arrays)
    kind = rng.randrange(6)
    if kind == 0:
        array.items = array.items[: rng.randrange(len(array.items))]
    elif kind == 1:
        array.items = [array.items[0]] * len(array.items)
    elif kind == 2:
        array.items = array.items * 2
    elif kind == 3:
        rng.shuffle(array.items)
    elif array.element == STRING:
        for _ in range(rng.choice((1, 50))):
            array.items[rng.randrange(len(array.items))] = random_text(rng)
    else:
        for _ in range(rng.choice((1, 50))):
            array.items[rng.randrange(len(array.items))] = rng.randbytes(SIZES[array.element])


def add_array(rng: random.Random, raw: RawGGUF) -> None:
    count = rng.choice((0, 1, 280, 5000))
    if rng.random() < 0.5:
        value = Value(ARRAY, element=STRING, items=[random_text(rng)[:50] for _ in range(count)])
    else:
        value = Value(ARRAY, element=rng.choice((FLOAT32, UINT32, 5)), items=[rng.randbytes(4) for _ in range(count)])
    raw.set(rng.choice(ARRAYS), value)


def set_template(rng: random.Random, raw: RawGGUF) -> None:
    raw.set("tokenizer.chat_template", text(random_template(rng)))


def change_tensor(rng: random.Random, raw: RawGGUF) -> None:
    if not raw.tensors:
        return
    tensor = rng.choice(raw.tensors)
    kind = rng.randrange(6)
    if kind == 0:
        tensor.name = rng.choice((rng.choice(raw.tensors).name, random_text(rng), b"blk.99999.attn_q.weight"))
    elif kind == 1:
        tensor.shape = [
            rng.choice((0, 1, 32, 64, 280, 1 << 31, 1 << 62, (1 << 64) - 1)) for _ in range(rng.randrange(6))
        ]
    elif kind == 2:
        tensor.kind = rng.choice((*BLOCK_SIZES, 4, 5, 99, (1 << 32) - 1))
    elif kind == 3:
        tensor.offset = rng.choice((0, 1, 32, 1 << 31, 1 << 62, (1 << 64) - 32))
    elif kind == 4:
        raw.tensors.remove(tensor)
    else:
        raw.tensors.append(deepcopy(tensor))


def change_weights(rng: random.Random, raw: RawGGUF) -> None:
    """NaN, infinities and large numbers in the tensors."""
    data = bytearray(raw.data)
    for _ in range(rng.choice((1, 1000))):
        at = rng.randrange(0, max(len(data) - 4, 1), 4)
        data[at : at + 4] = struct.pack("<f", rng.choice(REAL))
    raw.data = bytes(data)


def set_version(rng: random.Random, raw: RawGGUF) -> None:
    raw.version = rng.choice((0, 1, 2, 4, 1 << 16, (1 << 32) - 1))


CHANGES: tuple[tuple[Callable[[random.Random, RawGGUF], None], int], ...] = (
    (set_key, 8), (set_same_kind, 6), (drop_key, 2), (repeat_key, 1), (lie_about_length, 1), (change_array, 4),
    (add_array, 2), (set_template, 1), (change_tensor, 4), (change_weights, 2), (set_version, 1),
)  # fmt: skip


def change_bytes(rng: random.Random, path: Path) -> None:
    """Damage that knows nothing of the format."""
    data = bytearray(path.read_bytes())
    header = min(len(data), 9000)
    for _ in range(rng.choice((1, 4, 64))):
        data[rng.randrange(header)] = rng.randrange(256)
    path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.3 else data)


def write_hostile(rng: random.Random, folder: Path) -> Path:
    """One file: 1 to 4 changes of parts, and now and then of bytes."""
    base = folder / f"{rng.choice(FAMILIES)}.gguf"
    if not base.exists():
        write_model(base, base.stem)
    raw = read_gguf(base)
    path = folder / "hostile.gguf"
    changes, weights = zip(*CHANGES, strict=True)
    for change in rng.choices(changes, weights, k=rng.choice((1, 1, 2, 4))):
        if raw.keys:
            change(rng, raw)
    path.unlink(missing_ok=True)
    raw.write(path)
    if rng.random() < 0.15:
        change_bytes(rng, path)
    return path

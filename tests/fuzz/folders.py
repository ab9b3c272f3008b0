"""Hostile Hugging Face folders: a small valid folder with a few of its files changed."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.fuzz.templates import random_template
from tests.tiny_folder import CONFIG, write_folder

SHARD, INDEX = "model.safetensors", "model.safetensors.index.json"
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", INDEX)
VALUES: tuple[Any, ...] = (
    None, True, 0, 1, -1, 2, 3, 319, 320, 4096, 1_000_000, 1 << 31, 1 << 63, 10**400, 1.5, -0.5, float("nan"),
    float("inf"), "", "x", "x" * 5000, "../x.safetensors", "\ud800", [], [1], ["x"], [None], {}, {"a": 1},
    {"type": "yarn", "factor": 4.0}, {"rope_type": "llama3", "factor": 0}, {"rope_type": "linear", "factor": "x"},
    [[[[[[1]]]]]], ["Qwen3ForCausalLM"], ["Gemma3ForCausalLM"], ["Gemma3ForConditionalGeneration"], ["Phi3ForCausalLM"],
    ["MixtralForCausalLM"], ["sliding_attention", "full_attention"],
    {"full_attention": {"rope_theta": 9.0}, "sliding_attention": {"rope_type": "x"}},
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
)  # fmt: skip
KEYS = (
    *CONFIG, "rope_theta", "rope_scaling", "rope_parameters", "head_dim", "sliding_window", "use_sliding_window",
    "attention_bias", "mlp_bias", "hidden_act", "quantization_config", "partial_rotary_factor", "layer_types",
    "hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "text_config",
    "sliding_window_pattern", "num_experts", "num_local_experts", "num_experts_per_tok", "rope_local_base_freq",
)  # fmt: skip


def change_config(rng: random.Random, folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    for _ in range(rng.choice((1, 1, 3))):
        values[rng.choice(KEYS)] = rng.choice(VALUES)
    (folder / "config.json").write_text(json.dumps(values))


def change_json(rng: random.Random, folder: Path) -> None:
    """A random value somewhere in one of the files."""
    path = folder / rng.choice(JSON_FILES)
    values = json.loads(path.read_text()) if path.exists() else {"eos_token_id": 1, "weight_map": {"a": SHARD}}
    at = values
    while isinstance(at, dict) and at:
        key = rng.choice(list(at))
        if not isinstance(at[key], dict) or rng.random() < 0.4:
            at[key] = rng.choice(VALUES)
            break
        at = at[key]
    path.write_text(json.dumps(values))


def change_text(rng: random.Random, folder: Path) -> None:
    """Damage that knows nothing of JSON."""
    path = rng.choice([each for each in folder.iterdir() if each.suffix == ".json"])
    data = bytearray(path.read_bytes())
    kind = rng.randrange(4)
    if kind == 0:
        data = data[: rng.randrange(len(data))]
    elif kind == 1:
        data = bytearray(rng.choice((b"", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"5", b"null", b"{}")))
    else:
        for _ in range(rng.choice((1, 5))):
            data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data)


def change_shards(rng: random.Random, folder: Path) -> None:
    choices: tuple[Any, ...] = (SHARD, "", ".", "..", "/etc/passwd", "../x", "a\0b", "x" * 5000, 5, None, [])
    names = rng.choices(choices, k=2)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict(zip("ab", names, strict=True))}))


def change_weights(rng: random.Random, folder: Path) -> None:
    data = bytearray((folder / SHARD).read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    kind = rng.randrange(4)
    if kind == 0:
        data = data[: rng.randrange(len(data))]
    elif kind == 1:
        data[:8] = struct.pack("<Q", rng.choice((0, 1, 1 << 20, 1 << 40, (1 << 64) - 1)))
    elif kind == 2:
        for _ in range(5):
            data[rng.randrange(8, 8 + length)] = rng.choice(b'0123456789,:{}[]"FIU')
    else:
        for _ in range(1000):
            at = rng.randrange(8 + length, len(data) - 4)
            data[at : at + 4] = struct.pack("<f", rng.choice((float("nan"), float("inf"), 1e38)))
    (folder / SHARD).write_bytes(data)


def change_template(rng: random.Random, folder: Path) -> None:
    path = folder / "chat_template.jinja"
    path.write_bytes(rng.choice((b"\xff", random_template(rng).encode())))


def drop_file(rng: random.Random, folder: Path) -> None:
    rng.choice(list(folder.iterdir())).unlink()


CHANGES: tuple[tuple[Callable[[random.Random, Path], None], int], ...] = (
    (change_config, 6), (change_json, 6), (change_text, 3), (change_shards, 1), (change_weights, 2),
    (change_template, 1), (drop_file, 1),
)  # fmt: skip


def write_hostile(rng: random.Random, folder: Path) -> Path:
    base, path = folder / "base", folder / "hostile"
    if not base.exists():
        base.mkdir()
        write_folder(base)
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(base, path)
    changes, weights = zip(*CHANGES, strict=True)
    for change in rng.choices(changes, weights, k=rng.choice((1, 1, 2))):
        with suppress(OSError, ValueError):  # an earlier change removed or damaged what this one reads
            change(rng, path)
    return path

"""A small random model and head as files, wide enough to be padded, and the larger shape they are padded to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from outpace.models.hf_config import parse_config
from tests.tiny_gguf import VOCAB_SIZE, write_model
from tests.tiny_head import write_head

WIDTH = 576  # narrower ones leave no room for the constant that padding adds to the residual
SIZES: dict[str, Any] = {"width": WIDTH, "hidden": 64, "num_heads": 9, "num_kv_heads": 3, "head_dim": 16}
LARGE_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 400, "hidden_size": 640, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 32, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "max_position_embeddings": 512,
}  # fmt: skip
LARGE = parse_config(LARGE_CONFIG)
DRAFT_VOCABULARY = 350  # VOCAB_SIZE and 70 tokens that are never drafted


def write_small(folder: Path) -> tuple[Path, Path]:
    """The model and its head. Their logits are so flat that at temperature 1 the same noise often gives the same token;
    greedy, both say one of two tokens."""
    rng = np.random.default_rng(3)
    outputs = (0.02 * rng.normal(size=(2, VOCAB_SIZE, WIDTH))).astype(np.float32)
    likely = (3 * rng.normal(size=WIDTH) / WIDTH**0.5).astype(np.float32)
    outputs[:, 5] += likely
    outputs[:, 8] -= likely
    model = write_model(folder / "small.gguf", tied=False, change={"output.weight": outputs[0]}, **SIZES)
    known = {"output.weight": outputs[1], "target_ids": np.arange(VOCAB_SIZE, dtype=np.int32)}
    return model, write_head(folder / "head.gguf", model, change=known, **SIZES)

"""A tiny head of the one-pass kind for a tiny target."""

from __future__ import annotations

from dataclasses import fields

import torch

from benchmarks.head_kinds_onepass import OnePassConfig, OnePassHead, start_values
from outpace.training.target import Target
from tests.tiny_gguf import VOCAB_SIZE
from tests.tiny_training import roughened, tiny_config


def tiny_onepass_head(
    target: Target, *, kept: torch.Tensor | None = None, seed: int = 0
) -> tuple[OnePassHead, torch.Tensor]:
    kept = torch.arange(0, VOCAB_SIZE, 2) if kept is None else kept
    base = tiny_config(target, len(kept))
    config = OnePassConfig(**{each.name: getattr(base, each.name) for each in fields(base)}, markov_rank=8)
    torch.manual_seed(seed)
    return OnePassHead(config, target, roughened(start_values(config, target, kept))), kept

"""A tiny target to train heads for, with prompts and answers, in seconds on a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from outpace.models.head_file import HeadConfig
from outpace.training.batches import BatchShape, Texts, join
from outpace.training.data import Answers, AnswerSettings, write_answers
from outpace.training.head import Head, Parameters, default_taps, rope_theta, start_values
from outpace.training.prepared import Prepared
from outpace.training.target import Target
from tests.tiny_gguf import VOCAB_SIZE, write_model

CPU = torch.device("cpu")
SHAPE = BatchShape(num_tokens=32 * 12, chunk=32, num_steps=3)


def tiny_target(folder: Path, family: str = "llama", *, num_layers: int = 3) -> Target:
    path = write_model(folder / "tiny.gguf", family, num_layers=num_layers)
    return Target.load(path, CPU, torch.float32)


def tiny_prepared(target: Target, *, num_train: int = 24, num_held: int = 4, seed: int = 0) -> Prepared:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 250, rng.integers(4, 12)) for _ in range(num_train + num_held)]
    return Prepared(
        train=prompts[num_held:],
        held=prompts[:num_held],
        categories=[("odd", "even")[i % 2] for i in range(num_held)],
        end_ids=[256],
        user_begin=[257, 258],
        user_end=[259],
        vocab_size=VOCAB_SIZE,
        target="tiny.gguf",
        fingerprint=target.fingerprint,
    )


def tiny_answers(target: Target) -> Answers:
    settings = AnswerSettings(seconds=60.0, max_answer=24, max_rounds=2)
    return write_answers(target, tiny_prepared(target), settings, lambda *_: None, lambda _: None)


def random_texts(lengths: list[int], prompt: int = 5, seed: int = 0) -> Texts:
    rng = np.random.default_rng(seed)
    return join([rng.integers(0, VOCAB_SIZE, n) for n in lengths], [prompt] * len(lengths))


def tiny_config(target: Target, num_kept: int) -> HeadConfig:
    c = target.config
    return HeadConfig(
        width=c.width, hidden=64, num_heads=c.num_heads, num_kv_heads=c.num_kv_heads, head_dim=c.head_dim,
        vocab_size=VOCAB_SIZE, draft_vocab_size=num_kept, taps=default_taps(c.num_layers), epsilon=c.epsilon,
        rope_theta=rope_theta(c), num_steps=3, target={"name": "tiny", "fingerprint": target.fingerprint},
    )  # fmt: skip


def tiny_head(target: Target, *, kept: torch.Tensor | None = None, seed: int = 0) -> tuple[Head, torch.Tensor]:
    kept = torch.arange(0, VOCAB_SIZE, 2) if kept is None else kept
    config = tiny_config(target, len(kept))
    torch.manual_seed(seed)
    return Head(config, target, roughened(start_values(config, target, kept))), kept


def roughened(parameters: Parameters) -> Parameters:
    """With random norms, so that a wrong one shows."""
    for parameter in parameters.values():
        if parameter.dim() == 1 or not parameter.any():
            parameter += 0.3 * torch.randn_like(parameter)
    return parameters

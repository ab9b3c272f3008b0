"""A row whose new tokens are a tree: every branch gets the same logits as a separate sequence."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")

import torch

from outpace.backends.base import Capacity
from outpace.backends.torch.execution.step import HostStep, StepShape, views
from outpace.backends.torch.kernels.reference import ReferenceOps
from outpace.backends.torch.model.model import Model
from outpace.backends.torch.model.weights import allocate
from outpace.backends.torch.runner import TorchRunner
from outpace.backends.torch.storage import plain_tensor
from outpace.core import Row, StepPlan
from outpace.models.hf_config import parse_config

CONFIG = parse_config({
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
})  # fmt: skip
PROMPT = [(7 * i + 3) % 60 for i in range(37)]
TOKENS = [5, 8, 9, 9, 11, 5]  # a tree with two roots; PARENTS gives each token's parent
PARENTS = [-1, 0, 0, 2, -1, 4]


def branch(i: int) -> list[int]:
    return [] if i < 0 else [*branch(PARENTS[i]), i]


@pytest.fixture
def runner() -> TorchRunner:
    torch.manual_seed(0)
    weights = allocate(CONFIG, tied=True, dtype=torch.float32, device=torch.device("cpu"))
    for tensor in map(plain_tensor, weights.tensors):
        tensor.normal_(1.0 if tensor.dim() == 1 else 0.0, 0.3)
    return TorchRunner(Model(CONFIG, weights, ReferenceOps(), 128), Capacity(2, 256, 128, 128))


def as_texts(runner: TorchRunner) -> list[np.ndarray]:
    found = []
    for i in range(len(TOKENS)):
        text = [*PROMPT, *(TOKENS[j] for j in branch(i))]
        found.append(runner.forward(StepPlan([Row(1, 0, text, 1)]))[0].copy())
        runner.free(1)
    return found


def test_a_tree_in_one_row_is_its_branches(runner):
    expected = as_texts(runner)
    runner.forward(StepPlan([Row(0, 0, PROMPT, 0)]))
    # Filled as an ordinary row with a gap after it; then changed to a tree.
    plan, size = StepPlan([Row(0, len(PROMPT), TOKENS, len(TOKENS))]), 8
    runner.reserve_rows(plan.rows)
    host = HostStep(StepShape(size, 1, len(TOKENS), size, runner._table_width), pinned=False)
    runner.fill(host, plan)
    host.positions[: len(TOKENS)] = [len(PROMPT) + len(branch(i)) - 1 for i in range(len(TOKENS))]
    step = views(host.buffer, host.shape)
    visible = torch.zeros((size, size), dtype=torch.bool)
    for i in range(len(TOKENS)):
        visible[i, branch(i)] = True
    step.visible = visible
    found = runner.model.forward(step, runner.caches).numpy()
    for i, line in enumerate(expected):
        np.testing.assert_allclose(found[i], line, rtol=1e-4, atol=1e-4)


def test_without_a_mask_the_same_row_is_one_text(runner):
    """Shows that the test above detects an ignored mask."""
    expected = as_texts(runner)
    found = runner.forward(StepPlan([Row(0, 0, [*PROMPT, *TOKENS], len(TOKENS))]))
    assert np.abs(found[0] - expected[0]).max() < 1e-4
    assert np.abs(found[2] - expected[2]).max() > 1e-2

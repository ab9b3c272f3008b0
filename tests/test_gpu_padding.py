"""The padding of the GPU benchmark: a model inside a larger shape says exactly what it says alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")

import torch

from benchmarks.gpu_padding import padded, rounded
from outpace.backends.base import Capacity
from outpace.backends.torch.config import parse_config
from outpace.backends.torch.kernels.reference import ReferenceOps
from outpace.backends.torch.model import Model
from outpace.backends.torch.runner import TorchRunner
from outpace.backends.torch.weights import allocate
from outpace.core import Row, StepPlan

SMALL = parse_config({
    "architectures": ["LlamaForCausalLM"], "vocab_size": 90, "hidden_size": 576, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
})  # fmt: skip
LARGE = replace(SMALL, vocab_size=120, width=640, hidden=96, num_layers=3, num_heads=16, num_kv_heads=4, head_dim=32)


def logits(config, weights):
    model = Model(config, weights, ReferenceOps(), 64)
    runner = TorchRunner(model, Capacity(1, 64, 64, 64))
    return runner.forward(StepPlan([Row(0, 0, list(range(1, 40)), 39)]))


@pytest.fixture
def weights():
    torch.manual_seed(0)
    found = allocate(SMALL, tied=True, dtype=torch.float32, device=torch.device("cpu"))
    for tensor in found.tensors:
        tensor.normal_(1.0 if tensor.dim() == 1 else 0.0, 0.1)
    return found


def test_a_padded_model_says_what_it_says_alone(weights):
    expected = logits(SMALL, weights)
    found = logits(*padded(SMALL, weights, LARGE))
    assert np.abs(found[:, :90] - expected).max() < 1e-4 * np.abs(expected).max()
    assert (found[:, 90:] < found[:, :90].min() - 20).all(), "a token that does not exist could be said"


def test_rounded_weights_lie_on_few_steps_and_near_by(weights):
    found = rounded(weights, 4, group=16).layers[0].down
    assert len(found[0, :16].unique()) <= 15
    error = (found - weights.layers[0].down).norm() / weights.layers[0].down.norm()
    assert 0.01 < error < 0.2

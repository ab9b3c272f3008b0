"""The padding of the GPU benchmark: a model padded to a larger shape gives the same output."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")

import torch

from benchmarks.gpu_padding import padded
from benchmarks.gpu_rounding import Rounding, agreement, rounded
from outpace.backends.base import Capacity
from outpace.backends.torch.kernels.reference import ReferenceOps
from outpace.backends.torch.model.model import Model
from outpace.backends.torch.model.weights import allocate
from outpace.backends.torch.runner import TorchRunner
from outpace.core import Row, StepPlan
from outpace.models.hf_config import parse_config

SMALL = parse_config({
    "architectures": ["LlamaForCausalLM"], "vocab_size": 90, "hidden_size": 576, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "max_position_embeddings": 512,
})  # fmt: skip
LARGE = replace(SMALL, vocab_size=120, width=640, hidden=96, num_layers=3, num_heads=16, num_kv_heads=4, head_dim=32)
TOKENS = list(range(1, 40))


def logits(config, weights):
    runner = TorchRunner(Model(config, weights, ReferenceOps(), 64), Capacity(1, 64, 64, 64))
    return runner.forward(StepPlan([Row(0, 0, TOKENS, len(TOKENS))]))


def random_weights():
    torch.manual_seed(0)
    found = allocate(SMALL, tied=True, dtype=torch.float32, device=torch.device("cpu"))
    for tensor in found.tensors:
        tensor.normal_(1.0 if tensor.dim() == 1 else 0.0, 0.1)
    return found


@pytest.fixture
def weights():
    return random_weights()


def test_a_padded_model_says_what_it_says_alone(weights):
    expected = logits(SMALL, weights)
    found = logits(*padded(SMALL, weights, LARGE))
    assert np.abs(found[:, :90] - expected).max() < 1e-4 * np.abs(expected).max()
    assert (found[:, 90:] < found[:, :90].min() - 20).all(), "a token beyond the small vocabulary could be emitted"


def test_transformers_says_the_same_from_the_same_memory(weights):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from benchmarks.gpu_assisted import as_transformers, generate

    larger = padded(SMALL, weights, LARGE)
    model = as_transformers(*larger)
    assert model.model.embed_tokens.weight.data_ptr() == larger[1].embedding.data_ptr()
    found = model(torch.tensor([TOKENS])).logits[0].numpy()
    expected = logits(*larger)
    assert np.abs(found - expected)[:, :90].max() < 1e-4 * np.abs(expected[:, :90]).max()
    draft = as_transformers(*padded(SMALL, rounded(SMALL, weights, Rounding(4)), LARGE))
    said, _ = generate(model, TOKENS, 12, 0.0)
    assisted, seconds = generate(model, TOKENS, 12, 0.0, draft)
    assert said == assisted
    assert len(said) == 12
    assert seconds > 0
    assert len(generate(model, TOKENS, 12, 1.0, draft)[0]) == 12


def test_rounded_weights_lie_on_few_steps_and_near_by(weights):
    found = rounded(SMALL, weights, Rounding(4)).layers[0].down
    assert len(found[0, :16].unique()) <= 16
    error = (found - weights.layers[0].down).norm() / weights.layers[0].down.norm()
    assert 0.01 < error < 0.2
    coarser = rounded(SMALL, weights, Rounding(3)).layers[0].down
    assert (coarser - weights.layers[0].down).norm() > (found - weights.layers[0].down).norm()


def test_learned_rounding_agrees_more_often_and_moves_no_weight_by_more_than_a_step(weights):
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(0, 90, (6, 30), generator=generator).tolist()
    settings = Rounding(steps=30, batch=6, grid_rate=0.0)
    nearest, learned = rounded(SMALL, weights, Rounding()), rounded(SMALL, weights, settings, texts)
    shares = [agreement(SMALL, weights, each, texts) for each in (nearest, learned)]
    assert shares[0] < shares[1] < 1.0, shares
    own = weights.layers[0].down
    parts = own.view(len(own), -1, settings.group)
    step = (parts.amax(-1, keepdim=True) - parts.amin(-1, keepdim=True)) / (2**settings.bits - 1)
    moved = (learned.layers[0].down - own).view(parts.shape).abs() / step
    assert 0.5 < float(moved.max()) <= 1.0 + 1e-4, "weights go to one of the two values next to them"

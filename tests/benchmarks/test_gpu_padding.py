"""The padding of the GPU benchmark: a model and a head padded to a larger shape give the same output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")
pytest.importorskip("safetensors", reason="safetensors is not installed; pip install outpace[torch]")

import torch

from benchmarks.gpu_padded_model import PaddedModel, Small, converted
from benchmarks.gpu_padding import padded, padded_head
from outpace.backends.base import Capacity, HeadTask
from outpace.backends.torch.kernels.reference import ReferenceOps
from outpace.backends.torch.model.head import HeadModel
from outpace.backends.torch.model.model import Model
from outpace.backends.torch.model.weights import named_tensors
from outpace.backends.torch.runner import TorchRunner
from outpace.backends.torch.storage import plain_tensor
from outpace.core import Row, StepPlan
from tests.benchmarks.small_model import DRAFT_VOCABULARY, LARGE, write_small
from tests.tiny_gguf import VOCAB_SIZE
from tests.tiny_head import request_of

TOKENS = list(range(1, 40))
ROOM = Capacity(2, 128, 64, 64)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Small:
    return Small.load(*write_small(tmp_path_factory.mktemp("small")), torch.device("cpu"))


def logits(config, weights):
    runner = TorchRunner(Model(config, weights, ReferenceOps(), 64), Capacity(1, 64, 64, 64))
    return runner.forward(StepPlan([Row(0, 0, TOKENS, len(TOKENS))]))


def test_a_padded_model_says_what_it_says_alone(small):
    expected = logits(small.config, small.weights)
    found = logits(*padded(small.config, small.weights, LARGE))
    assert np.abs(found[:, :VOCAB_SIZE] - expected).max() < 1e-4 * np.abs(expected).max()
    excluded = found[:, VOCAB_SIZE:]
    assert (excluded < expected.min() - 20).all(), "a token beyond the small vocabulary could be emitted"


def test_transformers_says_the_same_from_the_same_memory(small):
    pytest.importorskip("transformers", reason="transformers is not installed")
    config, weights = padded(small.config, small.weights, LARGE)
    found = as_transformers(config, weights)(torch.tensor([TOKENS])).logits[0].numpy()
    expected = logits(config, weights)
    assert np.abs(found - expected)[:, :VOCAB_SIZE].max() < 1e-4 * np.abs(expected[:, :VOCAB_SIZE]).max()


def as_transformers(config, weights) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    described = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.width, intermediate_size=config.hidden,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads, head_dim=config.head_dim, rms_norm_eps=config.epsilon,
        max_position_embeddings=config.context, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(described)
    model.load_state_dict(named_tensors(weights, config), strict=True, assign=True)
    frequencies = torch.tensor(config.rope.frequencies, dtype=torch.float32)
    for name in ("inv_freq", "original_inv_freq"):
        setattr(model.model.rotary_emb, name, frequencies.clone())
    return model.eval().requires_grad_(False)


def drafted(runner: TorchRunner, monkeypatch, length: int, depth: int, **params: Any) -> tuple[list[int], list[Any]]:
    """A draft after a random text, and the logits of the last token of every pass."""
    passes: list[Any] = []
    forward = HeadModel.forward

    def noted(*arguments: Any) -> Any:
        found = forward(*arguments)
        passes.append(found[0][-1].clone())
        return found

    request = request_of(length, text=length, **params)
    head = runner.capabilities.head
    assert head is not None
    runner.forward(StepPlan([Row(0, 0, request.tokens[:-1], 0)]))
    request.num_computed = length - 1
    with monkeypatch.context() as patched:
        patched.setattr(HeadModel, "forward", noted)
        [draft] = head.draft([HeadTask(request, depth)])
    runner.free(0)
    return list(draft.tokens), passes


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [3, 40])
def test_a_padded_head_drafts_what_it_drafts_alone(small, monkeypatch, length, params):
    """A short text is read by the first pass of the loop, a long one is caught up before it."""
    alone = small.runner(torch.float32, ROOM)
    larger = PaddedModel.start(small, torch.float32, LARGE, DRAFT_VOCABULARY, ROOM).pair.runners[0]
    expected, exact = drafted(alone, monkeypatch, length, 5, **params)
    found, passes = drafted(larger, monkeypatch, length, 5, **params)
    assert found == expected
    assert len(passes) == len(exact) == 5
    for theirs, ours in zip(exact, passes, strict=True):
        assert len(ours) == DRAFT_VOCABULARY
        assert (ours[:VOCAB_SIZE] - theirs).abs().max() < 2e-5 * theirs.abs().max()
        chances = ours.softmax(0)
        assert (chances[:VOCAB_SIZE] - theirs.softmax(0)).abs().max() < 1e-6
        assert chances[VOCAB_SIZE:].max() == 0.0, "a token beyond the head's vocabulary could be drafted"


def test_a_padded_head_has_the_sizes_of_a_large_one(small):
    config, _ = padded(small.config, small.weights, LARGE)
    described, weights = padded_head(
        small.head, small.head_weights, small.config, LARGE, DRAFT_VOCABULARY, torch.bfloat16
    )
    assert (described.width, described.hidden, described.head_dim) == (config.width, config.hidden, config.head_dim)
    assert weights.fuse.shape == (640, 2 * 640)
    assert weights.layer.qkv.shape == ((16 + 2 * 4) * 32, 2 * 640)
    assert weights.head.shape == (DRAFT_VOCABULARY, 640)
    assert plain_tensor(weights.head).dtype == torch.bfloat16
    assert len(weights.ids.unique()) == DRAFT_VOCABULARY
    for matrix in (weights.fuse, weights.layer.qkv, weights.layer.gate_up, weights.layer.down, weights.head):
        assert (plain_tensor(matrix) == 0).float().mean() < 0.9, "products with zeros are faster than a real head's"


def test_weights_in_another_dtype_stay_tied(small):
    tied = replace(small.weights, head=small.weights.embedding)
    found = converted(tied, torch.bfloat16)
    assert found.head is found.embedding
    assert found.layers[0].qkv.dtype == torch.bfloat16
    assert found.layers[0].qkv_bias is None
    assert converted(small.head_weights, torch.bfloat16).ids.dtype == torch.int64

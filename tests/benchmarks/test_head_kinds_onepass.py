"""The one-pass kind of head: its unrolled training pass equals drafting slot by slot, and it learns."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[distill]")
pytest.importorskip("safetensors", reason="safetensors is not installed; pip install outpace[torch]")

import torch
from torch import Tensor

from benchmarks.head_kinds_onepass import OnePassHead, OnePassTrainer
from outpace.training.batches import epochs, make_batch
from outpace.training.data import Answers
from outpace.training.evaluate import num_hits, tokens_a_step
from outpace.training.target import Target
from outpace.training.train import Progress, Trainer, TrainSettings
from tests.benchmarks.tiny_onepass import tiny_onepass_head
from tests.head_reference import (
    GPU_SHAPE,
    HeadReference,
    assert_drafts_step_by_step,
    assert_gpu_agrees,
    assert_gradients,
    attended,
    finished,
    rms,
    rotated,
)
from tests.tiny_gguf import FAMILIES, VOCAB_SIZE
from tests.tiny_training import CPU, SHAPE, random_texts, tiny_answers, tiny_target


@pytest.fixture(scope="module", params=FAMILIES)
def any_target(request, tmp_path_factory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"), request.param)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def answers(target) -> Answers:
    return tiny_answers(target)


class OnePassReference(HeadReference):
    """One block at a time, slot after slot."""

    def draft_logits(self, tokens: list[int], drafted: list[int]) -> Tensor:
        c, p, known = self.c, self.p, len(tokens) - 1
        features = rms(self.features[:known], p["hidden_norm.weight"], c.epsilon)
        layers = [
            {name.removeprefix(f"layers.{i}."): value for name, value in p.items() if name.startswith(f"layers.{i}.")}
            for i in range(c.num_layers)
        ]
        caches = []
        for layer in layers:
            keys = [(layer["self_attn.k_proj.weight"] @ each).view(-1, c.head_dim) for each in features]
            values = [(layer["self_attn.v_proj.weight"] @ each).view(-1, c.head_dim) for each in features]
            turned = [rotated(each, position, self.target) for position, each in enumerate(keys)]
            caches.append(list(zip(turned, values, strict=True)))
        for slot in range(len(drafted) + 1):
            h = p["mask_embedding"] if slot else self.target.weights.embedding[tokens[-1]]
            for layer, cache in zip(layers, caches, strict=True):
                x = rms(h, layer["input_layernorm.weight"], c.epsilon)
                q, k, v = ((layer[f"self_attn.{name}_proj.weight"] @ x).view(-1, c.head_dim) for name in "qkv")
                cache.append((rotated(k, known + slot, self.target), v))
                h = finished(h, attended(rotated(q, known + slot, self.target), cache, c), layer, c)
        before = p["markov_w1.weight"][[*tokens, *drafted][-1]]
        logits: Tensor = p["lm_head.weight"] @ rms(h, p["norm.weight"], c.epsilon) + p["markov_w2.weight"] @ before
        return logits


def test_unrolled_training_equals_drafting_slot_by_slot(any_target):
    assert_drafts_step_by_step(OnePassReference, tiny_onepass_head(any_target)[0], any_target)


def test_gradients_of_the_unrolled_pass_equal_those_of_the_reference(any_target):
    assert_gradients(OnePassReference, tiny_onepass_head(any_target)[0], any_target)


def test_training_raises_acceptance_far_above_a_random_head(target, answers):
    head, kept = tiny_onepass_head(target, kept=torch.arange(VOCAB_SIZE))

    def figure() -> float:
        return tokens_a_step(list(num_hits(target, head, kept, answers.train, SHAPE, rounded=False).values()), 3)

    before = figure()
    settings = TrainSettings(seconds=1e9, warm_up=1e-12, learning_rate=3e-3, shape=SHAPE)
    trainer = OnePassTrainer(target, head, kept, settings, Progress(), compile=False)
    batches = epochs(answers.train, SHAPE, 0, 0, CPU)
    for _ in range(60):
        trainer.progress.seconds += 1
        trainer.step(next(batches))
    assert figure() > max(before + 0.3, 1.8)  # start values alone already draft some repetitions


def test_the_confidence_is_drawn_towards_the_overlap(target):
    head, kept = tiny_onepass_head(target)
    trainer = OnePassTrainer(target, head, kept, TrainSettings(seconds=1e9, shape=SHAPE), Progress(), compile=False)
    batch = make_batch(random_texts([30, 12]), 32, [0, 1], SHAPE, CPU)
    bias = head.parameters["confidence_head.proj.bias"]
    (found,) = torch.autograd.grad(trainer.batch_loss(batch), [bias])
    features = target.features(batch, head.config.taps)
    chains, expected = head.begin(features, batch), 0.0
    for k in range(SHAPE.num_steps):
        drafted = chains.step(batch.shifted(1 + k), batch.entries)
        places = (batch.entries + 1 + k).clamp(max=len(batch.tokens) - 1)
        true = (features.last[places] @ target.weights.head[kept].T).softmax(-1)
        overlaps = torch.minimum((drafted @ chains.output.T).softmax(-1), true).sum(-1)
        pulls = (chains.confidence.sigmoid() - overlaps) * batch.weights[k] / batch.num_drafted[k]
        expected += float(pulls.sum().detach())
    assert float(found) == pytest.approx(expected, rel=1e-3)


def test_the_loss_of_drafts_is_the_packages(target):
    head, kept = tiny_onepass_head(target)
    settings = TrainSettings(seconds=1e9, shape=SHAPE)
    batch = make_batch(random_texts([30, 12]), 32, [0, 1], SHAPE, CPU)
    drafts = {name: p for name, p in head.parameters.items() if "confidence" not in name}
    found = []
    for trained_by in (Trainer, OnePassTrainer):
        total = trained_by(target, head, kept, settings, Progress(), compile=False).batch_loss(batch)
        found.append(torch.autograd.grad(total, list(drafts.values())))
    for name, ours, theirs in zip(drafts, *found, strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_compiled_step_has_the_loss_and_gradients_of_the_cpu(tmp_path):
    def make(target: Target, base: Target, compile: bool) -> Trainer:
        head, kept = tiny_onepass_head(base)
        parameters = {name: p.clone().to(target.device) for name, p in head.parameters.items()}
        head = OnePassHead(head.config, target, parameters, compile=compile)
        settings = TrainSettings(seconds=1e9, shape=GPU_SHAPE)
        return OnePassTrainer(target, head, kept.to(target.device), settings, Progress(), compile=compile)

    assert_gpu_agrees(tmp_path, make)

"""Training on a GPU gives what it gives on the CPU; skipped where there is none."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[distill]")

import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from outpace.training import attention
from outpace.training.answers import Answerer, Ask
from outpace.training.head import Head
from outpace.training.target import Target
from outpace.training.train import Progress, Trainer, TrainSettings
from tests.head_reference import GPU_SHAPE, assert_gpu_agrees
from tests.tiny_gguf import write_model
from tests.tiny_training import CPU, tiny_head

GPU = torch.device("cuda")


def test_the_fused_attention_is_exact_on_this_device():
    assert attention._is_exact(GPU)


def test_answers_are_those_of_the_cpu(tmp_path):
    path = write_model(tmp_path / "tiny.gguf", "qwen2", num_layers=3)
    prompts = [[5, 6, 7, 8], [9, 10], [11, 12, 13], list(range(20, 60)), [30, 31]]

    def answers(device: torch.device) -> dict[int, list[int]]:
        target = Target.load(path, device, torch.float32)
        answerer = Answerer(target, max_prompt=40, max_answer=40, end_ids=[256], most_rows=3)
        asks = [Ask(i, prompt, 0.0) for i, prompt in enumerate(prompts)]
        return {answer.key: answer.tokens.tolist() for answer in answerer.answer(asks)}

    ours, theirs = answers(GPU), answers(CPU)
    same = sum(a == b for key in theirs for a, b in zip(ours[key], theirs[key], strict=False))
    assert same > 0.9 * sum(map(len, theirs.values()))  # a near tie may fall the other way, and the rest follows it


def test_a_compiled_step_has_the_loss_and_gradients_of_the_cpu(tmp_path):
    def make(target: Target, base: Target, compile: bool) -> Trainer:
        head, kept = tiny_head(base)
        parameters = {name: p.clone().to(target.device) for name, p in head.parameters.items()}
        head = Head(head.config, target, parameters, compile=compile)
        settings = TrainSettings(seconds=1e9, shape=GPU_SHAPE)
        return Trainer(target, head, kept.to(target.device), settings, Progress(), compile=compile)

    assert_gpu_agrees(tmp_path, make)

"""Training on a GPU gives what it gives on the CPU; skipped where there is none."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[distill]")

import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from outpace.training import attention
from outpace.training.answers import Answerer, Ask
from outpace.training.batches import BatchShape, make_batch
from outpace.training.kinds import KINDS
from outpace.training.target import Target
from outpace.training.train import Progress, Trainer, TrainSettings
from tests.tiny_gguf import write_model
from tests.tiny_training import CPU, random_texts, tiny_head

GPU = torch.device("cuda")
SHAPE = BatchShape(num_tokens=32 * 12, chunk=64, num_steps=3)


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


@pytest.mark.parametrize("kind", ["eagle3", "onepass"])
def test_a_compiled_step_has_the_loss_and_gradients_of_the_cpu(kind, tmp_path):
    path = write_model(tmp_path / "tiny.gguf", num_layers=3)
    settings = TrainSettings(seconds=1e9, shape=SHAPE)
    found = []
    for device, dtype, compile in ((CPU, torch.float32, False), (GPU, torch.bfloat16, True)):
        target = Target.load(path, device, dtype, compile=compile)
        base, kept = tiny_head(Target.load(path, CPU, torch.float32), kind)
        parameters = {name: p.clone().to(device) for name, p in base.parameters.items()}
        head = KINDS[kind].make(base.config, target, parameters, compile=compile)
        trainer = Trainer(target, head, kept.to(device), settings, Progress(), compile=compile)
        batch = make_batch(random_texts([90, 40, 64]), 96, [0, 1, 2], SHAPE, device)
        total = trainer.batch_loss(batch)
        total.backward()
        gradients = {name: p.grad.float().cpu() for name, p in parameters.items() if p.grad is not None}
        found.append((float(total.detach()), gradients))
    (loss, gradients), (gpu_loss, gpu_gradients) = found
    assert gpu_loss == pytest.approx(loss, rel=0.03)
    assert gradients.keys() == gpu_gradients.keys()
    for name, expected in gradients.items():
        cosine = torch.nn.functional.cosine_similarity(gpu_gradients[name].flatten(), expected.flatten(), dim=0)
        assert cosine > 0.95, name

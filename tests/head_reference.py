"""Drafting with a head token by token, in dull code, and the comparison of an unrolled training pass with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outpace.models.head_file import HeadConfig
from outpace.training.batches import BatchShape, Texts, make_batch
from outpace.training.head import Head, default_taps
from outpace.training.target import Target
from outpace.training.train import Trainer
from tests.tiny_gguf import write_model
from tests.tiny_training import CPU, SHAPE, random_texts

GPU_SHAPE = BatchShape(num_tokens=32 * 12, chunk=64, num_steps=3)


def rms(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def rotated(x: Tensor, position: int, target: Target) -> Tensor:
    """[heads, dim] at one position; the pair of element i is i + dim / 2."""
    half = x.shape[-1] // 2
    angles = torch.tensor([position * f for f in target.config.rope.frequencies], dtype=torch.float32)
    first, second = x[:, :half], x[:, half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], 1)


def attended(q: Tensor, cache: list[tuple[Tensor, Tensor]], c: HeadConfig) -> Tensor:
    """One query [heads, dim] over keys and values [kv heads, dim] of all earlier tokens."""
    mixed = []
    for i in range(c.num_heads):
        kv = i // (c.num_heads // c.num_kv_heads)
        scores = torch.stack([keys[kv] @ q[i] for keys, _ in cache]) / c.head_dim**0.5
        mixed.append(scores.softmax(0) @ torch.stack([values[kv] for _, values in cache]))
    return torch.cat(mixed)


def finished(h: Tensor, mixed: Tensor, p: dict[str, Tensor], c: HeadConfig) -> Tensor:
    h = h + p["self_attn.o_proj.weight"] @ mixed
    m = rms(h, p["post_attention_layernorm.weight"], c.epsilon)
    gated = torch.nn.functional.silu(p["mlp.gate_proj.weight"] @ m) * (p["mlp.up_proj.weight"] @ m)
    out: Tensor = h + p["mlp.down_proj.weight"] @ gated
    return out


class HeadReference:
    """One text and one draft at a time, entry after entry, as a server would run it."""

    def __init__(self, head, target: Target, taps: Tensor) -> None:
        self.p, self.c, self.target = head.parameters, head.config, target
        fused = [rms(taps[:, i], self.p[f"fc_norm.{i}.weight"], self.c.epsilon) for i in range(len(self.c.taps))]
        self.features = torch.cat(fused, -1) @ self.p["fc.weight"].T

    def draft_logits(self, tokens: list[int], drafted: list[int]) -> Tensor:
        """Logits of the token after `tokens` and `drafted`. The target has said all of `tokens` and its taps are known
        for all but the last."""
        cache: list[tuple[Tensor, Tensor]] = []
        for position in range(1, len(tokens)):
            last = self._run(self.features[position - 1], tokens[position], position - 1, cache)
        for i, token in enumerate(drafted):
            last = self._run(last, token, len(tokens) - 1 + i, cache)
        logits: Tensor = rms(last, self.p["norm.weight"], self.c.epsilon) @ self.p["lm_head.weight"].T
        return logits

    def _run(self, h: Tensor, token: int, position: int, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        c, p = self.c, {name.removeprefix("layers.0."): value for name, value in self.p.items()}
        e = self.target.weights.embedding[token]
        x = torch.cat([
            rms(e, p["input_layernorm.weight"], c.epsilon), rms(h, p["hidden_norm.weight"], c.epsilon)
        ])  # fmt: skip
        q, k, v = ((p[f"self_attn.{name}_proj.weight"] @ x).view(-1, c.head_dim) for name in "qkv")
        cache.append((rotated(k, position, self.target), v))
        return finished(h, attended(rotated(q, position, self.target), cache, c), p, c)


def alone(target: Target, tokens: list[int]) -> Tensor:
    """Taps of one text by itself."""
    texts = random_texts([len(tokens)])
    texts = Texts(torch.tensor(tokens).numpy(), texts.offsets, texts.prompt_lengths)
    batch = make_batch(texts, 96, [0], SHAPE, CPU)
    return target.features(batch, default_taps(target.config.num_layers)).taps[: len(tokens)]


@torch.no_grad()
def assert_drafts_step_by_step(make, head: Head, target: Target) -> None:
    """The logits of the unrolled pass are those of the reference `make`."""
    texts = random_texts([17, 30, 9])
    batch = make_batch(texts, 32, [2, 0, 1], SHAPE, CPU)
    chains = head.begin(target.features(batch, head.config.taps), batch)
    found = [chains.step(batch.shifted(1 + k), batch.entries) @ chains.output.T for k in range(3)]
    at = 0
    for text, count in zip(batch.texts, batch.counts, strict=True):
        tokens = texts.tokens[texts.offsets[text] : texts.offsets[text + 1]].tolist()
        reference = make(head, target, alone(target, tokens))
        for entry in (0, count // 2, count - 3):
            known = 5 + entry + 1  # the prompt has 5 tokens, and entry 0 follows the answer's first
            for k in range(3):
                expected = reference.draft_logits(tokens[:known], tokens[known : known + k])
                torch.testing.assert_close(found[k][at + entry], expected, rtol=1e-4, atol=1e-4)
        at += count


def assert_gradients(make, head: Head, target: Target) -> None:
    """And so are its gradients."""
    for parameter in head.parameters.values():
        parameter.requires_grad_()
    texts = random_texts([12])
    batch = make_batch(texts, 32, [0], SHAPE, CPU)
    chains = head.begin(target.features(batch, head.config.taps), batch)
    found = [chains.step(batch.shifted(1 + k), batch.entries) @ chains.output.T for k in range(3)]
    tokens = texts.tokens.tolist()
    reference = make(head, target, alone(target, tokens))
    expected = [reference.draft_logits(tokens[: 6 + entry], tokens[6 + entry : 6 + entry + 2]) for entry in (0, 2)]
    names = [name for name in head.parameters if "confidence" not in name]  # on which no logits depend
    mix = torch.randn(2, len(expected[0]), generator=torch.Generator().manual_seed(0))
    ours = torch.autograd.grad((found[2][[0, 2]] * mix).sum(), [head.parameters[n] for n in names])
    theirs = torch.autograd.grad((torch.stack(expected) * mix).sum(), [head.parameters[n] for n in names])
    for name, a, b in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3, msg=name)


def assert_gpu_agrees(folder: Path, make: Callable[[Target, Target, bool], Trainer]) -> None:
    """A compiled step on the GPU has the loss and gradients of the CPU. `make`: of a target, the same target on the
    CPU, and whether to compile; its batches have GPU_SHAPE."""
    path = write_model(folder / "tiny.gguf", num_layers=3)
    found = []
    for device, dtype, compile in ((CPU, torch.float32, False), (torch.device("cuda"), torch.bfloat16, True)):
        target = Target.load(path, device, dtype, compile=compile)
        trainer = make(target, Target.load(path, CPU, torch.float32), compile)
        total = trainer.batch_loss(make_batch(random_texts([90, 40, 64]), 96, [0, 1, 2], GPU_SHAPE, device))
        total.backward()
        gradients = {n: p.grad.float().cpu() for n, p in trainer.head.parameters.items() if p.grad is not None}
        found.append((float(total.detach()), gradients))
    (loss, gradients), (gpu_loss, gpu_gradients) = found
    assert gpu_loss == pytest.approx(loss, rel=0.03)
    assert gradients.keys() == gpu_gradients.keys()
    for name, expected in gradients.items():
        cosine = torch.nn.functional.cosine_similarity(gpu_gradients[name].flatten(), expected.flatten(), dim=0)
        assert cosine > 0.95, name

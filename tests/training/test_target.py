"""The dense target of training equals the torch backend, in logits and taps, for every family."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[distill]")

import torch

from outpace.backends.base import Capacity
from outpace.backends.torch.device import TorchOptions
from outpace.backends.torch.runner import TorchModel, TorchRunner
from outpace.backends.torch.storage import plain_tensor
from outpace.core import Row, StepPlan
from outpace.errors import BackendError, ModelError
from outpace.training import answers as answers_module
from outpace.training import target as target_module
from outpace.training.answers import Answerer, Ask
from outpace.training.batches import make_batch
from outpace.training.target import Target
from tests.fakes import ByteTokenizer
from tests.tiny_gguf import FAMILIES, write_model
from tests.tiny_training import CPU, SHAPE, random_texts, tiny_target

CAPACITY = Capacity(max_sequences=2, cache_tokens=256, max_context=128, max_step_tokens=128)


def runner(path) -> TorchRunner:
    found = TorchModel(path, TorchOptions("cpu"), tokenizer=ByteTokenizer()).start(CAPACITY, 1).runner
    assert isinstance(found, TorchRunner)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_padded_batch_equal_the_backends(family, tmp_path):
    target = tiny_target(tmp_path, family)
    texts = random_texts([40, 23, 64])
    batch = make_batch(texts, 64, [1, 2, 0], SHAPE, CPU)
    last = target.features(batch, (1, 3)).last.view(-1, 64, target.config.width)
    for row, text in enumerate(batch.texts):
        tokens = texts.tokens[texts.offsets[text] : texts.offsets[text + 1]].tolist()
        backend = runner(tmp_path / "tiny.gguf")
        expected = backend.forward(StepPlan([Row(0, 0, tokens, len(tokens))])).copy()
        found = (last[row, : len(tokens)] @ plain_tensor(target.weights.head).T).numpy()
        assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(("name", "changes"), [("Llama", {}), ("Qwen2", {}), ("Qwen3", {"head_dim": 32})])
def test_taps_equal_the_hidden_states_of_transformers(name, changes, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=120, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
    model.save_pretrained(tmp_path)
    target = Target.load(tmp_path, CPU, torch.float32)
    texts = random_texts([30])
    texts.tokens[:] %= 120
    batch = make_batch(texts, 32, [0], SHAPE, CPU)
    found = target.features(batch, (1, 3)).taps[:30]
    with torch.no_grad():
        states = model(torch.from_numpy(texts.tokens)[None], output_hidden_states=True).hidden_states
    for i, layer in enumerate((1, 3)):  # state 0 is the embedding
        expected = states[layer][0]
        assert (found[:, i] - expected).abs().max() < 1e-4 * expected.abs().max()


def test_the_tap_after_the_last_layer_is_before_the_final_norm(tmp_path):
    target = tiny_target(tmp_path)
    batch = make_batch(random_texts([20]), 32, [0], SHAPE, CPU)
    features = target.features(batch, (1, 3))
    tap = features.taps[:, 1]
    normed = tap / (tap.square().mean(-1, keepdim=True) + target.config.epsilon).sqrt() * target.weights.final_norm
    torch.testing.assert_close(normed, features.last, rtol=1e-5, atol=1e-5)


def test_greedy_answers_are_the_backends_own_continuation(tmp_path):
    target = tiny_target(tmp_path, "qwen2")
    prompts = [[5, 6, 7, 8], [9, 10], [11, 12, 13], [20, 21, 22, 23, 24]]
    answerer = Answerer(target, max_prompt=8, max_answer=20, end_ids=[256], most_rows=3)
    found = {
        answer.key: answer.tokens.tolist() for answer in answerer.answer(Ask(i, p, 0.0) for i, p in enumerate(prompts))
    }
    for i, prompt in enumerate(prompts):
        backend, tokens = runner(tmp_path / "tiny.gguf"), list(prompt)
        step = backend.forward(StepPlan([Row(0, 0, tokens, 1)]))
        while True:
            tokens.append(int(step[0].argmax()))
            if tokens[-1] == 256 or len(tokens) == len(prompt) + 20:
                break
            step = backend.forward(StepPlan([Row(0, len(tokens) - 1, tokens[-1:], 1)]))
        assert found[i] == tokens[len(prompt) :]


def test_sampled_answers_follow_the_distribution_and_differ(tmp_path):
    target = tiny_target(tmp_path)
    prompt = [5, 6, 7, 8]
    torch.manual_seed(0)
    answerer = Answerer(target, max_prompt=4, max_answer=1, end_ids=[256], most_rows=500)
    drawn = np.array([answer.tokens[0] for _ in range(4) for answer in answerer.answer([Ask(0, prompt, 1.0)] * 500)])
    probs = torch.from_numpy(
        runner(tmp_path / "tiny.gguf").forward(StepPlan([Row(0, 0, prompt, 1)]))[0].copy()
    ).softmax(0)
    likeliest = probs.argsort(descending=True)[:5]
    for token in likeliest.tolist():
        p = float(probs[token])
        assert abs((drawn == token).mean() - p) < 4 * (p * (1 - p) / len(drawn)) ** 0.5 + 1e-3


def test_a_row_of_an_ended_answer_is_given_to_the_next_prompt(tmp_path):
    target = tiny_target(tmp_path)
    answerer = Answerer(target, max_prompt=4, max_answer=6, end_ids=[256], most_rows=2)
    found = list(answerer.answer(Ask(i, [5 + i, 6], 1.0) for i in range(7)))
    assert sorted(answer.key for answer in found) == list(range(7))
    assert all(1 <= len(answer.tokens) <= 6 for answer in found)
    assert all(len(answer.tokens) == 6 or answer.tokens[-1] == 256 for answer in found)


def test_too_little_memory_is_said_before_anything_is_loaded(tmp_path, monkeypatch):
    path = write_model(tmp_path / "tiny.gguf")
    with monkeypatch.context() as patched:
        patched.setattr(target_module, "usable_bytes", lambda *_: 1000)
        with pytest.raises(
            ModelError, match=r"tiny needs 0.0 GB for its weights and cpu has 0.0 GB free; use a larger"
        ):
            Target.load(path, CPU, torch.float32)
    loaded = Target.load(path, CPU, torch.float32)
    monkeypatch.setattr(answers_module, "usable_bytes", lambda *_: 1000)
    with pytest.raises(BackendError, match=r"cpu has no room for the cache of one answer .*; use a larger device"):
        Answerer(loaded, max_prompt=8, max_answer=8, end_ids=[256])


def test_an_unknown_architecture_is_refused_in_a_sentence(tmp_path):
    path = write_model(tmp_path / "strange.gguf", "mamba")
    with pytest.raises(ModelError, match=r"no head can be trained for strange.gguf: .*'mamba'; supported are"):
        Target.load(path, CPU, torch.float32)

"""`draft="self"`: the target's own rounded copy drafts for it, and answers stay the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")
pytest.importorskip("safetensors", reason="safetensors is not installed; pip install outpace[torch]")
pytest.importorskip("tokenizers", reason="tokenizers is not installed; pip install outpace[torch]")

import torch

from outpace import LLM, SamplingParams
from outpace.backends.base import Capacity
from outpace.backends.torch.device import TorchOptions
from outpace.backends.torch.runner import TorchModel, TorchRunner
from outpace.backends.torch.self_draft import SelfDraft
from outpace.backends.torch.storage.planar import Planar
from outpace.backends.torch.storage.scaled import Scaled
from outpace.config import EngineConfig
from outpace.core import RequestOutput
from outpace.errors import UsageError
from tests.tiny_folder import write_folder
from tests.tiny_gguf import write_model

CAPACITY = Capacity(max_sequences=2, cache_tokens=256, max_context=128, max_step_tokens=64)
PROMPTS = [list(range(20, 50)), list(range(100, 109))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


def generate(model: Path, **options: Any) -> list[RequestOutput]:
    """Greedy, seeded, and both at once."""
    params = [
        SamplingParams(max_tokens=30, temperature=temperature, seed=seed, ignore_eos=True)
        for temperature, seed in ((0.0, None), (1.0, 11), (0.7, 12))
    ]
    with LLM(
        str(model), backend="torch", device="cpu", max_context=128, max_step_tokens=64, threads=1, **options
    ) as llm:
        return llm.generate([PROMPTS[i % 2] for i in range(len(params))], params)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("draft", ["self", "self:int4-128", "self:fp8", "self:int8"])
def test_answers_are_the_targets_own(folder, draft):
    plain = generate(folder, speculation="off")
    drafted = generate(folder, draft=draft, speculation="on", method="draft", depth=3)
    assert tokens_of(drafted) == tokens_of(plain)
    accepted = sum(output.outputs[0].speculation.num_accepted for output in drafted)
    assert accepted > 0, "nothing was accepted, so nothing was tested"


def test_a_gguf_kept_as_stored_drafts_for_itself(tmp_path):
    path = write_model(tmp_path / "m.gguf", "qwen2", "Q8_0")
    plain = generate(path, quantization="stored", speculation="off")
    drafted = generate(path, quantization="stored", draft="self", speculation="on", method="draft", depth=2)
    assert tokens_of(drafted) == tokens_of(plain)


def test_the_copy_shares_what_is_not_rounded_and_takes_what_was_planned(folder):
    target = TorchModel(folder, TorchOptions("cpu"))
    runner: Any = target.start(CAPACITY, 1).runner
    draft = SelfDraft(target, "int4")
    loaded = draft.start(CAPACITY, 1)
    assert isinstance(loaded.runner, TorchRunner)
    ours, theirs = runner.model.weights, loaded.runner.model.weights
    assert theirs.embedding is ours.embedding and theirs.head is ours.head and theirs.final_norm is ours.final_norm
    for mine, copy in zip(ours.layers, theirs.layers, strict=True):
        assert copy.attention_norm is mine.attention_norm
        assert all(isinstance(each, Planar) for each in (copy.qkv, copy.out, copy.gate_up, copy.down))
        assert isinstance(mine.qkv, torch.Tensor)
    assert draft.plan(CAPACITY).weights == loaded.size_bytes < target.plan(CAPACITY).weights
    assert draft.plan(CAPACITY).cache_token == target.plan(CAPACITY).cache_token


def test_the_format_may_come_from_the_setting(folder):
    config = EngineConfig(draft="self", draft_quantization="fp8")
    assert config.self_draft == "fp8" and EngineConfig(draft="self").self_draft == "int4"
    assert EngineConfig(draft="selfish.gguf").self_draft is None
    target = TorchModel(folder, TorchOptions("cpu"))
    target.start(CAPACITY, 1)
    runner: Any = SelfDraft(target, "fp8").start(CAPACITY, 1).runner
    assert isinstance(runner.model.weights.layers[0].down, Scaled)


def test_what_cannot_be_gets_one_sentence(tmp_path):
    with pytest.raises(UsageError, match="there is no draft 'self:int3'; use self, or one of self:int4, self:int4-128"):
        EngineConfig(draft="self:int3")
    with pytest.raises(UsageError, match="'self:int4' and draft_quantization 'fp8' disagree"):
        EngineConfig(draft="self:int4", draft_quantization="fp8")
    with pytest.raises(UsageError, match="as slow as the target"):
        EngineConfig(draft="self", draft_quantization="none")
    with pytest.raises(UsageError, match="only the torch backend makes, and the llamacpp backend runs this model"):
        LLM(str(write_model(tmp_path / "m.gguf")), draft="self", backend="llamacpp")

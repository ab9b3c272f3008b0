"""The commands that a plan prints: what their engines take, and what is said where they do not."""

from __future__ import annotations

import argparse
import json
import shlex

import pytest

from outpace.commands.serve import add_arguments, configure
from outpace.config import EngineConfig
from outpace.plan.drafts import open_draft
from outpace.plan.guesses import Conditions
from outpace.plan.launch import Launch, launch
from outpace.plan.machines import machine
from outpace.plan.memory import Deployment, divide
from outpace.plan.models import PlannedModel, open_model
from outpace.plan.pairing import judge
from outpace.server.settings import gather
from tests.tiny_folder import CONFIG
from tests.tiny_gguf import write_model

TWO = Deployment(machine("h100"), 2, 0.92)
ONE = Deployment(machine("h200"))
HERE = Deployment(machine("epyc-9654"))


def launched(
    target: str | PlannedModel, draft: str | None, to: Deployment = ONE, conditions: Conditions | None = None,
    draft_precision: str | None = None,
) -> Launch:  # fmt: skip
    conditions = conditions or Conditions()
    model = open_model(target) if isinstance(target, str) else target
    best = None
    if draft is not None:
        opened = open_draft(draft, model, draft_precision)
        best = judge(model, opened, to, conditions, plain_memory=divide(model, None, to))
    return launch(model, best, to, conditions)


def speculation(found: Launch) -> dict[str, object]:
    words = shlex.split(found.commands["vllm"])
    return dict(json.loads(words[words.index("--speculative-config") + 1]))


def served(command: str) -> EngineConfig:
    """What `outpace serve` makes of it."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = shlex.split(command)
    assert words[:2] == ["outpace", "serve"]
    engine, _ = configure(gather(vars(parser.parse_args(words[2:])), {}))
    return EngineConfig(**engine)


def test_a_pair_on_two_gpus():
    found = launched(open_model("llama-3.1-70b", "int8"), "llama-3.2-1b", TWO)
    own = served(found.commands["outpace"])
    assert (own.quantization, own.tensor_parallel_size) == ("int8", 2)
    assert "--speculative-draft-tensor-parallel-size 1" in found.commands["outpace"]
    assert speculation(found)["model"] == "meta-llama/Llama-3.2-1B-Instruct"
    assert speculation(found)["draft_tensor_parallel_size"] == 2, "it refuses another number than the target's"
    assert any("--draft-gpus 2 plans for that" in note for note in found.notes)
    assert any("vLLM does not round to int8" in note for note in found.notes)


@pytest.mark.parametrize(
    ("precision", "flag"), [("fp8", "fp8"), ("int8", "int8"), ("int4_g32", "int4"), ("int4-128", "int4-128")]
)
def test_the_planned_format_is_the_one_that_is_served(precision, flag):
    found = launched(open_model("llama-3.1-8b", precision), "llama-3.2-1b", ONE, draft_precision=precision)
    own = served(found.commands["outpace"])
    assert own.quantization == own.draft_quantization == flag
    is_taken = "--quantization fp8" in found.commands["vllm"]
    assert is_taken == (precision == "fp8") == (speculation(found).get("quantization") == "fp8")


def test_published_weights_need_no_flag_and_files_have_to_be_named():
    assert served(launched("llama-3.1-8b", None).commands["outpace"]).quantization == "auto"
    file = launched(open_model("llama-3.1-8b", "q4_k_m"), None)
    assert any("in bf16, as it is published; name a file of it in q4_k_m instead." in note for note in file.notes)
    awq = launched(open_model("llama-3.1-8b", "awq"), None)
    assert any("let Outpace round it: --precision int4_g32" in note for note in awq.notes)


@pytest.mark.parametrize("draft", ["llama-3.2-1b", "ngram", "suffix", "self:int4", "self:int4-128", "self:fp8", None])
def test_the_command_is_one_that_serve_takes(draft):
    found = launched("llama-3.1-8b", draft, conditions=Conditions(depth=3))
    own = served(found.commands["outpace"])
    assert own.speculation == ("auto" if draft else "off") and own.depth == (3 if draft else None)
    assert own.draft == {"llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct"}.get(
        draft or "", draft if draft and draft.startswith("self") else None
    )


@pytest.mark.parametrize(
    ("target", "draft", "words"),
    [
        ("qwen2.5-72b", "qwen2.5-3b", "another number of tokens (151,936 for 152,064)"),
        ("llama-3.1-70b", "qwen2.5-0.5b", "it refuses a draft with another tokenizer"),
        ("llama-3.1-8b", "self:fp8", "does not draft with a rounded copy"),
    ],
)
def test_what_vllm_refuses_is_said_and_not_printed(target, draft, words):
    found = launched(target, draft, Deployment(machine("b300")))
    assert set(found.commands) == {"outpace"}
    assert any(note.startswith("There is no command for vLLM: ") and words in note for note in found.notes)


@pytest.mark.parametrize("target", ["deepseek-v2-lite", "gpt-oss-20b"])
def test_what_outpace_does_not_run_is_said_and_not_printed(target):
    found = launched(target, None)
    assert set(found.commands) == {"vllm"} and any("Outpace does not run" in note for note in found.notes)
    assert set(launched("mixtral-8x7b", None).commands) == {"outpace", "vllm"}


def test_files_and_folders(tmp_path):
    file = write_model(tmp_path / "model.gguf")
    on_cpu, on_gpu = (launched(str(file), "ngram", to) for to in (HERE, ONE))
    assert set(on_cpu.commands) == set(on_gpu.commands) == {"outpace"}
    assert served(on_cpu.commands["outpace"]).model == "model.gguf" and not on_cpu.notes
    assert any("a GGUF file was named" in note for note in on_gpu.notes)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": "llama"}))
    assert set(launched(str(folder), None).commands) == {"outpace", "vllm"}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": "falcon"}))
    assert set(launched(str(folder), None).commands) == {"vllm"}

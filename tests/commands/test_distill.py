"""`outpace distill`: all steps in one command, each step alone, and its sentences for wrong usage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[distill]")
pytest.importorskip("gguf", reason="gguf is not installed; pip install outpace[distill]")

import torch

from outpace.cli import main
from outpace.commands import distill
from outpace.models.head_file import as_json
from outpace.training.prepared import load_prepared, save_prepared
from outpace.training.target import Target
from outpace.training.train import Progress, Trainer
from outpace.training.write import Checkpoint, load_checkpoint, save_checkpoint
from tests.fakes import ByteTokenizer
from tests.tiny_gguf import write_model
from tests.tiny_training import CPU, tiny_head, tiny_prepared

SMALL = ["--device", "cpu", "--minutes", "0.02", "--answer-minutes", "0.01", "--max-answer", "16", "--vocab", "64",
         "--steps", "2", "--batch-tokens", "384"]  # fmt: skip
# What the machine with the GPU need not have.
UNNEEDED = ("jinja2", "xllamacpp", "pydantic", "fastapi", "uvicorn", "platformdirs", "httpx", "yaml", "gguf",
            "tokenizers", "prometheus_client", "huggingface_hub", "transformers")  # fmt: skip
BLOCKED = f"""
import runpy, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {UNNEEDED!r}:
            raise ImportError(name + " is not installed")
sys.meta_path.insert(0, Block())
runpy.run_module("outpace", run_name="__main__")
"""


@pytest.fixture
def target(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(distill, "_tokenizer", lambda path: ByteTokenizer())
    return write_model(tmp_path / "tiny.gguf", num_layers=3)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"Count to {i}."}) for i in range(60)))
    return path


def test_one_command_does_all_steps(target, prompts, tmp_path, capsys):
    out = tmp_path / "head"
    assert main(["distill", str(target), "--prompts", str(prompts), "--out", str(out), *SMALL]) == 0
    for name in ("config.json", "model.safetensors", "head.gguf", "card.md", "training.jsonl", "prepared.npz"):
        assert (out / name).is_file()
    said = capsys.readouterr().err
    assert "58 prompts to train on and 2 held out" in said
    assert "tokens a step on held-out prompts" in said and "hours here" in said
    assert main(["distill", str(target), "--prompts", str(prompts), "--out", str(out), *SMALL]) == 2
    assert "already holds a head; go on with --resume, or choose another --out" in capsys.readouterr().err


def test_an_interrupted_run_says_how_to_go_on_and_does(target, prompts, tmp_path, capsys, monkeypatch):
    out, step = tmp_path / "head", Trainer.step

    def interrupted(self, batch):
        if self.progress.steps == 2:
            raise KeyboardInterrupt
        return step(self, batch)

    command = ["distill", str(target), "--prompts", str(prompts), "--out", str(out), *SMALL]
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "step", interrupted)
        assert main(command) == 1
    assert f"what was done is kept in {out}, and the same command with --resume goes on" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    assert load_checkpoint(out).progress.steps > 2
    assert (out / "head.gguf").is_file()


def test_a_checkpoint_of_a_kind_that_is_no_longer_trained_is_refused_in_one_sentence(target, tmp_path, capsys):
    loaded, prepared, out = Target.load(target, CPU, torch.float32), tmp_path / "prepared.npz", tmp_path / "head"
    save_prepared(tiny_prepared(loaded), prepared)
    head, kept = tiny_head(loaded)
    save_checkpoint(Checkpoint(head.config, head.parameters, kept, Progress()), out)
    (out / "config.json").write_text(json.dumps(as_json(head.config) | {"speculators_model_type": "onepass"}))
    resume = ["distill", "train", str(target), "--prepared", str(prepared), "--out", str(out), *SMALL, "--resume"]
    for command in (resume, ["distill", "pack", str(out)]):
        assert main(command) == 1
        assert capsys.readouterr().err == (
            f"outpace: {out / 'config.json'} describes a head of kind 'onepass', which Outpace neither runs nor "
            "trains; train a new head into another folder\n"
        )


def test_training_needs_the_weights_and_the_prepared_file_only(target, tmp_path):
    prepared, out = tmp_path / "elsewhere" / "prepared.npz", tmp_path / "head"
    save_prepared(tiny_prepared(Target.load(target, CPU, torch.float32)), prepared)
    arguments = ["distill", "train", str(target), "--prepared", str(prepared), "--out", str(out), *SMALL]
    done = subprocess.run([sys.executable, "-c", BLOCKED, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == {
        "answers.safetensors", "card.md", "checkpoint.safetensors", "config.json", "training.jsonl",
    }  # fmt: skip
    assert main(["distill", "pack", str(out)]) == 0
    assert (out / "head.gguf").is_file()


def test_without_torch_training_says_what_to_install(target, tmp_path):
    blocked = BLOCKED.replace('"jinja2"', '"torch"').replace("'jinja2'", "'torch'")
    arguments = ["distill", "train", str(target), "--out", str(tmp_path / "head")]
    done = subprocess.run([sys.executable, "-c", blocked, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("which is not installed; pip install 'outpace[distill]'")


def test_help_teaches_without_loading_torch():
    code = "import sys; from outpace.cli import main\n"
    code += "try: main(['distill', '--help'])\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("False\n")
    for word in ("prepare", "train", "pack", "--held-out", "--resume", "speculators"):
        assert word in done.stdout


def test_preparing_writes_only_the_prepared_file(target, prompts, tmp_path):
    assert main(["distill", "prepare", str(target), "--prompts", str(prompts), "--out", str(tmp_path / "out")]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["prepared.npz"]
    assert len(load_prepared(tmp_path / "out" / "prepared.npz").train) == 58


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompts", "PROMPTS"], "Name a folder with --out DIR"),
        (["--out", "OUT"], "name files of prompts with --prompts FILE..."),
        (["train", "--out", "OUT"], "cannot read"),
        (["--prompts", "PROMPTS", "--out", "OUT", "--minutes", "0"], "minutes must be above 0; got 0"),
        (["--prompts", "PROMPTS", "--out", "OUT", "--hidden", "40"], "hidden must be a multiple of 32"),
        (
            ["--prompts", "PROMPTS", "--out", "OUT", "--batch-tokens", "100"],
            "must be a multiple of 32; got 100",
        ),
        (["train", "--out", "OUT", "--resume", "NOWHERE", "--prepared", "PREPARED"], "holds no checkpoint"),
        (["extra"], "expected one target and got"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments, sentence, target, prompts, tmp_path, capsys):
    save_prepared(tiny_prepared(Target.load(target, CPU, torch.float32)), tmp_path / "p.npz")
    names = {
        "PROMPTS": str(prompts),
        "OUT": str(tmp_path / "o"),
        "NOWHERE": str(tmp_path),
        "PREPARED": str(tmp_path / "p.npz"),
    }
    words = [names.get(word, word) for word in arguments]
    at = 1 if words[0] == "train" else 0
    words.insert(at, str(target))
    assert main(["distill", *SMALL, *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said.splitlines()[-1]

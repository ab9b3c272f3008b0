"""Hugging Face folders whose files are not what they should be: one sentence each, and nothing outside the folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")
pytest.importorskip("safetensors", reason="safetensors is not installed; pip install outpace[torch]")
pytest.importorskip("tokenizers", reason="tokenizers is not installed; pip install outpace[torch]")

from outpace.backends.torch.device import TorchOptions
from outpace.backends.torch.runner import TorchModel
from outpace.errors import ModelError
from outpace.models import hf_schema
from tests.tiny_folder import CONFIG, write_folder

INDEX = "model.safetensors.index.json"
DEEP = "[" * 100_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "model"
    inside.mkdir()
    return write_folder(inside)


def opened(folder: Path) -> TorchModel:
    return TorchModel(folder, TorchOptions("cpu"))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        opened(folder)
    sentence = str(caught.value)
    assert "\n" not in sentence and len(sentence) < 600
    return sentence


def test_the_folder_that_the_tests_damage_is_whole(folder):
    assert opened(folder).tokenizer.end_ids == {1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": 1}, "has no usable architectures (1)"),
        ({"architectures": [1]}, "has no usable architectures.0 (1)"),
        ({"architectures": ["x" * 5000]}, "is a xxx"),
        ({"rope_theta": "x"}, "has no usable rope_theta ('x')"),
        ({"rope_theta": "5"}, "has no usable rope_theta ('5')"),
        ({"rope_theta": float("nan")}, "has no usable rope_theta (nan)"),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "has no usable rope_theta (1.0)"),
        ({"rope_scaling": 5}, "has no usable rope_scaling (5)"),
        ({"rope_scaling": {"type": ["yarn"]}}, "has no usable rope_scaling.type (['yarn'])"),
        ({"rope_scaling": {"type": "yarn"}}, "RoPE scaling has no factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}}, "rope_parameters.beta_fast (-1)"),
        ({"eos_token_id": 1.5}, "has no usable eos_token_id (1.5)"),
        ({"eos_token_id": [1, "x"]}, "has no usable eos_token_id.1 ('x')"),
        ({"eos_token_id": CONFIG["vocab_size"]}, "has an eos_token_id of 320, but the model has only 320 tokens"),
        ({"eos_token_id": [-1]}, "has no usable eos_token_id.0 (-1)"),
        ({"num_hidden_layers": 1_000_000}, "has no usable num_hidden_layers (1000000)"),
        ({"num_hidden_layers": hf_schema.MAX_LAYERS}, "lacks model.layers.2."),
        ({"hidden_size": True}, "has no usable hidden_size (True)"),
        ({"vocab_size": (1 << 24) - 1, "hidden_size": (1 << 24) - 8}, "asks for"),
        ({"quantization_config": "x" * 5000}, "sets quantization_config to 'xxx"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_value_of_the_wrong_kind_in_the_config_is_named(folder, changes, words):
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    assert words in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", INDEX])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (DEEP.encode(), "is not JSON"),
        (b"\xff\xfe{}", "is not UTF-8 text"),
        (b"5", "is not a JSON object"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b" " * 2000, "is larger than"),
    ],
    ids=["deep", "not UTF-8", "a number", "digits", "large"],
)
def test_a_file_that_is_no_json_object_is_named(folder, monkeypatch, name, content, words):
    if words == "is larger than":
        monkeypatch.setattr(hf_schema, "MAX_JSON_BYTES", 1000)
    (folder / name).write_bytes(content)
    sentence = refusal(folder)
    assert name in sentence and words in sentence


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes in the file system here")
@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.jinja", "tokenizer.json", INDEX])
def test_a_pipe_is_not_waited_for(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert "is not a regular file" in refusal(folder)


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        (5, "has no usable weight_map.a (5)"),
        (None, "has no usable weight_map.a (None)"),
        ("x" * 5000, "has no usable weight_map.a ('xxx"),
        ("", "has no usable weight_map.a ('')"),
        ("../outside.safetensors", "lists the shard '../outside.safetensors', which is not a file's name"),
        ("..", "lacks the shard .."),
        ("a\0b", "lacks the shard"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_shards_are_names_of_files_in_the_folder(folder, shard: Any, words):
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    assert words in refusal(folder)


def test_a_shard_by_its_absolute_path_is_refused(folder):
    outside = (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": str(outside)}}))
    assert "which is not a file's name" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not UTF-8 text"),
        ("chat_template.jinja", b"x" * ((1 << 20) + 1), "chat_template.jinja is larger than 1 MiB"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "has no usable chat_template (5)"),
        ("tokenizer_config.json", b'{"eos_token": ["</s>"]}', "has no usable eos_token (['</s>'])"),
        ("tokenizer.json", b"{}", "tokenizer.json is missing or damaged"),
        ("tokenizer.json", DEEP.encode(), "tokenizer.json is missing or damaged"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_tokenizer_that_cannot_be_used_is_named(folder, name, content, words):
    (folder / name).write_bytes(content)
    assert words in refusal(folder)


def test_a_token_beyond_the_embeddings_is_refused(folder):
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    values["model"]["vocab"]["far"] = 10_000_000
    path.write_text(json.dumps(values))
    assert "has 10000001 tokens and the model 320 embeddings" in refusal(folder)

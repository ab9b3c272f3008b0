"""Weights rounded when they are loaded: the setting `quantization`, for the target, the draft and a draft head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")
pytest.importorskip("safetensors", reason="safetensors is not installed; pip install outpace[torch]")
pytest.importorskip("tokenizers", reason="tokenizers is not installed; pip install outpace[torch]")

import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from outpace import LLM, SamplingParams
from outpace.backends.base import Capacity
from outpace.backends.torch.device import TorchOptions
from outpace.backends.torch.model.loader import check_device, load_weights, open_checkpoint, rounded, weight_bytes
from outpace.backends.torch.runner import TorchModel, TorchRunner
from outpace.backends.torch.self_draft import SelfDraft
from outpace.backends.torch.storage.planar import Planar
from outpace.backends.torch.storage.rounding import KINDS, quantise
from outpace.backends.torch.storage.scaled import Scaled
from outpace.config import EngineConfig
from outpace.core import Row, StepPlan
from outpace.errors import BackendError, UsageError
from tests.tiny_folder import write_folder
from tests.tiny_gguf import write_model
from tests.tiny_head import write_head

CAPACITY = Capacity(max_sequences=2, cache_tokens=256, max_context=128, max_step_tokens=64)
CPU = torch.device("cpu")
TOKENS = list(range(20, 50))
Floats = NDArray[np.float32]


def nearest(kind: str, weight: Floats) -> Floats:
    """Round to nearest in numpy, independently of the code under test."""
    rows, columns = weight.shape
    if kind.startswith("int4"):
        group = 128 if kind == "int4-128" else 32
        padded = np.pad(weight, ((0, 0), (0, -columns % group))).reshape(rows, -1, group)
        extreme = np.take_along_axis(padded, np.abs(padded).argmax(2)[..., None], 2)
        scale = (extreme / np.float32(-8)).astype(np.float16).astype(np.float32)
        codes = np.clip(np.rint(padded / np.where(scale == 0, 1, scale)), -8, 7)
        grid: Floats = (codes * scale).reshape(rows, -1)[:, :columns]
        return grid
    largest = np.maximum(np.abs(weight).max(1, keepdims=True), 1e-30)
    if kind == "int8":
        whole: Floats = np.rint(weight / (largest / 127)) * (largest / 127)
        return whole
    scaled = np.abs(weight) / (largest / 448)
    # Of e4m3: three bits after the leading one, and steps of 2**-9 below 2**-6.
    step = np.exp2(np.floor(np.log2(np.maximum(scaled, 2.0**-6))) - 3)
    found: Floats = np.sign(weight) * np.rint(scaled / step) * step * (largest / 448)
    return found


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("columns", [576, 200])
def test_every_weight_becomes_the_nearest_of_its_format(kind, columns, monkeypatch):
    monkeypatch.setattr("outpace.backends.torch.storage._SLAB", 4 * columns)  # several slabs
    weight = np.random.default_rng(1).normal(size=(9, columns)).astype(np.float32)
    weight[3] = 0
    made = quantise(torch.from_numpy(weight), KINDS[kind])
    found = made.dequantise(torch.float32).numpy()
    assert made.shape == (9, columns) and not found[3].any()
    # A value halfway between two may go either way after a division that rounds.
    differing = np.abs(found - nearest(kind, weight)) > 1e-5
    assert differing.mean() < 1e-3
    error = np.abs(found - weight).max() / np.abs(weight).max()
    assert 0 < error < {"int4": 0.13, "int4-128": 0.13, "fp8": 0.04, "int8": 0.005}[kind]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


def start(path: Path, **options: Any) -> TorchRunner:
    runner = TorchModel(path, TorchOptions("cpu", **options)).start(CAPACITY, 1).runner
    assert isinstance(runner, TorchRunner)
    return runner


def logits(runner: TorchRunner) -> Floats:
    return runner.forward(StepPlan([Row(0, 0, TOKENS, len(TOKENS))])).copy()


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_rounded_model_is_the_model_of_the_rounded_weights(folder, kind, tmp_path):
    runner = start(folder, quantization=kind)
    layer = runner.model.weights.layers[0]
    assert all(isinstance(each, Planar | Scaled) for each in (layer.qkv, layer.out, layer.gate_up, layer.down))
    # The oracle: the same numbers, written as an ordinary checkpoint with a head of its own.
    tensors = load_file(folder / "model.safetensors")
    head = "fp8" if kind.startswith("int4") else kind
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    for name, tensor in tensors.items():
        if name.endswith(("_proj.weight", "lm_head.weight")):
            rounds = head if name == "lm_head.weight" else kind
            tensors[name] = torch.from_numpy(nearest(rounds, tensor.numpy()).astype(np.float32))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    text = (folder / "config.json").read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    (tmp_path / "config.json").write_text(text)
    save_file(tensors, tmp_path / "model.safetensors")
    expected = logits(start(tmp_path))
    assert np.abs(logits(runner) - expected).max() < 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_planned_bytes_are_those_that_are_taken(folder, kind):
    checkpoint = open_checkpoint(folder)
    weights = load_weights(checkpoint, torch.bfloat16, CPU, rounded(kind))
    assert weight_bytes(checkpoint, torch.bfloat16, rounded(kind)) == weights.num_bytes


def test_a_gguf_can_be_rounded_too(tmp_path):
    path = write_model(tmp_path / "m.gguf", "llama", "Q8_0")
    plain, coarse = logits(start(path)), logits(start(path, quantization="int4"))
    assert 0 < np.abs(plain - coarse).max() < 0.5 * np.abs(plain).max()


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_a_draft_head_is_rounded_and_planned_so(tmp_path, kind):
    target = write_model(tmp_path / "target.gguf")
    path = write_head(tmp_path / "head.gguf", target)
    model = TorchModel(target, TorchOptions("cpu", head_quantization=kind), head=path)
    runner = model.start(CAPACITY, 1).runner
    assert isinstance(runner, TorchRunner) and runner._head is not None
    weights = runner._head._model.weights
    layer = weights.layer
    assert all(
        isinstance(each, Planar | Scaled)
        for each in (weights.fuse, weights.head, layer.qkv, layer.out, layer.gate_up, layer.down)
    )
    tiny_norms = 2 * sum(each.nbytes for each in (weights.final_norm, weights.token_norm)) + 2048
    planned = model.plan(CAPACITY).weights - runner.model.weights.num_bytes
    assert 0 <= weights.num_bytes - planned <= tiny_norms  # a GGUF has norms of its own for the taps
    plain = generate(target, backend="torch", speculation="off")
    drafted = generate(
        target, backend="torch", draft=str(path), draft_quantization=kind, speculation="on", method="head", depth=3
    )
    assert drafted == plain


# Settings.


def generate(folder: Path, **options: Any) -> list[list[int]]:
    params = [
        SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=24, temperature=0.8, seed=7, ignore_eos=True),
    ]
    with LLM(str(folder), device="cpu", max_context=128, max_step_tokens=64, threads=1, **options) as llm:
        outputs = llm.generate([TOKENS, TOKENS[:9]], params)
        if options.get("method") == "draft":
            assert sum(output.outputs[0].speculation.num_accepted for output in outputs) > 0
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_target_and_draft_are_rounded_independently_and_answers_stay_the_targets_own(folder, kind):
    plain = generate(folder, quantization="int8", speculation="off")
    drafted = generate(
        folder,
        draft=str(folder),
        quantization="int8",
        draft_quantization=kind,
        speculation="on",
        method="draft",
        depth=3,
    )  # fmt: skip
    assert drafted == plain


def test_unknown_names_and_other_backends_get_one_sentence(tmp_path):
    with pytest.raises(UsageError, match="quantization must be one of auto, stored, none, int4, int4-128, fp8, int8"):
        EngineConfig(quantization="int3")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="draft_quantization must be one of auto, stored"):
        EngineConfig(draft_quantization="awq")  # type: ignore[arg-type]
    path = write_model(tmp_path / "m.gguf")
    for name in ("quantization", "draft_quantization"):
        options: dict[str, Any] = {name: "int4"}
        with pytest.raises(UsageError, match=f"{name} is 'int4', a setting of the torch backend"):
            LLM(str(path), backend="llamacpp", **options)


def test_a_model_on_several_devices_cannot_draft_with_itself(folder):
    target = TorchModel(folder, TorchOptions("cpu", tensor_parallel_size=2))
    with pytest.raises(BackendError, match="draft 'self' needs the whole model on one device"):
        SelfDraft(target, "int4")


def test_kernels_that_a_gpu_lacks_are_named(monkeypatch):
    gpu = torch.device("cuda", 0)
    with pytest.raises(BackendError, match="needs dtype bfloat16 on a GPU and the dtype is float16"):
        check_device("int8", torch.float16, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(BackendError, match="use quantization 'int8'"):
        check_device("int4", torch.bfloat16, gpu)
    check_device("int8", torch.bfloat16, gpu)
    check_device("int4", torch.float32, CPU)

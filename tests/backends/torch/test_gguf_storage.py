"""GGUF weights on the torch backend, kept as the file stores them; the oracle is the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")
pytest.importorskip("gguf", reason="gguf, the oracle, is not installed")

import gguf
import torch

from outpace.backends.base import Capacity
from outpace.backends.torch.device import TorchOptions
from outpace.backends.torch.model.gguf_quants import as_planar, dequantise, planar_format
from outpace.backends.torch.model.loader import load_weights, open_checkpoint, weight_bytes
from outpace.backends.torch.runner import TorchModel
from outpace.backends.torch.storage import planar, slabs
from outpace.backends.torch.storage.planar import Planar
from outpace.backends.torch.storage.stacked import Stacked
from outpace.core import Row, StepPlan
from tests.fakes import ByteTokenizer
from tests.numpy_reference import ReferenceModel
from tests.tiny_gguf import write_model

KEPT = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
CAPACITY = Capacity(max_sequences=2, cache_tokens=256, max_context=128, max_step_tokens=64)
CPU = torch.device("cpu")


def random_bytes(kind: str, rows: int, columns: int) -> tuple[int, np.ndarray]:
    """Random codes and scales; halves that would be NaN or infinite are made finite."""
    number = getattr(gguf.GGMLQuantizationType, kind)
    elements, size = gguf.GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(3).integers(0, 256, (rows * columns // elements, size), np.uint8)
    halves = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
    for at in halves:
        blocks[:, at + 1] &= 0xBF  # the highest bit of the exponent
    return int(number), blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("slab", [1 << 24, 2048])
def test_blocks_keep_their_values(kind, slab, monkeypatch):
    monkeypatch.setattr("outpace.backends.torch.storage._SLAB", slab)
    number, data = random_bytes(kind, 7, 768)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(number))
    made = as_planar(torch.from_numpy(data), number, 768)
    assert made.format == planar_format(number) and made.format.name == kind
    np.testing.assert_allclose(made.dequantise(torch.float32).numpy(), expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(dequantise(torch.from_numpy(data), number).view(7, 768).numpy(), expected, rtol=1e-6)


def test_slabs_cover_all_rows():
    assert list(slabs(5, 1 << 23)) == [(0, 2), (2, 4), (4, 5)]
    assert list(slabs(2, 1 << 30)) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("tied", [True, False])
def test_a_file_is_kept_as_it_is_stored_and_gives_the_same_logits(tmp_path, kind, tied):
    path = write_model(tmp_path / "m.gguf", "llama", kind, tied=tied)
    tokens = list(range(20, 50))
    reference = ReferenceModel.load(path).logits(tokens)
    model = TorchModel(path, TorchOptions("cpu", quantization="stored"), tokenizer=ByteTokenizer())
    runner: Any = model.start(CAPACITY, 1).runner
    weights = runner.model.weights
    assert all(isinstance(layer.qkv, Planar) and isinstance(layer.gate_up, Planar) for layer in weights.layers)
    assert isinstance(weights.head, Planar) and weights.head.format.name == kind
    found = runner.forward(StepPlan([Row(0, 0, tokens, len(tokens))]))
    assert np.abs(found - reference).max() < 2e-4 * np.abs(reference).max()


def mixed(path: Path) -> Path:
    """Values in 8 bits, and queries and keys in floats, as files for people mix them."""
    rng = np.random.default_rng(5)
    values = rng.normal(size=(32, 64)).astype(np.float32) / 8
    return write_model(path, "qwen2", "Q8_0", change={"blk.1.attn_v.weight": values, "blk.0.ffn_up.weight": rng.normal(
        size=(96, 64)).astype(np.float32) / 8})  # fmt: skip


def test_matrices_of_different_formats_are_stacked(tmp_path):
    path, tokens = mixed(tmp_path / "m.gguf"), list(range(20, 50))
    reference = ReferenceModel.load(path).logits(tokens)
    model = TorchModel(path, TorchOptions("cpu", quantization="stored"), tokenizer=ByteTokenizer())
    runner: Any = model.start(CAPACITY, 1).runner
    layers = runner.model.weights.layers
    assert isinstance(layers[0].qkv, Planar) and isinstance(layers[1].gate_up, Planar)
    stacked = layers[1].qkv
    assert isinstance(stacked, Stacked) and [type(part) for part in stacked.parts] == [Planar, torch.Tensor]
    assert isinstance(layers[0].gate_up, Stacked) and stacked.shape == (128, 64) and stacked.numel() == 128 * 64
    found = runner.forward(StepPlan([Row(0, 0, tokens, len(tokens))]))
    assert np.abs(found - reference).max() < 2e-4 * np.abs(reference).max()


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_the_planned_bytes_are_those_that_are_taken(tmp_path, kind):
    checkpoint = open_checkpoint(write_model(tmp_path / "m.gguf", "llama", kind, tied=False))
    weights = load_weights(checkpoint, torch.bfloat16, CPU, checkpoint.stored)
    planned = weight_bytes(checkpoint, torch.bfloat16, checkpoint.stored)
    assert planned == weights.num_bytes == sum(each.nbytes for each in weights.tensors)
    assert planned < 0.75 * weight_bytes(checkpoint, torch.bfloat16)
    for layer in weights.layers:  # scales of 6 bits take a byte; rows are padded to whole chunks
        rows, columns = layer.down.shape
        quantum = {"Q4_K": planar.Q4_K, "Q8_0": planar.Q8_0}[kind].quantum
        padded = -(-columns // quantum) * quantum
        assert layer.down.nbytes == rows * padded * {"Q4_K": 4.625, "Q8_0": 8.5}[kind] / 8


def test_without_a_gpu_a_file_is_dequantised_unless_asked_otherwise(tmp_path):
    path = write_model(tmp_path / "m.gguf", "llama", "Q4_0")
    runner: Any = TorchModel(path, TorchOptions("cpu"), tokenizer=ByteTokenizer()).start(CAPACITY, 1).runner
    assert all(isinstance(tensor, torch.Tensor) for tensor in runner.model.weights.tensors)

"""Quantised checkpoints of all layouts, written here by numpy, against the same numbers in a dense checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
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

from outpace.backends.base import Capacity
from outpace.backends.torch.device import TorchOptions
from outpace.backends.torch.model.loader import load_weights, open_checkpoint, weight_bytes
from outpace.backends.torch.model.weights import allocate, named_tensors
from outpace.backends.torch.runner import TorchModel
from outpace.backends.torch.storage.planar import Planar
from outpace.backends.torch.storage.scaled import Scaled
from outpace.core import Row, StepPlan
from outpace.errors import ModelError
from outpace.models.hf_config import parse_config
from tests.tiny_folder import CONFIG, write_folder

CAPACITY = Capacity(max_sequences=2, cache_tokens=256, max_context=128, max_step_tokens=64)
SIZES = {"hidden_size": 128, "intermediate_size": 384, "tie_word_embeddings": False}
TOKENS = list(range(20, 50))
Tensors = dict[str, torch.Tensor]
rng = np.random.default_rng(2)


def words(codes: NDArray[Any], order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight codes of the last dimension in each word of 32 bits; nibble i holds code order[i]."""
    grouped = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32)
    made = sum(grouped[..., place] << np.uint32(4 * i) for i, place in enumerate(order))
    return torch.from_numpy(np.ascontiguousarray(made).view(np.int32))


def grouped(rows: int, columns: int, group: int, dtype: torch.dtype, *, zeros: bool) -> tuple[Any, ...]:
    """Codes, scales and zero points, and the weights that they stand for."""
    num = columns // group
    codes = rng.integers(0, 16, (rows, columns))
    z = rng.integers(1, 16, (rows, num)) if zeros else np.full((rows, num), 8)
    scales = torch.from_numpy(rng.uniform(0.01, 0.05, (rows, num)).astype(np.float32)).to(dtype)
    values = (codes - z.repeat(group, 1)) * scales.float().numpy().repeat(group, 1)
    return codes, scales, z, values


def packed(rows: int, columns: int, *, group: int | None, zeros: bool) -> tuple[Tensors, Any]:
    codes, scales, z, values = grouped(rows, columns, group or columns, torch.bfloat16, zeros=zeros)
    made = {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": torch.tensor([rows, columns])}
    if zeros:
        made["weight_zero_point"] = words(z.T).T.contiguous()
    return made, values


def gptq(rows: int, columns: int, *, group: int, offset: int) -> tuple[Tensors, Any]:
    codes, scales, z, values = grouped(rows, columns, group, torch.float16, zeros=True)
    made = {
        "qweight": words(codes).T.contiguous(), "qzeros": words(z.T - offset), "scales": scales.T.contiguous(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // group,
    }  # fmt: skip
    return made, values


def awq(rows: int, columns: int, *, group: int) -> tuple[Tensors, Any]:
    codes, scales, z, values = grouped(rows, columns, group, torch.float16, zeros=True)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": words(codes.T, order), "qzeros": words(z.T, order), "scales": scales.T.contiguous()}, values


def scaled(rows: int, columns: int, *, dtype: torch.dtype, num_scales: int | None) -> tuple[Tensors, Any]:
    values = torch.from_numpy(rng.normal(size=(rows, columns)).astype(np.float32) * 40).to(dtype)
    scales = torch.from_numpy(rng.uniform(0.002, 0.005, (num_scales or rows, 1)).astype(np.float32))
    made = {"weight": values, "weight_scale": scales if num_scales is None else scales[:, 0]}
    return made | {"input_scale": torch.ones(1)}, values.float().numpy() * scales.numpy()


def blocks(rows: int, columns: int, *, name: str) -> tuple[Tensors, Any]:
    values = torch.from_numpy(rng.normal(size=(rows, columns)).astype(np.float32) * 40).to(torch.float8_e4m3fn)
    scales = rng.uniform(0.002, 0.005, (-(-rows // 128), -(-columns // 128))).astype(np.float32)
    wide = scales.repeat(128, 0).repeat(128, 1)[:rows, :columns]
    return {"weight": values, name: torch.from_numpy(scales)}, values.float().numpy() * wide


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": {"weights": weights}}}


INT4 = {"num_bits": 4, "type": "int"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
E4M3 = torch.float8_e4m3fn
Make = Callable[[int, int], tuple[Tensors, Any]]
CASES: dict[str, tuple[dict[str, Any], Make]] = {
    "packed": (compressed("pack-quantized", **INT4, strategy="group", group_size=32, symmetric=True),
               lambda r, c: packed(r, c, group=32, zeros=False)),
    "packed with zero points": (compressed("pack-quantized", **INT4, strategy="group", group_size=128, symmetric=False),
                                lambda r, c: packed(r, c, group=128, zeros=True)),
    "packed by row": (compressed("pack-quantized", **INT4, strategy="channel", symmetric=True),
                      lambda r, c: packed(r, c, group=None, zeros=False)),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 64}, lambda r, c: gptq(r, c, group=64, offset=1)),
    "gptq v2": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq_v2"},
                lambda r, c: gptq(r, c, group=128, offset=0)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
            lambda r, c: awq(r, c, group=128)),
    "fp8 by row": (compressed("float-quantized", **FP8, strategy="channel"),
                   lambda r, c: scaled(r, c, dtype=E4M3, num_scales=None)),
    "fp8 by tensor": ({"quant_method": "fp8"}, lambda r, c: scaled(r, c, dtype=E4M3, num_scales=1)),
    "fp8 in blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]},
                      lambda r, c: blocks(r, c, name="weight_scale_inv")),
    "fp8 in blocks, compressed": (compressed("float-quantized", **FP8, strategy="block", block_structure=[128, 128]),
                                  lambda r, c: blocks(r, c, name="weight_scale")),
    "int8": (compressed("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"),
             lambda r, c: scaled(r, c, dtype=torch.int8, num_scales=None)),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tokenizer"))


def write(folder: Path, tokenizer: Path, tensors: Tensors, quantization: dict[str, Any] | None) -> Path:
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    more = {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps(CONFIG | SIZES | more))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def write_both(folder: Path, tokenizer: Path, case: str) -> tuple[Path, Path]:
    """A quantised checkpoint, and a dense one of the same numbers. The last down projection is dense in both."""
    quantization, make = CASES[case]
    config = parse_config(CONFIG | SIZES)
    torch.manual_seed(1)
    weights = allocate(config, tied=False, dtype=torch.float32, device=torch.device("cpu"))
    for tensor in weights.tensors:
        assert isinstance(tensor, torch.Tensor)
        tensor.normal_(1.0 if tensor.dim() == 1 else 0.0, 0.1)
    plain: Tensors = {}
    for name, tensor in named_tensors(weights, config).items():
        assert isinstance(tensor, torch.Tensor)
        plain[name] = tensor.clone()
    quantised = dict(plain)
    for name in [name for name in plain if name.endswith("_proj.weight") and "1.mlp.down" not in name]:
        parts, values = make(*plain[name].shape)
        plain[name] = torch.from_numpy(np.asarray(values, np.float32))
        del quantised[name]
        quantised |= {name.removesuffix("weight") + ending: part for ending, part in parts.items()}
    return write(folder / "stored", tokenizer, quantised, quantization), write(folder / "dense", tokenizer, plain, None)


def logits(folder: Path, quantization: Any) -> tuple[Any, NDArray[np.float32]]:
    runner: Any = TorchModel(folder, TorchOptions("cpu", quantization=quantization)).start(CAPACITY, 1).runner
    return runner.model.weights, runner.forward(StepPlan([Row(0, 0, TOKENS, len(TOKENS))])).copy()


@pytest.mark.parametrize("case", list(CASES))
def test_a_checkpoint_is_kept_as_it_is_stored_and_gives_the_logits_of_its_numbers(tmp_path, tokenizer, case):
    stored, plain = write_both(tmp_path, tokenizer, case)
    _, expected = logits(plain, "auto")
    weights, found = logits(stored, "stored")
    kept = [weights.layers[0].qkv, weights.layers[0].gate_up, weights.layers[0].down, weights.layers[1].out]
    assert all(isinstance(each, Planar | Scaled) for each in kept)
    assert isinstance(weights.layers[1].down, torch.Tensor) and isinstance(weights.head, torch.Tensor)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    dense, dequantised = logits(stored, "auto")  # on a CPU
    assert isinstance(dense.layers[0].qkv, torch.Tensor)
    assert np.abs(dequantised - expected).max() < 1e-4 * np.abs(expected).max()
    checkpoint = open_checkpoint(stored)
    taken = load_weights(checkpoint, torch.bfloat16, torch.device("cpu"), checkpoint.stored).num_bytes
    assert weight_bytes(checkpoint, torch.bfloat16, checkpoint.stored) == taken
    assert taken < 0.85 * weight_bytes(checkpoint, torch.bfloat16)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "gptq", "bits": 3, "group_size": 128},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
        {"quant_method": "awq", "bits": 4, "group_size": 16},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"},
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        compressed("pack-quantized", **INT4, strategy="group", group_size=128, actorder="group"),
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=16),
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"bits": 4},
    ],
    ids=str,
)
def test_a_layout_that_is_not_read_gets_one_sentence_with_those_that_are(tmp_path, tokenizer, quantization):
    folder = write(tmp_path / "m", tokenizer, {"a": torch.zeros(1)}, quantization)
    with pytest.raises(ModelError, match=r"sets quantization_config to .* not read; read are compressed-tensors .*AWQ"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("case", "ending", "change", "words_"),
    [
        ("packed", "weight_scale", lambda t: t[:, :1], "do not belong together"),
        ("packed", "weight_packed", lambda t: t[:, :2], "asks for"),
        ("packed", "weight_packed", lambda t: t.to(torch.int64), "not words of 32 bits"),
        ("gptq", "qzeros", None, "do not belong together"),
        ("awq", "scales", None, "lacks model.layers.0.mlp.up_proj.scales"),
        ("fp8 in blocks", "weight_scale_inv", lambda t: t.repeat(2, 1), "do not belong together"),
        ("fp8 by row", "weight", lambda t: t.float().to(torch.float8_e5m2), "as F8_E5M2, which is not read"),
    ],
)
def test_a_damaged_checkpoint_gets_one_sentence(tmp_path, tokenizer, case, ending, change, words_):
    folder, _ = write_both(tmp_path, tokenizer, case)
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.0.mlp.up_proj.{ending}"
    given = tensors.pop(name)
    if change is not None:
        tensors[name] = change(given).contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=words_):
        logits(folder, "stored")

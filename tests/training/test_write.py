"""A head on disk: shards, the `speculators` folder, the native file, and rounding as GGUF rounds."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[distill]")
pytest.importorskip("gguf", reason="gguf is not installed; pip install outpace[distill]")

import gguf
import torch
from safetensors.torch import load_file

from outpace.backends.torch.model.head_loader import open_head
from outpace.backends.torch.model.loader import open_checkpoint
from outpace.errors import ModelError, UsageError
from outpace.models.gguf_header import read_header
from outpace.models.head_file import as_json, read_head_config, write_config
from outpace.training.quantise import q4_0, straight_through
from outpace.training.shards import load_sharded, save_sharded
from outpace.training.train import Progress
from outpace.training.write import Checkpoint, load_checkpoint, pack, save_checkpoint
from tests.tiny_gguf import VOCAB_SIZE
from tests.tiny_training import tiny_head, tiny_target


@pytest.fixture
def checkpoint(tmp_path) -> Checkpoint:
    head, kept = tiny_head(tiny_target(tmp_path))
    return Checkpoint(head.config, head.parameters, kept, Progress(seconds=3.5, steps=7, tokens=99, quick=1.25))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 40.0])
def test_rounding_is_that_of_the_gguf_package(scale):
    torch.manual_seed(0)
    weights = torch.randn(64, 96) * scale
    weights[3, :32] = 0.0
    weights[4, 5] = 9 * scale  # a block whose largest element is positive
    kind = gguf.GGMLQuantizationType.Q4_0
    expected = gguf.quants.dequantize(gguf.quants.quantize(weights.numpy(), kind), kind)
    np.testing.assert_array_equal(q4_0(weights).numpy(), expected)


def test_rounding_lets_gradients_pass_and_leaves_odd_rows_alone():
    weights = torch.randn(4, 64, requires_grad=True)
    rounded = straight_through(weights)
    torch.testing.assert_close(rounded, q4_0(weights))
    assert torch.equal(torch.autograd.grad((rounded * 3).sum(), weights)[0], torch.full((4, 64), 3.0))
    odd = torch.randn(4, 33)
    assert torch.equal(q4_0(odd), odd)


def test_a_large_tensor_is_cut_into_files_of_limited_size_and_joined(tmp_path):
    tensors = {"large": torch.randn(1000, 64), "small": torch.arange(5), "other": torch.randn(300, 64)}
    files = save_sharded(tensors, tmp_path, "part", metadata={"a": "b"}, max_bytes=100_000)
    assert len(files) > 2 and all(path.stat().st_size < 110_000 for path in files)
    found, metadata = load_sharded(tmp_path, "part")
    assert metadata == {"a": "b"} and found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert save_sharded({"small": torch.arange(5)}, tmp_path, "part") == [tmp_path / "part.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["part.safetensors"]


def test_a_missing_shard_is_noticed(tmp_path):
    files = save_sharded({"x": torch.randn(1000, 64)}, tmp_path, "part", max_bytes=100_000)
    files[1].unlink()
    with pytest.raises(ModelError, match=r"lacks some of the files part-\*; copy all of them"):
        load_sharded(tmp_path, "part")


def test_a_checkpoint_comes_back(checkpoint, tmp_path):
    save_checkpoint(checkpoint, tmp_path / "head")
    found = load_checkpoint(tmp_path / "head")
    assert found.config == checkpoint.config and found.progress == checkpoint.progress
    assert torch.equal(found.kept, checkpoint.kept)
    for name, parameter in checkpoint.parameters.items():
        torch.testing.assert_close(found.parameters[name], parameter, rtol=1e-2, atol=1e-3)
    with pytest.raises(UsageError, match="holds no checkpoint"):
        load_checkpoint(tmp_path)


def test_packing_writes_a_speculators_folder(checkpoint, tmp_path):
    save_checkpoint(checkpoint, tmp_path)
    pack(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept, width = checkpoint.kept, checkpoint.config.width
    assert torch.equal(tensors["d2t"] + torch.arange(len(kept)), kept)
    assert tensors["t2d"].shape == (VOCAB_SIZE,) and torch.equal(tensors["t2d"].nonzero().squeeze(1), kept)
    assert tensors["lm_head.weight"].shape == (len(kept), width)
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (checkpoint.config.q_size, 2 * width)
    assert {name.split(".")[0] for name in tensors} == {"fc", "fc_norm", "layers", "norm", "lm_head", "d2t", "t2d"}
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["norm_before_residual"] is False
    assert values["speculators_config"]["verifier"]["name_or_path"] == "tiny"
    assert values["eagle_aux_hidden_state_layer_ids"] == list(checkpoint.config.taps)


def test_the_torch_backend_reads_a_packed_folder(checkpoint, tmp_path):
    """Both forms of it describe the same head; the folder's other safetensors are not weights of the head."""
    save_checkpoint(checkpoint, tmp_path)
    path = tmp_path / "tiny.gguf"
    target = open_checkpoint(path).config
    with pytest.raises(ModelError, match="is a checkpoint of training; write its weights first: outpace distill pack"):
        open_head(tmp_path, path, target, "tiny")
    pack(tmp_path, "Q8_0")
    forms = [open_head(each, path, target, "tiny") for each in (tmp_path, tmp_path / "head.gguf")]
    config = checkpoint.config
    for form in forms:
        found = form.config
        assert (found.taps, found.hidden, found.rope, found.tap_norm) == (config.taps, config.hidden, None, "each")
        assert found.cache_elements_per_token == config.cache_elements_per_token
    one, other = (form.load(torch.float32, torch.device("cpu")) for form in forms)
    assert torch.equal(one.ids, checkpoint.kept) and torch.equal(other.ids, checkpoint.kept)
    torch.testing.assert_close(one.layer.qkv, other.layer.qkv, rtol=0, atol=0.01)
    torch.testing.assert_close(one.token_norm, other.token_norm)
    assert one.tap_norm is not None and other.tap_norm is not None
    torch.testing.assert_close(one.tap_norm, other.tap_norm)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_the_native_file_holds_every_tensor_under_its_name(checkpoint, kind, tmp_path):
    save_checkpoint(checkpoint, tmp_path)
    pack(tmp_path, kind)
    header = read_header(tmp_path / "head.gguf")
    assert header.architecture == "outpace-head"
    values = {key.removeprefix("outpace-head."): value for key, value in header.metadata.items()}
    assert values["format"] == 1 and values["taps"] == "1,3" and values["width"] == checkpoint.config.width
    assert values["target"] == checkpoint.config.target["fingerprint"]
    reader = gguf.GGUFReader(tmp_path / "head.gguf")
    tensors = {t.name: t for t in reader.tensors}
    assert tensors["target_ids"].data.tolist() == checkpoint.kept.tolist()
    stored = load_checkpoint(tmp_path).parameters
    for name, ours in (
        ("blk.0.attn_q.weight", "layers.0.self_attn.q_proj.weight"),
        ("output.weight", "lm_head.weight"),
    ):
        found = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        step = stored[ours].abs().max() / (8 if kind == "Q4_0" else 127)
        assert np.abs(found - stored[ours].numpy()).max() <= step * 1.01
    np.testing.assert_array_equal(tensors["blk.0.attn_norm.weight"].data, stored["layers.0.hidden_norm.weight"].numpy())
    np.testing.assert_array_equal(
        tensors["tap_norm.weight"].data, torch.cat([stored[f"fc_norm.{i}.weight"] for i in range(2)]).numpy()
    )


def test_a_config_of_a_newer_format_or_of_something_else_is_refused(checkpoint, tmp_path):
    write_config(checkpoint.config, tmp_path)
    values = as_json(checkpoint.config)
    values["outpace"]["format"] = 99
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match="format 99, newer than this version's 1; update Outpace"):
        read_head_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="is not the config of a head"):
        read_head_config(tmp_path)

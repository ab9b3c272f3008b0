"""Families other than Llama's: drafts and batches change nothing, files in every spelling, quantised forms, refusals.

`test_runner.py` compares the logits of every family with those of transformers.
"""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")
pytest.importorskip("safetensors", reason="safetensors is not installed; pip install outpace[torch]")
pytest.importorskip("tokenizers", reason="tokenizers is not installed; pip install outpace[torch]")

import torch

from outpace.backends.base import Capacity
from outpace.backends.torch.device import TorchOptions
from outpace.backends.torch.kernels.reference import ReferenceOps
from outpace.backends.torch.model.loader import open_checkpoint
from outpace.backends.torch.model.model import Model
from outpace.backends.torch.parallel.ops import ShardedOps
from outpace.backends.torch.parallel.shard import Shard, load_shard
from outpace.backends.torch.runner import TorchModel, TorchRunner
from outpace.backends.torch.storage.rounding import KINDS, head_format, quantise
from outpace.backends.torch.storage.scaled import round_to_scaled
from outpace.config import Quantization
from outpace.errors import BackendError, ModelError
from outpace.models.hf_config import parse_config
from tests.backends.torch.test_runner import (
    CAPACITY,
    FEATURES,
    GEMMA3,
    LONGROPE,
    SMALL,
    VARIANTS,
    Reference,
    change_config,
    change_weights,
    check,
    generate,
    random_tokens,
    refusal,
    step,
)
from tests.fakes import ByteTokenizer
from tests.numpy_reference import Floats

FAMILIES = ("gemma2", "gemma3", "phi4 mini", "qwen3 moe", "mixtral")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {name: Reference(tmp_path_factory.mktemp("model"), name).folder for name in FAMILIES}


@pytest.fixture
def copied(tmp_path: Path, folders: dict[str, Path]) -> Any:
    """Copies of models that a test may change."""

    def copy(name: str, into: str = "copy") -> Path:
        folder = tmp_path / into
        folder.mkdir()
        for file in folders[name].iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return folder

    return copy


def logits(
    folder: Path, tokens: list[int], quantization: Quantization = "auto", capacity: Capacity = CAPACITY
) -> Floats:
    model = TorchModel(folder, TorchOptions("cpu", quantization=quantization), tokenizer=ByteTokenizer())
    runner = model.start(capacity, 1).runner
    assert isinstance(runner, TorchRunner)
    found = step(runner, 0, 0, tokens)
    runner.close()
    return found


# Drafts change nothing: greedy and seeded, several requests in a step, texts longer than the windows.


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_nothing(family, folders, copied):
    draft = copied(family)
    torch.manual_seed(1)

    def disturb(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor * (1 + 0.02 * torch.randn_like(tensor))

    change_weights(draft, disturb)
    wanted = [FEATURES[0], FEATURES[2], FEATURES[3]]
    plain = generate(folders[family], None, wanted=wanted, speculation="off")
    assert generate(folders[family], draft, wanted=wanted, speculation="on", method="draft", depth=3) == plain
    assert generate(folders[family], None, wanted=wanted[:1], speculation="off") == plain[:1], "a request alone"


# Files.


def test_a_longer_context_than_the_original_has_the_long_factors(tmp_path, monkeypatch):
    changes = {
        "pad_token_id": 0, "original_max_position_embeddings": 64,
        "rope_parameters": LONGROPE | {"original_max_position_embeddings": 64},
    }  # fmt: skip
    monkeypatch.setitem(VARIANTS, "phi long", ("Phi3", changes))
    reference, tokens = Reference(tmp_path, "phi long"), random_tokens(100)
    expected = reference.logits(tokens)
    check(logits(tmp_path, tokens), expected)
    short = Capacity(8, 1024, max_context=64, max_step_tokens=64)
    check(logits(tmp_path, tokens[:60], capacity=short), reference.logits(tokens[:60]))
    assert np.abs(logits(tmp_path, tokens[:60]) - expected[:60]).max() < 1e-3, "all texts have the same factors"


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_gemma_3_that_also_sees(prefix, folders, copied):
    folder, tokens = copied("gemma3"), random_tokens(60)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("model.", prefix, 1)] = tensors.pop(name)
        tensors[prefix.replace("language_model", "vision_tower").replace(".model.", ".") + "patch"] = torch.zeros(3)

    change_weights(folder, rename)
    text = json.loads((folder / "config.json").read_text())
    del text["architectures"]
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(outer))
    np.testing.assert_array_equal(logits(folder, tokens), logits(folders["gemma3"], tokens))
    (folder / "config.json").write_text(json.dumps(outer | {"text_config": 3}))
    assert "has no usable text_config (3)" in refusal(folder)


def test_old_and_sparse_configs_of_gemma_3():
    """As published: heads and windows are left out, and the RoPE of windows is a number."""
    sparse = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 7, "sliding_window": 1024}
    old = sparse | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_local_base_freq": 500.0}
    found = parse_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": old})
    newer = parse_config({"architectures": ["Gemma3ForCausalLM"], **sparse, "rope_parameters": GEMMA3})
    for mine, other in ((found.rope, newer.rope), (found.local_rope, newer.local_rope)):
        assert mine is not None and other is not None
        np.testing.assert_allclose(mine.frequencies, other.frequencies)
    assert (found.num_heads, found.head_dim, found.vocab_size, found.context) == (8, 256, 262208, 131072)
    assert found.windows == newer.windows == (1024,) * 5 + (None, 1024)
    assert found.activation == "gelu_tanh" and found.attention_scale == 1 / 16


def test_which_layers_have_a_window():
    values = SMALL | {"sliding_window": 100}
    assert parse_config(values | {"architectures": ["MistralForCausalLM"]}).windows == (100, 100, 100)
    gemma2 = parse_config(values | {"architectures": ["Gemma2ForCausalLM"]})
    assert gemma2.windows == (100, None, 100)
    assert (gemma2.context, gemma2.unwindowed_context) == (256, 100)
    qwen = values | {"architectures": ["Qwen2ForCausalLM"], "max_window_layers": 2}
    assert parse_config(qwen | {"use_sliding_window": True}).windows == (None, None, 100)
    assert parse_config(qwen | {"use_sliding_window": False}).windows == ()
    assert parse_config(values | {"architectures": ["MistralForCausalLM"], "sliding_window": 256}).windows == ()


# Quantised forms.


def round_matrices(tensors: dict[str, torch.Tensor], kind: str) -> None:
    """What `kind` leaves of the weights, as a dense checkpoint with its own head."""
    for name, tensor in list(tensors.items()):
        if re.search(r"(_proj|\.w[123])\.weight$", name):
            tensors[name] = quantise(tensor, KINDS[kind]).dequantise(torch.float32)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    tensors["lm_head.weight"] = quantise(head, head_format(kind)).dequantise(torch.float32)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_rounded_when_they_are_loaded(family, kind, folders, copied):
    tokens, folder = random_tokens(40), folders[family]
    if kind == "int4" and family in ("qwen3 moe", "mixtral"):
        with pytest.raises(BackendError, match=r"'int4' does not cover a model with . experts.*use quantization 'fp8'"):
            logits(folder, tokens, kind)
        return
    dense = copied(family)
    change_weights(dense, lambda tensors: round_matrices(tensors, kind))
    change_config(dense, tie_word_embeddings=False)
    check(logits(folder, tokens, kind), logits(dense, tokens))


def test_stored_int8_matrices_that_are_fused_and_reordered(copied):
    """Phi's queries, keys and values are one matrix, whose rows RoPE needs in another order."""
    folder, other, tokens = copied("phi4 mini"), copied("phi4 mini", "dense"), random_tokens(40)

    def rounded(tensors: dict[str, torch.Tensor], *, is_dense: bool) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            stored = round_to_scaled(tensors.pop(name), torch.int8)
            if is_dense:
                tensors[name] = stored.dequantise(torch.float32)
            else:
                tensors[name], tensors[f"{name}_scale"] = stored.values, stored.scales[:, None]

    change_weights(folder, lambda tensors: rounded(tensors, is_dense=False))
    change_weights(other, lambda tensors: rounded(tensors, is_dense=True))
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    groups = {"config_groups": {"group_0": {"weights": weights}}, "format": "int-quantized"}
    change_config(folder, quantization_config={"quant_method": "compressed-tensors"} | groups)
    expected = logits(other, tokens)
    check(logits(folder, tokens, "stored"), expected)
    check(logits(folder, tokens, "none"), expected)


# One clear message per defect.


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gemma3", {"layer_types": ["full_attention", "chunked_attention"]}, "sets layer_types to ['full_attention', "),
        ("gemma3", {"hidden_activation": "gelu"}, "sets hidden_activation to 'gelu', which the torch backend does not"),
        ("gemma3", {"use_bidirectional_attention": True}, "sets use_bidirectional_attention to True"),
        ("gemma2", {"attn_logit_softcapping": "x"}, "has no usable attn_logit_softcapping ('x')"),
        ("gemma2", {"num_hidden_layers": 4, "layer_types": None}, "lacks model.layers.3.input_layernorm.weight"),
        ("phi4 mini", {"intermediate_size": 97}, "gate_up_proj.weight of shape [192, 64] and its config.json asks for"),
        ("phi4 mini", {"rope_parameters": LONGROPE | {"long_factor": [1.0]}}, "has 6 short and 1 long factors for 6"),
        ("phi4 mini", {"rope_parameters": {"partial_rotary_factor": 0.7}}, "RoPE rotates 11 of the 16 elements"),
        ("qwen3 moe", {"num_local_experts": 2}, "chooses 3 of 2 experts for a token; it is damaged"),
        ("qwen3 moe", {"num_local_experts": None}, "has no usable num_experts (None)"),
        ("qwen3 moe", {"mlp_only_layers": [1]}, "sets mlp_only_layers to [1], which the torch backend does not"),
        ("mixtral", {"num_local_experts": 5}, "holds model.layers.0.block_sparse_moe.gate.weight of shape [4, 64]"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_config_that_cannot_be_run_or_contradicts_the_weights(copied, family, changes, words):
    folder = copied(family)
    change_config(folder, **changes)
    assert words in refusal(folder)


def test_a_missing_tensor_has_the_name_of_its_file(copied):
    for family, name in (
        ("gemma3", "pre_feedforward_layernorm"),
        ("phi4 mini", "self_attn.qkv_proj"),
        ("mixtral", "block_sparse_moe.experts.2.w3"),
        ("qwen3 moe", "mlp.experts.5.down_proj"),
    ):
        folder = copied(family, family)
        change_weights(folder, lambda tensors, name=name: tensors.pop(f"model.layers.1.{name}.weight"))
        assert f"lacks model.layers.1.{name}.weight" in refusal(folder)


def test_no_head_is_trained_for_layers_that_training_does_not_know(folders):
    from outpace.training.target import Target

    with pytest.raises(ModelError, match=r"no head can be trained for .*: its family is gemma3, and training knows"):
        Target.load(folders["gemma3"], torch.device("cpu"), torch.float32)


# Two ranks, as threads.


class Threads:
    """What a rank needs of `Group`, between two threads."""

    def __init__(self, rank: int, barrier: threading.Barrier, given: dict[int, torch.Tensor]) -> None:
        self._rank, self._barrier, self._given = rank, barrier, given

    def _exchanged(self, mine: torch.Tensor) -> list[torch.Tensor]:
        self._given[self._rank] = mine.clone()
        self._barrier.wait(30)
        found = [self._given[0], self._given[1]]
        self._barrier.wait(30)
        return found

    def sum(self, mine: torch.Tensor) -> torch.Tensor:
        first, second = self._exchanged(mine)
        return first + second

    def to_first(self, mine: torch.Tensor) -> list[torch.Tensor]:
        return self._exchanged(mine) if self._rank == 0 else self._exchanged(mine)[:0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_on_two_ranks(family, folders):
    checkpoint, tokens = open_checkpoint(folders[family]), random_tokens(60)
    barrier, given = threading.Barrier(2), dict[int, torch.Tensor]()

    def run(rank: int) -> Floats:
        shard, group = Shard(rank, 2), cast(Any, Threads(rank, barrier, given))
        weights = load_shard(checkpoint, shard, torch.float32, torch.device("cpu"))
        ops = ShardedOps(ReferenceOps(), group, checkpoint.config.vocab_size)
        runner = TorchRunner(Model(shard.of(checkpoint.config), weights, ops, CAPACITY.max_context), CAPACITY)
        return np.concatenate([step(runner, 0, 0, tokens[:50]), step(runner, 0, 50, tokens[50:])])

    with ThreadPoolExecutor(2) as pool:
        check(next(pool.map(run, range(2))), logits(folders[family], tokens))

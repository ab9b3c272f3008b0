"""The readers of draft heads that people bring: options, traps, what is refused, and which folders are heads."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace.errors import ModelError
from outpace.models.architecture import Architecture
from outpace.models.head_file import HeadConfig
from outpace.models.head_formats import canonical, find_head, read_head
from outpace.models.head_formats.fit import check_fits
from outpace.models.rope import Rope, unscaled
from tests.fuzz.folders import VALUES
from tests.head_folders import Options, head_config

SPECULATORS = Options(form="speculators", taps=(3, 1, 8))


def folder_of(path: Path, values: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(values))
    return path


def read(path: Path, options: Options, *tensors: str, num_layers: int = 32) -> HeadConfig:
    return read_head(folder_of(path / "head", head_config(options)), tensors, num_layers)


def test_sizes_and_rope_are_the_heads_own(tmp_path: Path) -> None:
    options = Options(width=48, num_heads=6, num_kv_heads=3, head_dim=8, epsilon=3e-5, theta=700.0)
    found = read(tmp_path, options, "embed_tokens.weight")
    assert (found.width, found.tap_width, found.hidden) == (48, 64, 48)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (6, 3, 8)
    assert found.epsilon == 3e-5 and found.has_embedding and not found.qkv_bias
    assert (found.vocab_size, found.draft_vocab_size) == (280, 150)
    assert found.rope is not None
    np.testing.assert_allclose(found.rope.frequencies, unscaled(700.0, 8))


def test_a_config_without_the_optional_keys_takes_their_usual_values(tmp_path: Path) -> None:
    options = Options(
        config={"draft_vocab_size": 280, "target_hidden_size": None, "rope_theta": None, "num_key_value_heads": None},
        layer_config={"head_dim": None, "attention_bias": None},
    )
    found = read(tmp_path, options)
    assert (found.tap_width, found.num_kv_heads, found.head_dim) == (64, 4, 16)
    assert found.rope is not None
    np.testing.assert_allclose(found.rope.frequencies, unscaled(10000.0, 16))


@pytest.mark.parametrize(("num_layers", "taps"), [(32, (2, 16, 29)), (28, (2, 14, 25)), (7, (2, 3, 4))])
def test_taps_of_a_head_that_names_none_are_those_of_eagle_3(
    tmp_path: Path, num_layers: int, taps: tuple[int, ...]
) -> None:
    assert read(tmp_path, Options(), num_layers=num_layers).taps == taps
    unnamed = replace(SPECULATORS, config={"eagle_aux_hidden_state_layer_ids": None})
    assert read(tmp_path, unnamed, num_layers=num_layers).taps == taps


def test_taps_keep_their_order_and_their_numbering(tmp_path: Path) -> None:
    assert read(tmp_path, SPECULATORS).taps == (3, 1, 8)
    assert read(tmp_path, Options(config={"eagle_aux_hidden_state_layer_ids": [3, 1]})).taps == (3, 1)
    indices = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 13, 28]}}  # SGLang's are one lower
    assert read(tmp_path, Options(config=indices)).taps == (2, 14, 29)


@pytest.mark.parametrize(
    ("written", "version", "expected"),
    [
        (True, "0.9.0", True), (False, "0.9.0", False), (True, None, True), (False, None, False),
        (None, "0.9.0", False),  # speculators wrote the file, and its default is false
        (None, None, True),  # somebody wrote it for vLLM, whose default is true
    ],
)  # fmt: skip
def test_a_missing_norm_before_residual_means_what_the_files_origin_means(
    tmp_path: Path, written: bool | None, version: str | None, expected: bool
) -> None:
    config = {"norm_before_residual": written, "speculators_version": version}
    assert read(tmp_path, replace(SPECULATORS, config=config)).norm_before_residual is expected


def test_a_missing_norm_before_residual_is_false_in_safeailabs_form(tmp_path: Path) -> None:
    assert read(tmp_path, Options()).norm_before_residual is False
    assert read(tmp_path, Options(config={"norm_before_residual": True})).norm_before_residual is True


@pytest.mark.parametrize("norm", ["none", "each", "joint"])
def test_norms_of_taps(tmp_path: Path, norm: Any) -> None:
    assert read(tmp_path, replace(SPECULATORS, tap_norm=norm)).tap_norm == norm


def test_other_options(tmp_path: Path) -> None:
    found = read(tmp_path, replace(SPECULATORS, norm_output=True, qk_norm=True, bias=True))
    assert found.norm_output and found.has_qk_norm and found.qkv_bias and found.out_bias and found.mlp_bias
    assert read(tmp_path, Options(), "layers.0.self_attn.q_norm.weight").has_qk_norm
    assert read(tmp_path, Options(config={"eagle_config": {"norm_before_fc": True}})).tap_norm == "joint"


def test_a_head_of_our_own_rotates_as_its_target(tmp_path: Path) -> None:
    own = {"outpace": {"format": 1, "kind": "eagle3", "markov_rank": 0, "target": {"fingerprint": "00ff"}}}
    found = read(tmp_path, replace(SPECULATORS, config=own))
    assert found.rope is None and found.target["fingerprint"] == "00ff"


def test_names_of_tensors() -> None:
    assert canonical("midlayer.mlp.up_proj.weight") == "layers.0.mlp.up_proj.weight"
    assert canonical("layers.0.mlp.up_proj.weight") == "layers.0.mlp.up_proj.weight"
    assert canonical("fc.weight") == "fc.weight"


REFUSED: dict[str, tuple[Options, str]] = {
    "two layers": (Options(layer_config={"num_hidden_layers": 2}), "has 2 layers, but draft heads are read with one"),
    "a window": (
        replace(SPECULATORS, layer_config={"layer_types": ["sliding_attention"]}), "asks for sliding-window attention"
    ),
    "another layer": (replace(SPECULATORS, layer_config={"model_type": "gemma3"}), "has a layer of type 'gemma3'"),
    "two norms": (
        replace(SPECULATORS, config={"norm_before_fc": True, "fc_norm": True}), "norm_before_fc and fc_norm, which"
    ),
    "quantised": (Options(config={"quantization_config": {"bits": 4}}), "sets quantization_config"),
    "activation": (replace(SPECULATORS, layer_config={"hidden_act": "gelu"}), "sets hidden_act to 'gelu'"),
    "no size": (Options(config={"hidden_size": "x"}), r"has no usable hidden_size \('x'\)"),
    "taps": (replace(SPECULATORS, config={"eagle_aux_hidden_state_layer_ids": "x"}), r"has no usable eagle_.*\('x'\)"),
    "heads": (Options(num_heads=4, num_kv_heads=3), "4 heads over 3"),
    "too many tokens": (Options(draft_vocab_size=281), "281 of 280 tokens"),
    "rope": (Options(config={"rope_scaling": {"type": "dynamic", "factor": 2.0}}), "RoPE scaling is 'dynamic'"),
    "one state": (Options(config={"eagle_config": {"use_aux_hidden_state": False}}), "but EAGLE-3 reads several"),
    "newer": (replace(SPECULATORS, config={"outpace": {"format": 2}}), "has format 2, newer than this version's 1"),
    "dflash": (
        replace(SPECULATORS, config={"speculators_model_type": "dflash"}),
        "is of kind dflash, which is not read; what is read are EAGLE-3 heads in SafeAILab's or speculators' format",
    ),
    "our one-pass": (replace(SPECULATORS, config={"speculators_model_type": "onepass"}), "is of kind onepass, which"),
    "z-lab's dflash": (
        Options(config={"draft_vocab_size": None, "dflash_config": {}, "architectures": ["DFlashDraftModel"]}),
        "is of kind DFlashDraftModel, which is not read",
    ),
    "dspark": (Options(config={"markov_rank": 64, "architectures": ["DSpark"]}), "is of kind DSpark, which"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_refused_in_one_sentence_with_the_folder(tmp_path: Path, case: str) -> None:
    options, sentence = REFUSED[case]
    with pytest.raises(ModelError, match=sentence) as error:
        read(tmp_path, options)
    assert str(tmp_path / "head") in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("options", [Options(), SPECULATORS], ids=["safeailab", "speculators"])
def test_no_value_of_any_key_is_worse_than_refused(tmp_path: Path, options: Options) -> None:
    values = head_config(options) | {"eagle_config": {}, "outpace": {"format": 1}, "rope_parameters": None}
    layer = values.get("transformer_layer_config", {}) | {"layer_types": None}
    num_refused = 0
    for bad in VALUES:
        changed = [values | {key: bad} for key in values]
        if options.form == "speculators":
            changed += [values | {"transformer_layer_config": layer | {key: bad}} for key in layer]
        for each in changed:
            try:
                read_head(folder_of(tmp_path / "head", each), (), 32)
            except ModelError as error:
                num_refused += 1
                assert str(tmp_path / "head") in str(error) and "\n" not in str(error)
    assert num_refused > 300


def test_folders_are_told_apart(tmp_path: Path) -> None:
    model = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1}
    assert find_head(folder_of(tmp_path / "model", model)) is None
    for name, values in {
        "eagle": head_config(Options()),
        "speculators": head_config(SPECULATORS),
        "dflash": model | {"dflash_config": {}},
    }.items():
        assert find_head(folder_of(tmp_path / name, values)) == tmp_path / name
    (tmp_path / "speculators" / "head.gguf").touch()
    assert find_head(tmp_path / "speculators") == tmp_path / "speculators" / "head.gguf"
    (tmp_path / "eagle" / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        find_head(tmp_path / "eagle")


TARGET = Architecture(
    family="llama", num_layers=8, width=64, hidden=96, num_heads=4, num_kv_heads=2, head_dim=16, num_rotated=16,
    vocab_size=280, context=512, epsilon=1e-5, rope=Rope(unscaled(10000.0, 16)), tied=True,
)  # fmt: skip
MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"width": 128}, "reads hidden states of width 64 and the model's have 128"),
    "vocabulary": ({"vocab_size": 281}, "knows 280 tokens and the model has 281"),
    "layers": ({"num_layers": 7}, r"reads the model after layers \[3, 1, 8\] and the model has 7"),
    "family": ({"family": "qwen3"}, "is for a LlamaForCausalLM and the model's family is qwen3"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_head_for_another_target_is_refused_with_both_names(tmp_path: Path, case: str) -> None:
    change, cause = MISFITS[case]
    head = read(tmp_path, SPECULATORS)
    check_fits(tmp_path, head, TARGET, "my target", tmp_path)
    with pytest.raises(ModelError, match=f"made for someone/target and does not fit the model my target: it {cause}"):
        check_fits(tmp_path, head, replace(TARGET, **change), "my target", tmp_path)


def test_a_target_of_few_layers_has_not_the_taps_of_eagle_3(tmp_path: Path) -> None:
    head = read(tmp_path, Options(), num_layers=4)
    with pytest.raises(ModelError, match=r"after layers \[2, 2, 1\] and the model has 4"):
        check_fits(tmp_path, head, replace(TARGET, num_layers=4), "small", tmp_path)


def test_a_narrow_head_needs_an_embedding_of_its_own(tmp_path: Path) -> None:
    narrow = replace(SPECULATORS, width=32, head_dim=8)
    check_fits(tmp_path, read(tmp_path, narrow, "embed_tokens.weight"), TARGET, "target", tmp_path)
    with pytest.raises(ModelError, match="has no embedding of its own, and its width is 32 where the model's is 64"):
        check_fits(tmp_path, read(tmp_path, narrow), TARGET, "target", tmp_path)


@pytest.mark.parametrize(("verifier", "family"), [("MistralForCausalLM", "mistral"), ("MistralForCausalLM", "llama")])
def test_mistrals_gguf_files_say_llama(tmp_path: Path, verifier: str, family: str) -> None:
    config = {"speculators_config": {"verifier": {"name_or_path": "a/target", "architectures": [verifier]}}}
    head = read(tmp_path, replace(SPECULATORS, config=config))
    check_fits(tmp_path, head, replace(TARGET, family=family), "target", tmp_path)
    with pytest.raises(ModelError, match="family is qwen2"):
        check_fits(tmp_path, head, replace(TARGET, family="qwen2"), "target", tmp_path)


def test_a_stale_head_of_our_own_is_refused(tmp_path: Path) -> None:
    head = read(tmp_path, replace(SPECULATORS, config={"outpace": {"format": 1, "target": {"fingerprint": "00ff"}}}))
    with pytest.raises(ModelError, match=r"its target's fingerprint is 00ff and the model's is [0-9a-f]{16}"):
        check_fits(tmp_path, head, TARGET, "target", tmp_path / "head")


@pytest.mark.parametrize(
    ("name", "path", "warns"),
    [
        ("Target 8B", "x.gguf", False),
        ("x", "models/my-target-8b-Q4_K.gguf", False),
        ("snapshot", "models--someone--Target-8B/snapshots/abc", False),
        ("target", "other.gguf", True),
    ],
)
def test_another_name_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, path: str, warns: bool
) -> None:
    """The same model has many names, and a head for a sibling drafts worse but not wrongly."""
    config = {"speculators_config": {"verifier": {"name_or_path": "someone/Target-8B"}}}
    head = read(tmp_path, replace(SPECULATORS, config=config))
    with caplog.at_level(logging.WARNING, logger="outpace.models"):
        check_fits(tmp_path, head, TARGET, name, tmp_path / path)
    assert [r.getMessage() for r in caplog.records if "someone/Target-8B and the model is" in r.getMessage()] == (
        [r.getMessage() for r in caplog.records] if warns else []
    )
    assert bool(caplog.records) is warns

"""Recommended sampling settings, from a folder, a GGUF file or the embedded model; a wrong choice is one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outpace.config import SamplingParams
from outpace.errors import ModelError, UsageError
from outpace.models import embedded
from outpace.models.generation_config import GenerationChoice, recommended
from outpace.models.hf_schema import GenerationSettings


def folder(path: Path, **values: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


def test_a_folder_recommends_what_its_file_says(tmp_path):
    written = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0, "repetition_penalty": 1.05}
    found = recommended(folder(tmp_path, **written, do_sample=True, eos_token_id=[1], max_new_tokens=2048))
    assert found.values == written | {"max_tokens": 2048}
    SamplingParams(**dict[str, Any](found.values))
    assert str(found).startswith("temperature 0.6, top_k 20, top_p 0.95, ")
    assert str(found).endswith("(from generation_config.json)")


def test_without_a_file_or_values_everything_is_neutral(tmp_path):
    for found in (recommended(tmp_path), recommended(folder(tmp_path / "a", temperature=None, eos_token_id=1))):
        assert found.values == {}
        assert str(found) == "temperature 1 and no filters (the model recommends nothing)"


@pytest.mark.parametrize("value", ["hot", True, -1, 101, [0.5], float("nan")])
def test_a_value_that_cannot_be_is_the_files_fault(tmp_path, value):
    with pytest.raises(ModelError, match="has no usable temperature"):
        recommended(folder(tmp_path, temperature=value))


def test_every_accepted_extreme_is_a_sampling_parameter():
    """The limits are written twice, because the models' package does not know the engine's configuration."""
    lowest = {"temperature": 0, "top_k": -1, "top_p": 1e-9, "min_p": 0, "repetition_penalty": 0.01}
    highest = {"temperature": 100, "top_k": 1 << 40, "top_p": 1, "min_p": 1, "repetition_penalty": 10}
    assert set(lowest) | {"max_new_tokens"} == set(GenerationSettings.model_fields)
    for values in (lowest, highest):
        SamplingParams(**GenerationSettings.model_validate(values).model_dump(exclude_none=True))


def write_gguf(path: Path, values: dict[str, float | int]) -> Path:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        add: Any = writer.add_float32 if isinstance(value, float) else writer.add_int32
        add(f"general.sampling.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_a_gguf_file_recommends_what_its_metadata_say(tmp_path):
    written: dict[str, float | int] = {"temp": 0.7, "top_k": 20, "top_p": 0.95, "penalty_repeat": 1.05, "mirostat": 0}
    found = recommended(write_gguf(tmp_path / "a.gguf", written))
    assert found.values == {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    assert found.source == "from a.gguf"
    assert recommended(write_gguf(tmp_path / "b.gguf", {})).values == {}
    with pytest.raises(ModelError, match="no usable top_p"):
        recommended(write_gguf(tmp_path / "c.gguf", {"top_p": 1.5}))


def test_the_embedded_model_has_its_authors_settings(tmp_path, monkeypatch):
    place = write_gguf(tmp_path / embedded.SMOLLM2.file, {})
    assert recommended(place).values == {}  # a file of that name and another size
    with place.open("ab") as file:
        file.truncate(embedded.SMOLLM2.size)
    assert recommended(place).values == {"temperature": 0.2, "top_p": 0.9}


def test_a_folder_may_be_named_and_values_overridden(tmp_path):
    model, other = folder(tmp_path / "a", temperature=0.6, top_k=5), folder(tmp_path / "b", temperature=0.9)
    assert GenerationChoice.of(None, None).settle(model).values == {"temperature": 0.6, "top_k": 5}
    assert GenerationChoice.of("auto", '{"top_k": 9}').settle(model).values == {"temperature": 0.6, "top_k": 9}
    assert GenerationChoice.of("vllm", None).settle(model).values == {}
    for place in (str(other), str(other / "generation_config.json")):
        assert GenerationChoice.of(place, '{"max_new_tokens": 7}').settle(model).values == {
            "temperature": 0.9,
            "max_tokens": 7,
        }
    shown = str(GenerationChoice.of("auto", '{"top_k": 9}').settle(model))
    assert shown == "temperature 0.6, top_k 9 (from generation_config.json; overridden: top_k)"


@pytest.mark.parametrize(
    ("source", "override", "says"),
    [
        ("no/such/folder", None, "takes auto, vllm or a folder"),
        (None, "{", "is not JSON"),
        (None, "[1]", "is not a JSON object"),
        (None, '{"temprature": 1}', "'temprature', which is not one of temperature, top_k"),
        (None, '{"top_p": 2}', "top_p cannot be 2"),
        (None, '{"top_k": "5"}', "top_k cannot be '5'"),
    ],
)
def test_a_wrong_choice_is_refused_before_a_model_is_loaded(source, override, says):
    with pytest.raises(UsageError, match=says) as caught:
        GenerationChoice.of(source, override)
    assert "\n" not in str(caught.value)

"""Wrong settings are refused on construction, in a sentence that names them; `resolve` fills in unset fields."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest

from outpace.config import (
    DEFAULT_CONTEXT,
    DEFAULT_DEPTH,
    LOSSY,
    MAX_DEPTH,
    EngineConfig,
    ResolvedConfig,
    SamplingParams,
    SpeculationParams,
    usable_cores,
)
from outpace.errors import OutpaceError, UsageError
from outpace.structured import StructuredOutput

NAN, INF = math.nan, math.inf


def refusal(kind: Any, **options: Any) -> str:
    """The error message for these options; it must be exactly one sentence."""
    with pytest.raises(UsageError) as caught:
        kind(**options)
    sentence = str(caught.value)
    assert "\n" not in sentence and not re.search(r"[.!?]\s", sentence), f"not one sentence: {sentence}"
    return sentence


def wrong(field: str, *values: Any) -> list[Any]:
    return [pytest.param(field, value, id=f"{field}={value!r}") for value in values]


NOT_INTS = (NAN, INF, 1.0, 1.5, True, False, "3", [1])
NOT_NUMBERS = (NAN, INF, -INF, True, False, "0.5", None, [0.5])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *wrong("n", 0, -1, 129, None, *NOT_INTS),
        *wrong("temperature", -0.1, -1, 100.1, *NOT_NUMBERS),
        *wrong("top_k", -2, None, *NOT_INTS),
        *wrong("top_p", 0, 0.0, -0.1, 1.1, *NOT_NUMBERS),
        *wrong("min_p", -0.1, 1.1, *NOT_NUMBERS),
        *wrong("presence_penalty", -2.1, 2.1, *NOT_NUMBERS),
        *wrong("frequency_penalty", -2.1, 2.1, *NOT_NUMBERS),
        *wrong("repetition_penalty", -1.0, 10.1, *NOT_NUMBERS),
        *wrong("seed", -1, 2**64, *NOT_INTS),
        *wrong("max_tokens", 0, -1, None, *NOT_INTS),
        *wrong("min_tokens", -1, None, *NOT_INTS),
        *wrong("logprobs", -1, 101, *NOT_INTS),
        *wrong("prompt_logprobs", -1, 101, *NOT_INTS),
        *wrong("prediction", 1, b"text", ["text"]),
    ],
)
def test_a_wrong_sampling_parameter_is_named_with_its_value(field, value):
    sentence = refusal(SamplingParams, **{field: value})
    assert sentence.startswith(f"{field} must be ")
    assert sentence.endswith(f"got {value!r}")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty must be at least 0.01; 1 leaves logits alone"),
        ({"logit_bias": {-1: 1.0}}, "a logit_bias token id must be a whole number at least 0; got -1"),
        ({"logit_bias": {True: 1.0}}, "a logit_bias token id must be a whole number at least 0; got True"),
        ({"logit_bias": {"5": 1.0}}, "a logit_bias token id must be a whole number at least 0; got '5'"),
        ({"logit_bias": {5: NAN}}, "the logit_bias of token 5 must be a number between -100 and 100; got nan"),
        ({"logit_bias": {5: INF}}, "the logit_bias of token 5 must be a number between -100 and 100; got inf"),
        ({"logit_bias": {5: -100.5}}, "the logit_bias of token 5 must be a number between -100 and 100; got -100.5"),
        ({"stop": ["a", ""]}, "a stop string must be a non-empty string; got ''"),
        ({"stop": ""}, "a stop string must be a non-empty string; got ''"),
        ({"stop": ["a", 5]}, "a stop string must be a non-empty string; got 5"),
        ({"stop": [None]}, "a stop string must be a non-empty string; got None"),
        ({"stop_token_ids": [3, -1]}, "a stop token id must be a whole number at least 0; got -1"),
        ({"stop_token_ids": [True]}, "a stop token id must be a whole number at least 0; got True"),
        ({"visible_tokens": [-1]}, "a visible token id must be a whole number at least 0; got -1"),
        ({"stop_token_ids": [2.0]}, "a stop token id must be a whole number at least 0; got 2.0"),
        ({"bad_words": ["a", ""]}, "a bad word must not be empty; leave it out"),
        ({"bad_words": [[]]}, "a bad word must not be empty; leave it out"),
        (
            {"bad_words": ["a"], "structured": StructuredOutput(regex="a")},
            "structured output .*; leave out one",
        ),
        ({"bad_words": [5]}, "a bad word must be a string or a list of token ids; got 5"),
        ({"bad_words": [[5, -1]]}, r"a bad word must be a string or a list of token ids; got \[5, -1\]"),
        ({"bad_words": [[True]]}, r"a bad word must be a string or a list of token ids; got \[True\]"),
        ({"bad_words": ["a"] * 1001}, "there are too many bad words; give at most 1000"),
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens \(5\) is larger than max_tokens \(4\)"),
    ],
    ids=lambda value: repr(value) if isinstance(value, dict) else "",
)
def test_sampling_parameters_that_cannot_be_meant_are_refused(options, sentence):
    assert re.fullmatch(sentence, refusal(SamplingParams, **options))


@pytest.mark.parametrize(
    ("options"),
    [
        {"temperature": 0},
        {"temperature": 0.0},
        {"temperature": 100},
        {"temperature": 1e-300},
        {"top_k": -1},
        {"top_k": 0},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"n": 128},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 10.0},
        {"logit_bias": {0: -100.0, 7: 100.0}},
        {"min_tokens": 3, "max_tokens": 3},
        {"max_tokens": 1},
        {"logprobs": 0},
        {"logprobs": 100},
        {"prompt_logprobs": 100, "max_tokens": 0},
    ],
    ids=repr,
)
def test_the_ends_of_every_range_belong_to_it(options):
    params = SamplingParams(**options)
    assert {name: getattr(params, name) for name in options} == options


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *wrong("max_depth", -1, MAX_DEPTH + 1, *NOT_INTS),
        *wrong("posterior_threshold", -0.1, 1.1, *NOT_NUMBERS),
        *wrong("posterior_alpha", -0.1, 1.1, *NOT_NUMBERS),
        *wrong("acceptance", "greedy", "", None, 5, True),
    ],
)
def test_a_wrong_speculation_parameter_is_named_with_its_value(field, value):
    sentence = refusal(SpeculationParams, **{field: value})
    assert sentence.startswith(f"{field} must be ")
    assert sentence.endswith(f"got {value!r}")


@pytest.mark.parametrize("value", [v for v in (-0.1, 1.1, *NOT_NUMBERS) if v is not None], ids=repr)
def test_a_wrong_threshold_is_named_with_its_value(value):
    sentence = refusal(SpeculationParams, acceptance="threshold", threshold=value)
    assert sentence == f"threshold must be a number between 0 and 1; got {value!r}"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mode": "always"}, "speculation mode must be one of auto, off, on; got 'always'"),
        ({"mode": True}, "speculation mode must be one of auto, off, on; got True"),
        (
            {"method": "eagle"},
            "speculation method must be one of none, grammar, ngram, suffix, prediction, draft, head, tree; "
            "got 'eagle'",
        ),
        (
            {"acceptance": "threshold"},
            "acceptance 'threshold' needs a threshold between 0 and 1, such as 0.75",
        ),
        (
            {"threshold": 0.5},
            "a threshold was given with acceptance 'exact'; set acceptance='threshold' to use it",
        ),
        (
            {"threshold": 0.5, "acceptance": "typical"},
            "a threshold was given with acceptance 'typical'; set acceptance='threshold' to use it",
        ),
    ],
    ids=lambda value: repr(value) if isinstance(value, dict) else "",
)
def test_speculation_parameters_that_cannot_be_meant_are_refused(options, sentence):
    assert refusal(SpeculationParams, **options) == sentence


def test_lossy_is_said_of_the_lossy_rules_and_no_others():
    rules = ["exact", "rejection", "block", "typical"]
    assert [SpeculationParams(acceptance=rule).is_lossy for rule in rules] == [False, False, False, True]  # type: ignore[arg-type]
    assert SpeculationParams(acceptance="threshold", threshold=0.5).is_lossy
    assert {"typical", "threshold"} == LOSSY


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *wrong("backend", "cuda", "", None, 1),
        *wrong("speculation", "maybe", "", None, True),
        *wrong("method", "eagle", "", 1),
        *wrong("depth", -1, MAX_DEPTH + 1, *NOT_INTS),
        *wrong("ngram_min", 0, -1, None, *NOT_INTS),
        *wrong("ngram_max", 1, -1, None, *NOT_INTS),
        *wrong("suffix_store_tokens", -1, None, *NOT_INTS),
        *wrong("max_context", 0, -1, *NOT_INTS),
        *wrong("cache_tokens", 0, -1, *NOT_INTS),
        *wrong("threads", 0, -1, *NOT_INTS),
        *wrong("max_sequences", 0, -1, 513, None, *NOT_INTS),
        *wrong("max_step_tokens", 0, -1, None, *NOT_INTS),
    ],
)
def test_a_wrong_engine_option_is_named_with_its_value(field, value):
    sentence = refusal(EngineConfig, **{field: value})
    assert sentence.startswith(f"{field} must be ")
    assert sentence.endswith(f"got {value!r}")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"method": "draft"}, ["method 'draft' needs a draft model", "--draft"]),
        ({"speculation": "off", "depth": 4}, ["speculation is off but depth is 4", "set speculation to 'on'"]),
        ({"speculation": "off", "method": "ngram"}, ["speculation is off but method is 'ngram'", "leave out"]),
        ({"speculation": "on", "depth": 0}, ["speculation is on but depth 0", "set speculation to 'off'"]),
        ({"speculation": "on", "method": "none"}, ["method 'none' means plain decoding", "set speculation to 'off'"]),
        ({"max_sequences": 9, "max_step_tokens": 8}, ["max_step_tokens (8) must be at least max_sequences (9)"]),
        ({"max_context": 101, "cache_tokens": 100}, ["cache_tokens (100) must be at least max_context (101)"]),
        ({"ngram_min": 5, "ngram_max": 4}, ["ngram_max must be a whole number at least 5 (ngram_min); got 4"]),
    ],
    ids=lambda value: repr(value) if isinstance(value, dict) else "",
)
def test_options_that_contradict_each_other_are_refused_with_a_way_out(options, expected):
    sentence = refusal(EngineConfig, **options)
    for part in expected:
        assert part in sentence


@pytest.mark.parametrize(
    "options",
    [
        {"speculation": "off", "depth": 0},
        {"speculation": "off", "method": "none"},
        {"speculation": "off", "draft": "d.gguf"},
        {"method": "draft", "draft": "d.gguf"},
        {"max_sequences": 8, "max_step_tokens": 8},
        {"max_sequences": 512},
        {"max_context": 100, "cache_tokens": 100},
        {"ngram_min": 3, "ngram_max": 3},
        {"depth": MAX_DEPTH},
    ],
    ids=repr,
)
def test_options_that_only_look_contradictory_are_accepted(options):
    config = EngineConfig(**options)
    assert {name: getattr(config, name) for name in options} == options


@pytest.mark.parametrize("kind", [SamplingParams, SpeculationParams, EngineConfig])
def test_parameters_are_frozen_and_named(kind):
    params = kind()
    name = dataclasses.fields(kind)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(params, name, 1)
    with pytest.raises(TypeError):
        kind(1)
    with pytest.raises(TypeError):
        kind(no_such_parameter=1)
    assert kind() == params


def test_a_resolved_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved().depth = 9  # type: ignore[misc]


def test_a_usage_error_is_also_an_ordinary_value_error():
    with pytest.raises(ValueError, match="top_p"):
        SamplingParams(top_p=2.0)
    assert issubclass(UsageError, OutpaceError)


def test_one_stop_string_need_not_be_wrapped_in_a_list():
    assert SamplingParams(stop="END").stop == ("END",)


def test_greedy_is_temperature_zero_and_nothing_else():
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(top_k=1).is_greedy


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.1}, {"presence_penalty": -1}, {"frequency_penalty": 1}])
def test_any_penalty_counts_as_one(options):
    assert SamplingParams(**options).has_penalties
    assert not SamplingParams().has_penalties


# ---- resolve


def resolved(*, model_context: int = 2048, **options: Any) -> ResolvedConfig:
    draft = options.get("draft")
    return EngineConfig(**options).resolve(model_context=model_context, model_path="/m.gguf", draft_path=draft)


def test_nothing_is_left_open_and_paths_are_the_files_found():
    config = resolved(draft="d.gguf")
    assert (config.model, config.draft, config.backend) == ("/m.gguf", "d.gguf", "llamacpp")
    may_be_none = {"draft", "llama_library", "disable_by_batch_size", "chat_template", "default_seed"}
    assert [name for name, value in config.as_dict().items() if value is None and name not in may_be_none] == []
    assert set(config.as_dict()) == set(EngineConfig.__dataclass_fields__) | {"methods", "auto_depth"}


@pytest.mark.parametrize(
    ("model_context", "options", "context", "cache"),
    [
        (2048, {}, 2048, DEFAULT_CONTEXT),
        (131072, {}, DEFAULT_CONTEXT, DEFAULT_CONTEXT),
        (131072, {"cache_tokens": 20000}, 20000, 20000),
        (2048, {"cache_tokens": 20000}, 2048, 20000),
        (2048, {"cache_tokens": 100}, 100, 100),
        (131072, {"max_context": 50000}, 50000, 50000),
        (131072, {"max_context": 50000, "cache_tokens": 60000}, 50000, 60000),
        (131072, {"max_context": 64}, 64, DEFAULT_CONTEXT),
    ],
)
def test_context_and_cache_default_to_what_the_model_and_the_room_allow(model_context, options, context, cache):
    config = resolved(model_context=model_context, **options)
    assert (config.max_context, config.cache_tokens) == (context, cache)
    assert config.cache_tokens >= config.max_context


def test_a_context_longer_than_the_model_was_made_for_is_refused_with_both_numbers():
    with pytest.raises(UsageError, match="max_context is 2049, but the model was made for at most 2048 tokens"):
        resolved(model_context=2048, max_context=2049)
    assert resolved(model_context=2048, max_context=2048).max_context == 2048


@pytest.mark.parametrize(
    ("options", "method", "depth"),
    [
        ({}, "suffix", DEFAULT_DEPTH),
        ({"draft": "d.gguf"}, "draft", DEFAULT_DEPTH),
        ({"draft": "d.gguf", "method": "ngram"}, "ngram", DEFAULT_DEPTH),
        ({"speculation": "on", "depth": 7}, "suffix", 7),
        ({"speculation": "off"}, "suffix", DEFAULT_DEPTH),
        ({"speculation": "off", "draft": "d.gguf"}, "draft", DEFAULT_DEPTH),
        ({"method": "none"}, "none", DEFAULT_DEPTH),
    ],
)
def test_the_method_follows_the_draft_also_where_a_request_must_turn_speculation_on(options, method, depth):
    config = resolved(**options)
    assert (config.method, config.depth) == (method, depth)


def test_threads_default_to_the_cores_this_process_may_use():
    assert resolved().threads == usable_cores() >= 1
    assert resolved(threads=3).threads == 3


# ---- regressions


def test_depth_zero_under_auto_stays_zero():
    assert resolved(speculation="auto", depth=0).depth == 0


@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty"])
def test_an_int_too_large_for_a_float_is_refused_in_a_sentence(field):
    assert refusal(SamplingParams, **{field: 10**400}).startswith(field)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (SamplingParams, "stop", 5),
        (SamplingParams, "stop", None),
        (SamplingParams, "stop_token_ids", 5),
        (SamplingParams, "bad_words", "a"),
        (SamplingParams, "bad_words", None),
        (SamplingParams, "visible_tokens", 5),
        (SamplingParams, "logit_bias", [5]),
        (SamplingParams, "logit_bias", None),
        (SamplingParams, "speculation", "on"),
        (SamplingParams, "speculation", None),
        (SamplingParams, "ignore_eos", "no"),
        (EngineConfig, "prefix_reuse", "no"),
        (EngineConfig, "model", 5),
        (EngineConfig, "draft", 5),
        (EngineConfig, "llama_library", 5),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_in_a_sentence_that_names_the_field(kind, field, value):
    assert field in refusal(kind, **{field: value})


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "off", "max_depth": 4},
        {"mode": "off", "method": "ngram"},
        {"mode": "on", "max_depth": 0},
        {"mode": "on", "method": "none"},
    ],
    ids=repr,
)
def test_a_request_that_contradicts_itself_is_refused_as_an_engine_is(options):
    assert "speculation is o" in refusal(SpeculationParams, **options)


def test_changing_the_callers_list_later_changes_nothing():
    stop, ids, bias = ["a"], [1], {3: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("")
    ids.append(-1)
    bias[-4] = 1.0
    assert (list(params.stop), list(params.stop_token_ids), dict(params.logit_bias)) == (["a"], [1], {3: 1.0})

"""`--speculative-config`: vLLM's JSON object for speculation, as the flags of `outpace serve` that mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.errors import UsageError, json_object

NAME = "speculative_config"
_FLAG = "--speculative-config"
_EXAMPLE = '{"method": "eagle3", "model": "DIR", "num_speculative_tokens": 3}'
# Our proposer, or None: the draft is named, and its files say whether it is a head or a model.
_METHODS = {"eagle3": None, "draft_model": None, "ngram": "ngram", "suffix": "suffix"}
# The flag and the type of each key.
_KEYS: dict[str, tuple[str, type]] = {
    "model": ("speculative_model", str),
    "num_speculative_tokens": ("num_speculative_tokens", int),
    "prompt_lookup_min": ("ngram_prompt_lookup_min", int),
    "prompt_lookup_max": ("ngram_prompt_lookup_max", int),
    "disable_by_batch_size": ("speculative_disable_by_batch_size", int),
    "quantization": ("speculative_model_quantization", str),
    "draft_tensor_parallel_size": ("speculative_draft_tensor_parallel_size", int),
}


def expand(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the object's keys as flags of their own."""
    others = {name: value for name, value in settings.items() if name != NAME}
    if NAME not in settings:
        return others
    added = _as_flags(_parse(settings[NAME]))
    twice = sorted(added.keys() & others.keys())
    if twice:
        raise UsageError(f"{_FLAG} says the same as --{twice[0].replace('_', '-')}; leave out one of them")
    return others | added


def _parse(text: str) -> dict[str, Any]:
    values = json_object(_FLAG, text, _EXAMPLE)
    return {key: value for key, value in values.items() if value is not None}


def _as_flags(values: dict[str, Any]) -> dict[str, Any]:
    method = values.pop("method", "draft_model")
    if not isinstance(method, str) or method not in _METHODS:
        raise UsageError(f"{_FLAG} has the method {method!r:.80}, but this build has {', '.join(_METHODS)}")
    proposer = _METHODS[method]
    if proposer is None and "model" not in values:
        raise UsageError(f"{_FLAG} names no model, which {method} needs; write it as {_EXAMPLE}")
    found: dict[str, Any] = {} if proposer is None else {"method": proposer}
    for key, value in values.items():
        if key not in _KEYS:
            raise UsageError(f"{_FLAG} has the key {key!r:.80}, but this build reads method, {', '.join(_KEYS)}")
        name, kind = _KEYS[key]
        if type(value) is not kind:
            wanted = "a whole number" if kind is int else "a string"
            raise UsageError(f"{_FLAG} has {value!r:.80} as {key}, which must be {wanted}")
        # The flag for parallelism takes words, because most of its values are refused.
        found[name] = str(value) if key == "draft_tensor_parallel_size" else value
    return found

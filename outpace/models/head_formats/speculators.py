"""Reads EAGLE-3 heads in the format of the `speculators` project, which `outpace distill` writes too.

A missing `norm_before_residual` means false to `speculators` and true to vLLM. So a file that names the version of
`speculators` that wrote it is read with false, and a file that somebody wrote for vLLM is read with true.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.errors import ModelError
from outpace.models.head_file import FORMAT, HeadConfig
from outpace.models.head_formats.keys import HeadKeys, Surroundings, default_taps, describe
from outpace.models.hf_schema import JsonFile, validate

LAYER = "layers.0."  # what names of the layer's tensors begin with
_LAYER_TYPES = ("llama", "qwen3")


class _Verifier(JsonFile):
    name_or_path: str | None = None
    architectures: list[str] | None = None


class _Settings(JsonFile):
    verifier: _Verifier | None = None


class _Target(JsonFile):
    fingerprint: str | None = None


class _Own(JsonFile):
    """What `outpace distill` adds."""

    format: int
    target: _Target = _Target()


class _SpeculatorsFile(HeadKeys):
    speculators_model_type: str
    speculators_version: str | None = None
    speculators_config: _Settings | None = None
    transformer_layer_config: dict[str, Any]
    outpace: _Own | None = None


def recognises(values: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in values


def read(values: Mapping[str, Any], around: Surroundings) -> HeadConfig:
    source = around.source
    keys = validate(_SpeculatorsFile, values, source)
    if keys.outpace is not None and keys.outpace.format > FORMAT:
        raise ModelError(
            f"{source} has format {keys.outpace.format}, newer than this version's {FORMAT}; update Outpace"
        )
    layer_type = keys.transformer_layer_config.get("model_type")
    if layer_type not in _LAYER_TYPES:
        raise ModelError(
            f"{source} has a layer of type {layer_type!r:.80}, but only {' and '.join(_LAYER_TYPES)} are read"
        )
    verifier = (keys.speculators_config or _Settings()).verifier or _Verifier()
    by_speculators = keys.speculators_version is not None or keys.outpace is not None
    residual = keys.norm_before_residual
    own: dict[str, Any] = {"rope": None} if keys.outpace is not None else {}  # ours rotate as the target does
    return describe(
        keys.transformer_layer_config,
        keys,
        around,
        taps=tuple(keys.eagle_aux_hidden_state_layer_ids or default_taps(around.num_target_layers)),
        norm_before_residual=not by_speculators if residual is None else residual,
        has_qk_norm=layer_type == "qwen3",
        target={
            "name": verifier.name_or_path,
            "architectures": verifier.architectures or [],
            "fingerprint": keys.outpace.target.fingerprint if keys.outpace is not None else None,
        },
        **own,
    )

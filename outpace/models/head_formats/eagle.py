"""Reads EAGLE-3 heads as SafeAILab publishes them: the config of a Llama with one layer, and `midlayer.*`.

vLLM's and SGLang's options for such files are read too. They number taps differently: a list at the top level counts
layers, as `speculators` does; a list under `eagle_config` is SGLang's and has the indices of layers, one lower.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.errors import ModelError
from outpace.models.head_file import HeadConfig
from outpace.models.head_formats.keys import HeadKeys, Surroundings, Taps, default_taps, describe
from outpace.models.head_formats.speculators import LAYER as CANONICAL_LAYER
from outpace.models.hf_schema import JsonFile, validate

LAYER = "midlayer."


class _Settings(JsonFile):
    use_aux_hidden_state: bool | None = None
    norm_before_fc: bool | None = None
    eagle_aux_hidden_state_layer_ids: Taps | None = None


class _EagleFile(HeadKeys):
    eagle_config: _Settings | None = None


def recognises(values: Mapping[str, Any]) -> bool:
    return "draft_vocab_size" in values or "eagle_config" in values


def read(values: Mapping[str, Any], around: Surroundings) -> HeadConfig:
    keys = validate(_EagleFile, values, around.source)
    more = keys.eagle_config or _Settings()
    if more.use_aux_hidden_state is False:
        raise ModelError(f"{around.source} asks for the target's last hidden state alone, but EAGLE-3 reads several")
    taps = tuple(keys.eagle_aux_hidden_state_layer_ids or ())
    taps = taps or tuple(index + 1 for index in more.eagle_aux_hidden_state_layer_ids or ())
    if keys.norm_before_fc is None:
        keys = keys.model_copy(update={"norm_before_fc": more.norm_before_fc})
    return describe(
        values,
        keys,
        around,
        taps=taps or default_taps(around.num_target_layers),
        norm_before_residual=bool(keys.norm_before_residual),
        has_qk_norm=f"{CANONICAL_LAYER}self_attn.q_norm.weight" in around.tensors,
    )

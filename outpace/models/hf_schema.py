"""What the JSON files of a Hugging Face folder may hold. Keys that Outpace does not read are ignored.

The files are not trusted: they are bounded in size, and a value of another type than expected is a ModelError that
names its key.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from outpace.errors import ModelError

MAX_JSON_BYTES = 64 << 20  # the index of a large model has 10 MB
MAX_TEMPLATE_BYTES = 1 << 20  # long templates have 30 kB
MAX_TOKENIZER_BYTES = 256 << 20  # a vocabulary of 262k tokens with its merges has 40 MB
MAX_LAYERS = 4096


def _no_text(value: object) -> object:
    """Pydantic would read a number from a string or a bool."""
    if isinstance(value, str | bytes | bool):
        raise ValueError("not a number")
    return value


TokenId = Annotated[int, Field(strict=True, ge=0)]
Size = Annotated[int, Field(strict=True, gt=0, lt=1 << 24)]
Number = Annotated[float, BeforeValidator(_no_text), Field(allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0)]
Schema = TypeVar("Schema", bound=BaseModel)


class JsonFile(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class RopeSettings(JsonFile):
    rope_theta: Annotated[Positive, Field(gt=1)] | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Size | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    attention_factor: Positive | None = None
    truncate: bool = True
    short_factor: list[Positive] | None = None
    long_factor: list[Positive] | None = None
    partial_rotary_factor: Annotated[Positive, Field(le=1)] | None = None
    full_attention: RopeSettings | None = None  # by kind of layer, instead of all the above
    sliding_attention: RopeSettings | None = None


class Kind(JsonFile):
    """The part of config.json that says what the rest of it means."""

    architectures: list[str] | None = None


class Config(JsonFile):
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[Size, Field(le=MAX_LAYERS)]
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    vocab_size: Size
    max_position_embeddings: Size | None = None
    sliding_window: Annotated[int, Field(strict=True, ge=0, lt=1 << 24)] | None = None
    use_sliding_window: bool | None = None
    rms_norm_eps: Annotated[Positive, Field(lt=1)] = 1e-6
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    tie_word_embeddings: bool | None = None
    rope_theta: Annotated[Positive, Field(gt=1)] | None = None
    rope_scaling: RopeSettings | None = None
    rope_parameters: RopeSettings | None = None
    original_max_position_embeddings: Size | None = None
    partial_rotary_factor: Annotated[Positive, Field(le=1)] | None = None
    rope_local_base_freq: Annotated[Positive, Field(gt=1)] | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    query_pre_attn_scalar: Positive | None = None
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    layer_types: Annotated[list[str], Field(max_length=MAX_LAYERS)] | None = None
    sliding_window_pattern: Size | None = None
    max_window_layers: Annotated[int, Field(strict=True, ge=0)] | None = None
    num_experts: Size | None = None
    num_local_experts: Size | None = None
    num_experts_per_tok: Size | None = None
    norm_topk_prob: bool | None = None
    moe_intermediate_size: Size | None = None


class EndTokens(JsonFile):
    """The part of config.json and generation_config.json that the tokenizer reads."""

    eos_token_id: list[Annotated[int, Field(strict=True, ge=0)]] | Annotated[int, Field(strict=True, ge=0)] | None = (
        None
    )

    @property
    def ids(self) -> frozenset[int]:
        value = self.eos_token_id
        return frozenset([value] if isinstance(value, int) else value or ())


class GenerationSettings(JsonFile):
    """The part of generation_config.json that sets sampling, with the limits of SamplingParams. vLLM uses these too."""

    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=10)] | None = None
    max_new_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None


class TokenText(JsonFile):
    content: str | None = None


class NamedTemplate(JsonFile):
    name: str | None = None
    template: str | None = None


class TokenizerSettings(JsonFile):
    """tokenizer_config.json and chat_template.json."""

    bos_token: str | TokenText | None = None
    eos_token: str | TokenText | None = None
    chat_template: str | list[NamedTemplate] | None = None


class ShardIndex(JsonFile):
    weight_map: Annotated[dict[str, Annotated[str, Field(min_length=1, max_length=255)]], Field(min_length=1)]


def read_text(path: Path, limit: int) -> str:
    """A regular file of UTF-8 text. Raises FileNotFoundError if there is none, ModelError if it is unusable."""
    try:
        if not path.is_file() and path.exists():  # opening a pipe would wait for a writer
            raise ModelError(f"{path} is not a regular file; download it again")
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); check its permissions") from error
    if len(data) > limit:
        raise ModelError(f"{path} is larger than {limit >> 20} MiB, so it is damaged; download it again")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); download it again"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises FileNotFoundError if there is none, ModelError if it is unusable."""
    try:
        values = json.loads(read_text(path, MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} is not a JSON object; download it again")
    return values


def validate(schema: type[Schema], values: Mapping[str, Any], name: str) -> Schema:
    """`name` says which file this is, in the error message."""
    try:
        return schema.model_validate(dict(values))
    except ValidationError as error:
        key, value = _located(values, error.errors(include_url=False)[0]["loc"])
        raise ModelError(
            f"{name} has no usable {key} ({reprlib.repr(value)}); it is damaged, so download it again"
        ) from error


def _located(values: Mapping[str, Any], location: tuple[int | str, ...]) -> tuple[str, Any]:
    """The key of a validation error, as written in the file, and its value."""
    keys: list[str] = [str(location[0])]
    value: Any = values.get(keys[0])
    for part in location[1:]:  # some parts are names of types
        with suppress(KeyError, IndexError, TypeError):
            value = value[part]
            keys.append(str(part))
    return reprlib.repr(".".join(keys))[1:-1], value

"""Sampling settings that a model's authors recommend, for requests that do not set their own.

They come from generation_config.json of a Hugging Face folder, from the metadata of a GGUF file, or, for the embedded
model, from its model card. A user may name another folder, or override single values. Only values from outside need
checking: with the embedded model alone, pydantic is not loaded, which would take a quarter of a start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.errors import UsageError, json_object
from outpace.models import embedded
from outpace.models.gguf_header import read_header

if TYPE_CHECKING:
    from outpace.models.hf_schema import GenerationSettings

Value = int | float
_FILE = "generation_config.json"
# The names in GGUF metadata, as llama.cpp's converter writes them.
_GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Fields of SamplingParams and their values, and where they come from."""

    values: Mapping[str, Value] = field(default_factory=dict)
    source: str = ""

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {value:g}" for name, value in self.values.items())
        return f"{shown} ({self.source})" if shown else f"temperature 1 and no filters ({self.source})"


@dataclass(frozen=True, slots=True)
class GenerationChoice:
    """Which settings the user wants: `source` is auto, vllm (none of the model's) or a folder; `override` comes first.

    A wrong choice is reported when it is made, before a model is loaded.
    """

    source: str = "auto"
    override: Mapping[str, Value] = field(default_factory=dict)

    @classmethod
    def of(cls, source: str | None, override: str | None) -> GenerationChoice:
        choice = cls(source or "auto", _overriding(override) if override else {})
        if choice._folder is not None:
            _from_folder(choice._folder, is_needed=True)
        return choice

    @property
    def _folder(self) -> Path | None:
        return None if self.source in ("auto", "vllm") else Path(self.source).expanduser()

    def settle(self, model: Path) -> GenerationDefaults:
        """The defaults for this model's file or folder."""
        if self.source == "vllm":
            found = GenerationDefaults(source="the model's own settings are turned off")
        elif self._folder is not None:
            found = _from_folder(self._folder, is_needed=True)
        else:
            found = recommended(model)
        if not self.override:
            return found
        source = f"{found.source}; overridden: {', '.join(self.override)}"
        return GenerationDefaults({**found.values, **self.override}, source)


def recommended(model: Path) -> GenerationDefaults:
    """What comes with a model. Without any, all values are neutral."""
    if model.is_dir():
        return _from_folder(model)
    own = embedded.recommended_sampling(model)
    if own:
        return GenerationDefaults(own, "recommended by the model's authors")
    if not model.is_file():
        return GenerationDefaults(source="the model recommends nothing")
    from outpace.models.hf_schema import GenerationSettings, validate

    metadata = read_header(model).metadata
    found = {name: metadata[key] for name, key in _GGUF_KEYS.items() if key in metadata}
    # GGUF stores float32: 0.95 reads as 0.949999988.
    rounded = {name: float(f"{x:.6g}") if isinstance(x, float) and math.isfinite(x) else x for name, x in found.items()}
    return _defaults(validate(GenerationSettings, rounded, f"the metadata of {model}"), f"from {model.name}")


def _from_folder(folder: Path, *, is_needed: bool = False) -> GenerationDefaults:
    from outpace.models.hf_schema import GenerationSettings, read_json, validate

    path = folder if folder.name.endswith(".json") else folder / _FILE
    try:
        values = read_json(path)
    except FileNotFoundError:
        if is_needed:
            raise UsageError(f"there is no {path}; --generation-config takes auto, vllm or a folder with it") from None
        values = {}
    return _defaults(validate(GenerationSettings, values, str(path)), f"from {path.name}")


def _defaults(settings: GenerationSettings, source: str) -> GenerationDefaults:
    values: dict[str, Value] = settings.model_dump(exclude_none=True)
    if "max_new_tokens" in values:
        values["max_tokens"] = values.pop("max_new_tokens")
    return GenerationDefaults(values, source if values else "the model recommends nothing")


def _overriding(text: str) -> Mapping[str, Value]:
    from pydantic import ValidationError

    from outpace.models.hf_schema import GenerationSettings

    name, example = "--override-generation-config", '{"temperature": 0.5}'
    values = json_object(name, text, example)
    unknown = sorted(set(values) - set(GenerationSettings.model_fields))
    if unknown:
        raise UsageError(f"{name} has {unknown[0]!r}, which is not one of {', '.join(GenerationSettings.model_fields)}")
    try:
        return _defaults(GenerationSettings.model_validate(values), "").values
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UsageError(
            f"{name}: {first['loc'][0]} cannot be {first['input']!r}; correct it, as in {example}"
        ) from None

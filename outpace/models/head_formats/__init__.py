"""Draft heads in the formats that people bring. Each format has one small reader that describes the head.

A reader maps the keys of config.json onto `HeadConfig`. Tensors are named as `speculators` names them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from outpace.errors import ModelError
from outpace.models.gguf_header import read_header
from outpace.models.head_file import HeadConfig
from outpace.models.head_gguf import ARCHITECTURE, FILE

READ = "EAGLE-3 heads in SafeAILab's or speculators' format"
_ONE_PASS = ("dflash_config", "markov_rank")  # keys of DFlash's and DSpark's own configs


def find_head(draft: Path) -> Path | None:
    """The head's GGUF file or folder if `draft` is or holds a head; None for a draft model."""
    if not draft.is_dir():
        return draft if read_header(draft).architecture == ARCHITECTURE else None
    if (draft / FILE).is_file():
        return draft / FILE
    return draft if _is_head(_config(draft)) else None


def read_head(folder: Path, tensors: Collection[str], num_target_layers: int) -> HeadConfig:
    """Describe the head in a folder. `tensors`: their names, after `canonical`. Raises ModelError."""
    from outpace.models.head_formats import eagle, speculators
    from outpace.models.head_formats.keys import Surroundings

    values = _config(folder)
    _refuse_other_kinds(values, folder)
    around = Surroundings(f"the config.json of the draft head {folder}", tensors, num_target_layers)
    read = speculators.read if speculators.recognises(values) else eagle.read
    return read(values, around)


def canonical(name: str) -> str:
    """A tensor's name as `speculators` spells it."""
    from outpace.models.head_formats import eagle, speculators

    return speculators.LAYER + name.removeprefix(eagle.LAYER) if name.startswith(eagle.LAYER) else name


def _config(folder: Path) -> Mapping[str, Any]:
    from outpace.models.hf_schema import read_json  # pydantic, which training does not need

    try:
        return read_json(folder / "config.json")
    except FileNotFoundError as error:
        raise ModelError(f"{folder} has no readable config.json; name the folder of a draft head or a model") from error


def _is_head(values: Mapping[str, Any]) -> bool:
    from outpace.models.head_formats import eagle, speculators

    return speculators.recognises(values) or eagle.recognises(values) or _is_one_pass(values)


def _is_one_pass(values: Mapping[str, Any]) -> bool:
    return any(key in values for key in _ONE_PASS)


def _refuse_other_kinds(values: Mapping[str, Any], folder: Path) -> None:
    kind = values.get("speculators_model_type")
    if kind is None and _is_one_pass(values):
        architectures = values.get("architectures")
        kind = architectures[0] if isinstance(architectures, list) and architectures else "one-pass drafter"
    if kind not in (None, "eagle3"):
        raise ModelError(f"the draft head {folder} is of kind {kind!s:.80}, which is not read; what is read are {READ}")

"""The prepared file: prompts as token ids, so that training needs neither tokenizer nor chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outpace.errors import UsageError
from outpace.training.documents import Frame

_FORMAT = 2


@dataclass(frozen=True, slots=True)
class Source:
    """A file of prompts, for the card."""

    file: str
    licence: str
    num_prompts: int  # kept
    num_overlapping: int = 0  # dropped because a held-out or excluded prompt shares words with them
    num_long: int = 0  # dropped because of their length
    num_repeated: int = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    train: Sequence[NDArray[np.integer]]  # token ids of each prompt
    held: Sequence[NDArray[np.integer]]
    categories: list[str]  # of the held-out prompts
    end_ids: list[int]
    user_begin: list[int]  # what comes before the user's words, and after them, in the chat template
    user_end: list[int]
    vocab_size: int
    target: str  # the file's name
    fingerprint: str
    frames: list[Frame] = field(default_factory=list)  # tasks about a text; none if the template is unknown
    sources: list[Source] = field(default_factory=list)
    held_sources: list[Source] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)  # files whose prompts must not be trained on


def save_prepared(prepared: Prepared, path: Path) -> None:
    values: dict[str, Any] = asdict(prepared)
    values = {name: value for name, value in values.items() if name not in ("train", "held")} | {"format": _FORMAT}
    kind = np.uint16 if prepared.vocab_size <= 1 << 16 else np.uint32
    arrays: dict[str, Any] = {"description": np.frombuffer(json.dumps(values).encode(), np.uint8)}
    for name, prompts in (("train", prepared.train), ("held", prepared.held)):
        arrays[f"{name}_tokens"] = np.concatenate([np.zeros(0), *prompts]).astype(kind)
        arrays[f"{name}_lengths"] = np.array([len(prompt) for prompt in prompts], np.uint32)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:  # a file object, because numpy adds .npz to names
        np.savez_compressed(file, **arrays)


def load_prepared(path: Path) -> Prepared:
    try:
        with np.load(path, allow_pickle=False) as file:
            values = json.loads(file["description"].tobytes())
            if values.pop("format") != _FORMAT:
                raise UsageError(
                    f"{path} was prepared by another version of Outpace; run `outpace distill prepare` again"
                )
            train, held = (_split(file[f"{name}_tokens"], file[f"{name}_lengths"]) for name in ("train", "held"))
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}; check the path") from error
    except Exception as error:  # numpy and zipfile raise many kinds
        raise UsageError(
            f"{path} is not a prepared file ({error}); write one with `outpace distill prepare`"
        ) from error
    for name in ("sources", "held_sources"):
        values[name] = [Source(**each) for each in values[name]]
    values["frames"] = [Frame(**each) for each in values["frames"]]
    return Prepared(train=train, held=held, **values)


def _split(tokens: NDArray[np.integer], lengths: NDArray[np.integer]) -> list[NDArray[np.integer]]:
    if not len(lengths):
        return []
    parts: Sequence[NDArray[np.integer]] = np.split(tokens.astype(np.int64), np.cumsum(lengths, dtype=np.int64)[:-1])
    return list(parts)

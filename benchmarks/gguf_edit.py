"""Writes edited copies of a GGUF file for tests and benchmarks: a shallow draft, shuffled weights, another vocabulary.

A draft model of the same family is not always available. The first layers of a model can replace it: they have the
same vocabulary, cost less, and are right some of the time, so tests see both acceptance and rejection.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def edited_copy(
    source: Path,
    target: Path,
    *,
    keep_tensor: Callable[[str], bool] = lambda name: True,
    edit_tensor: Callable[[str, Any], Any] = lambda name, data: data,
    metadata: dict[str, Any] | None = None,
    architecture: str | None = None,
) -> Path:
    """Write `source` to `target` with some metadata replaced and some tensors changed or left out."""
    reader = gguf.GGUFReader(source)
    own_name = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture or own_name)
    changes = dict(metadata or {})
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, changes.get(name, field.contents()), kind, element)
    for tensor in reader.tensors:
        if keep_tensor(tensor.name):
            writer.add_tensor(tensor.name, edit_tensor(tensor.name, tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def shallow_draft(source: Path, target: Path, num_layers: int) -> Path:
    """Keep the first layers of a model and its output head."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()

    def keep(name: str) -> bool:
        return not name.startswith("blk.") or int(name.split(".")[1]) < num_layers

    return edited_copy(source, target, keep_tensor=keep, metadata={f"{architecture}.block_count": num_layers})


def shuffled_weights(source: Path, target: Path, seed: int = 0) -> Path:
    """Shuffle the rows of every matrix in the layers: the output is useless, the cost of a step is the same."""
    rng = np.random.default_rng(seed)

    def shuffle(name: str, data: Any) -> Any:
        return rng.permutation(data) if name.startswith("blk.") and data.ndim == 2 else data

    return edited_copy(source, target, edit_tensor=shuffle)


def other_vocabulary(source: Path, target: Path, token: int, text: str) -> Path:
    """The same model with one token spelled differently."""
    tokens = gguf.GGUFReader(source).fields["tokenizer.ggml.tokens"].contents()
    tokens[token] = text
    return edited_copy(source, target, metadata={"tokenizer.ggml.tokens": tokens})

"""Reads from a config.json how a checkpoint's matrices are quantised. The layout of the tensors is the backend's."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outpace.errors import ModelError
from outpace.models.hf_schema import JsonFile, validate

KEYS = ("quantization_config", "compression_config")
Layout = Literal["packed", "gptq", "awq", "scaled", "blocks"]
BLOCK = 128
GROUPS = (32, 64, 128)  # columns that share a scale, as the kernels read them
_READ = (
    "read are compressed-tensors (pack-quantized int4, float-quantized FP8, int-quantized INT8), FP8 in blocks of 128, "
    "GPTQ and AWQ in 4 bits, and GGUF files"
)


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    layout: Layout
    group: int | None = None  # columns that share a scale; None: all of a row
    is_symmetric: bool = True  # no zero points
    zero_offset: int = 0  # added to the stored zero points


class _Weights(JsonFile):
    num_bits: int = 8
    type: str = "int"
    strategy: str | None = None
    group_size: int | None = None
    symmetric: bool = True
    block_structure: list[int] | None = None
    actorder: str | bool | None = None


class _Group(JsonFile):
    weights: _Weights | None = None
    format: str | None = None


class _Config(JsonFile):
    """The keys of all methods together; each uses some."""

    quant_method: str | None = None
    format: str | None = None
    config_groups: dict[str, _Group] | None = None
    bits: int | None = None
    group_size: int | None = None
    desc_act: bool = False
    checkpoint_format: str = "gptq"
    zero_point: bool = True
    version: str = "gemm"
    fmt: str = "e4m3"
    weight_block_size: list[int] | None = None


def read_quantization(values: Mapping[str, Any], name: str) -> StoredQuantization | None:
    """None for a checkpoint that is not quantised. Raises ModelError for what is not read. `name` is the file's."""
    key = next((key for key in KEYS if values.get(key) is not None), None)
    if key is None:
        return None
    shown = f"{name} sets {key} to {reprlib.repr(values[key])}"
    if not isinstance(values[key], dict):
        raise ModelError(f"{shown}, which is not an object; {_READ}")
    config = validate(_Config, values[key], f"{key} in {name}")
    method = _METHODS.get(config.quant_method or "")
    found = method(config) if method is not None else None
    if found is None or (found.layout in ("packed", "gptq", "awq") and found.group not in (None, *GROUPS)):
        raise ModelError(f"{shown}, a layout that is not read; {_READ}")
    return found


def _gptq(config: _Config) -> StoredQuantization | None:
    if config.bits != 4 or config.desc_act or config.checkpoint_format not in ("gptq", "gptq_v2"):
        return None
    offset = 1 if config.checkpoint_format == "gptq" else 0
    return StoredQuantization("gptq", _group(config.group_size), is_symmetric=False, zero_offset=offset)


def _awq(config: _Config) -> StoredQuantization | None:
    if config.bits != 4 or not config.zero_point or config.version.lower() != "gemm":
        return None
    return StoredQuantization("awq", _group(config.group_size), is_symmetric=False)


def _fp8(config: _Config) -> StoredQuantization | None:
    if config.fmt != "e4m3" or config.weight_block_size not in (None, [BLOCK, BLOCK]):
        return None
    return StoredQuantization("scaled") if config.weight_block_size is None else StoredQuantization("blocks", BLOCK)


def _compressed(config: _Config) -> StoredQuantization | None:
    groups = list((config.config_groups or {}).values())
    if len(groups) != 1 or groups[0].weights is None:
        return None
    w, format = groups[0].weights, groups[0].format or config.format
    is_ordered = w.actorder in (None, False, "weight", "static")  # each group's columns are neighbours
    if format == "pack-quantized" and (w.num_bits, w.type) == (4, "int") and is_ordered:
        if w.strategy == "channel":
            return StoredQuantization("packed", None, w.symmetric)
        return StoredQuantization("packed", w.group_size, w.symmetric) if w.strategy == "group" else None
    is_float = format in ("float-quantized", "naive-quantized") and (w.num_bits, w.type) == (8, "float")
    is_int = format in ("int-quantized", "naive-quantized") and (w.num_bits, w.type) == (8, "int")
    if is_float and w.strategy == "block" and w.block_structure == [BLOCK, BLOCK]:
        return StoredQuantization("blocks", BLOCK)
    if (is_float or is_int) and w.symmetric and w.strategy in ("tensor", "channel"):
        return StoredQuantization("scaled")
    return None


def _group(size: int | None) -> int | None:
    return None if size in (None, -1) else size


_METHODS: dict[str, Callable[[_Config], StoredQuantization | None]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
}

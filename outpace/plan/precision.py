"""Number formats of weights and cache: bytes per weight, and the arithmetic that a product in them uses.

A quantised checkpoint keeps embeddings and output head in bfloat16. Outpace, where it rounds published weights as it
loads them, takes the output head to 8 bits too, and of tied embeddings makes a copy for it. A GGUF type covers all
matrices; the mixes, such as Q4_K_M, are given by the bits per weight of llama.cpp's own table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outpace.errors import UsageError, suggestion
from outpace.models.gguf_header import BLOCK_SIZES

Arithmetic = Literal["bf16", "fp8", "int8"]
FLOAT_BYTES = 2.0  # bfloat16 and float16


@dataclass(frozen=True, slots=True)
class Precision:
    name: str
    bytes_per_weight: float  # of a layer's matrices, scales included
    nominal_bytes: float  # as articles count: without scales
    outer_bytes: float = FLOAT_BYTES  # of embeddings and output head
    arithmetic: Arithmetic = "bf16"  # weights of other formats are converted before the product
    rounded_head_bytes: float = 0.0  # of an output head that Outpace rounds as it loads; 0: it cannot make this format

    def __str__(self) -> str:
        return self.name


def _grouped(bits: int, group: int, scale_bits: int, zero_bits: int = 0) -> float:
    """Bytes per weight with a scale, and perhaps a zero point, for every group of weights."""
    return (bits + (scale_bits + zero_bits) / group) / 8


def _gguf(name: str, bits: float) -> Precision:
    return Precision(name, bits / 8, bits / 8, bits / 8, "int8")


_TYPES = {"f32": 0, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20}
# Bits per weight of whole files: llama.cpp, tools/quantize/README.md, Llama 3.1 8B.
_MIXES = {
    "q2_k": 3.1593, "q3_k_s": 3.6429, "q3_k_m": 3.9960, "q3_k_l": 4.2979, "iq4_xs": 4.4597, "q4_k_s": 4.6672,
    "q4_k_m": 4.8944, "q5_k_s": 5.5704, "q5_k_m": 5.7036, "q6_k": 6.5633,
}  # fmt: skip
_CHANNEL = 4096  # weights that share a scale, in formats with one per output row of a large model
_BYTE = _grouped(8, _CHANNEL, 32)

PRECISIONS: dict[str, Precision] = {
    each.name: each
    for each in (
        Precision("fp32", 4.0, 4.0, 4.0),
        Precision("bf16", FLOAT_BYTES, FLOAT_BYTES),
        Precision("fp16", FLOAT_BYTES, FLOAT_BYTES),
        Precision("fp8", _BYTE, 1.0, arithmetic="fp8", rounded_head_bytes=_BYTE),
        Precision("int8", _BYTE, 1.0, arithmetic="int8", rounded_head_bytes=_BYTE),
        Precision("int4", _grouped(4, 128, 16, 4), 0.5),  # checkpoints of AWQ and GPTQ: groups of 128
        Precision("int4_g32", _grouped(4, 32, 16), 0.5, rounded_head_bytes=_BYTE),  # as Outpace rounds
        Precision("int4_g128", _grouped(4, 128, 16), 0.5, rounded_head_bytes=_BYTE),
        Precision("mxfp4", _grouped(4, 32, 8), 0.5),  # groups of 32 with one byte
        *(_gguf(name, 8 * BLOCK_SIZES[kind][1] / BLOCK_SIZES[kind][0]) for name, kind in _TYPES.items()),
        *(_gguf(name, bits) for name, bits in _MIXES.items()),
    )
}
_ALIASES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "f16": "fp16",
    "fp8_e4m3": "fp8", "w8a8": "int8", "w8a16": "int8", "awq": "int4", "gptq": "int4", "w4a16": "int4", "nf4": "int4",
    "int4_128": "int4_g128",
    "q4_k": "q4_k_m", "q5_k": "q5_k_m", "q3_k": "q3_k_m",
}  # fmt: skip
ROUNDED = {"int4": "int4_g32", "int4-128": "int4_g128", "int8": "int8", "fp8": "fp8"}
"""What Outpace can round weights to as it loads them: the format, by its name in `--quantization`."""
# GPTQ-Int8 is int8: of several words the last counts.
_IN_NAMES = {
    "awq": "int4", "gptq": "int4", "int4": "int4", "4bit": "int4", "fp8": "fp8", "int8": "int8", "8bit": "int8",
    "bf16": "bf16", "fp16": "fp16",
}  # fmt: skip


def precision(name: str) -> Precision:
    """The format of that name. Raises UsageError with the known ones."""
    wanted = name.lower().replace("-", "_")
    found = PRECISIONS.get(_ALIASES.get(wanted, wanted))
    if found is None:
        hint = suggestion(wanted, [*PRECISIONS, *_ALIASES])
        raise UsageError(
            f"there is no precision {name!r}; choose from {', '.join(PRECISIONS)}{f'; {hint}' * bool(hint)}"
        )
    return found


def named_precision(model: str) -> str | None:
    """The format that the name of a model ends in, as of Qwen2.5-7B-Instruct-AWQ; None if it names none."""
    words = model.lower().removesuffix(".gguf").replace(".", "-").split("-")
    found = [_IN_NAMES.get(word, word) for word in words if word in _IN_NAMES or word in _MIXES or word in _TYPES]
    return found[-1] if found else None


def cache_bytes(name: str) -> float:
    """Bytes per element of the cache."""
    sizes = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp32": 4.0}
    if name not in sizes:
        raise UsageError(f"the cache cannot be kept in {name!r}; choose from {', '.join(sizes)}")
    return sizes[name]

"""Reads the header of a GGUF file: its metadata, its tensors, and whether the file is complete.

It reads no tensor data and skips arrays, such as the vocabulary. The backend decides whether it supports the
architecture. The file is not trusted: every length is checked against the mapped bytes before use, and the
header size is bounded, so a malicious header costs a few seconds at most and ends in a ModelError.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from outpace.errors import ModelError

Scalar = int | float | bool | str

# Real headers stay under 50 MB (a 262k-token vocabulary, its merges and a copy of tokenizer.json), 300 keys
# and 5,000 tensors. Beyond these bounds a header is damaged or malicious.
MAX_HEADER_BYTES = 128 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32

# ggml tensor type -> (elements in a block, bytes in a block)
BLOCK_SIZES: dict[int, tuple[int, int]] = {
    0: (1, 4),  # F32
    1: (1, 2),  # F16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    9: (32, 40),  # Q8_1
    10: (256, 84),  # Q2_K
    11: (256, 110),  # Q3_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    15: (256, 292),  # Q8_K
    16: (256, 66),  # IQ2_XXS
    17: (256, 74),  # IQ2_XS
    18: (256, 98),  # IQ3_XXS
    19: (256, 50),  # IQ1_S
    20: (32, 18),  # IQ4_NL
    21: (256, 110),  # IQ3_S
    22: (256, 82),  # IQ2_S
    23: (256, 136),  # IQ4_XS
    24: (1, 1),  # I8
    25: (1, 2),  # I16
    26: (1, 4),  # I32
    27: (1, 8),  # I64
    28: (1, 8),  # F64
    29: (256, 56),  # IQ1_M
    30: (1, 2),  # BF16
    34: (256, 54),  # TQ1_0
    35: (256, 66),  # TQ2_0
    39: (32, 17),  # MXFP4
    40: (64, 36),  # NVFP4
    41: (128, 18),  # Q1_0
}

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    kind: struct.Struct(code)
    for kind, code in {
        0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
    }.items()
}  # fmt: skip

_OTHER_FORMATS = {
    b"PK\x03\x04": "a zip archive, such as a PyTorch checkpoint",
    b"\x80\x02": "a Python pickle",
    b"\x1f\x8b": "a gzip archive",
    b"version https://git-lfs": "a Git LFS pointer in place of the file itself",
    b"<": "a web page",
    b"tjgg": "a GGML file from before GGUF",
    b"fmgg": "a GGML file from before GGUF",
    b"lmgg": "a GGML file from before GGUF",
    b"\0\0\0\0": "blank space reserved by an unfinished download",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]  # ggml's order: the contiguous dimension first
    type: int
    offset: int  # from the start of the tensor data
    num_bytes: int | None  # None: a type newer than BLOCK_SIZES


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    version: int
    architecture: str  # empty if the file has none
    metadata: Mapping[str, Scalar]  # without arrays
    tensors: tuple[TensorInfo, ...]
    data_offset: int  # where the tensor data starts, from the beginning of the file
    expected_size: int | None  # where the last tensor ends; None if a tensor's type is unknown

    @property
    def num_tensors(self) -> int:
        return len(self.tensors)


def read_header(path: Path) -> GGUFHeader:
    """Read the header of a complete GGUF file; raise ModelError for any other file."""
    with _mapped(path) as reader:
        header = _parse(reader)
    if header.expected_size is not None and reader.size < header.expected_size:
        raise ModelError(
            f"{path} is truncated: its header promises {header.expected_size:,} bytes but it has {reader.size:,}; "
            "download or copy it again"
        )
    return header


def read_strings(path: Path, wanted: str) -> list[bytes]:
    """The array of strings under the key `wanted`, such as the vocabulary; empty if there is none."""
    with _mapped(path) as reader:
        _, num_keys = reader.u64(), reader.u64()
        for _ in range(min(num_keys, MAX_KEYS)):
            if reader.string() == wanted:
                return _string_array(reader)
            _skip_value(reader)
    return []


@contextmanager
def _mapped(path: Path) -> Iterator[_Reader]:
    """Mapped, not read: skipping a vocabulary touches only its own pages."""
    try:
        with path.open("rb") as file:
            start = file.read(24)
            size = file.seek(0, 2)
            _check_start(path, start, size)
            with mmap.mmap(file.fileno(), min(size, MAX_HEADER_BYTES), access=mmap.ACCESS_READ) as data:
                yield _Reader(path, data, size)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}; check its permissions") from error


def _skip_value(reader: _Reader) -> None:
    kind = reader.u32()
    if kind == _STRING:
        reader.string()
    elif kind == _ARRAY:
        reader.skip_array()
    elif kind in _NUMBERS:
        reader.skip(_NUMBERS[kind].size)
    else:
        reader.fail(f"a value of type {kind}, which GGUF does not have")


def _string_array(reader: _Reader) -> list[bytes]:
    if reader.u32() != _ARRAY or reader.u32() != _STRING:
        return []
    count = reader.u64()
    begin = reader.pos
    reader.skip_strings(count)  # checks every length
    data, pos, length_at = reader.data[begin : reader.pos], 0, _U64.unpack_from
    found = []
    for _ in range(count):
        end = pos + 8 + length_at(data, pos)[0]
        found.append(data[pos + 8 : end])
        pos = end
    return found


def _check_start(path: Path, start: bytes, size: int) -> None:
    if size == 0:
        raise ModelError(f"{path} is empty; download or copy it again")
    if not start.startswith(b"GGUF"):
        raise ModelError(f"{path} is not a GGUF file ({_describe(start)}); name the model's GGUF file instead")
    if size < 24:
        raise ModelError(f"{path} is truncated: it ends after {size} bytes, in its header; download it again")
    version = _U32.unpack_from(start, 4)[0]
    if version & 0xFFFF == 0 and version:  # a small number in the wrong byte order
        raise ModelError(f"{path} is a big-endian GGUF, which Outpace cannot read; get the little-endian one")
    if version not in (2, 3):
        remedy = "convert the model again with a current converter" if version < 2 else "update Outpace"
        raise ModelError(f"{path} is GGUF version {version}, but Outpace reads versions 2 and 3; {remedy}")


def _describe(start: bytes) -> str:
    if start[8:9] == b"{" and start[6:8] == b"\0\0":  # a JSON header after its own length
        return "it looks like safetensors"
    for magic, name in _OTHER_FORMATS.items():
        if start.startswith(magic):
            return f"it looks like {name}"
    return f"it starts with {start[:4]!r}"


class _Reader:
    """A cursor that never passes the end of the mapped header."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path = path
        self.data = data
        self.size = size
        self.limit = len(data)
        self.pos = 8  # after magic and version
        self.place = "the counts"  # what is being read, for error messages

    def fail(self, cause: str) -> NoReturn:
        raise ModelError(f"{self.path} is damaged: {cause} (in {self.place}); download or copy it again")

    def need(self, num_bytes: int) -> None:
        if num_bytes > self.limit - self.pos:
            if self.limit == self.size:
                self.fail("its header runs past the end of the file")
            self.fail(f"its header exceeds {self.limit >> 20} MiB")

    def skip(self, num_bytes: int) -> None:
        self.need(num_bytes)
        self.pos += num_bytes

    def number(self, form: struct.Struct) -> int | float | bool:
        self.need(form.size)
        value: int | float | bool = form.unpack_from(self.data, self.pos)[0]
        self.pos += form.size
        return value

    def u32(self) -> int:
        return int(self.number(_U32))

    def u64(self) -> int:
        return int(self.number(_U64))

    def string(self) -> str:
        length = self.u64()
        self.need(length)
        self.pos += length
        return self.data[self.pos - length : self.pos].decode("utf-8", errors="replace")

    def skip_strings(self, count: int) -> None:
        """Skip `count` strings. The loop is inlined because most of the time for a header is spent here."""
        self.need(8 * count)
        pos, last, data, length_at = self.pos, self.limit - 8, self.data, _U64.unpack_from
        for _ in range(count):
            if pos > last:
                break
            pos += 8 + length_at(data, pos)[0]
        else:
            if pos <= self.limit:
                self.pos = pos
                return
        self.need(self.limit + 1)  # a string runs past the end: fail as need() does

    def skip_array(self) -> None:
        kind, count = self.u32(), self.u64()
        if kind == _STRING:
            self.skip_strings(count)
        elif kind in _NUMBERS:
            self.skip(count * _NUMBERS[kind].size)
        else:
            self.fail(f"an array of type {kind}, which GGUF does not have or llama.cpp does not read")


def _parse(reader: _Reader) -> GGUFHeader:
    num_tensors, num_keys = reader.u64(), reader.u64()
    if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
        reader.fail(f"it claims {num_tensors:,} tensors and {num_keys:,} keys")
    metadata: dict[str, Scalar] = {}
    for i in range(num_keys):
        reader.place = f"key {i + 1} of {num_keys}"
        _read_key(reader, metadata)
    reader.place = "its metadata"
    architecture = metadata.get("general.architecture", "")
    if not isinstance(architecture, str):
        reader.fail(f"its general.architecture is {architecture!r}, not a name")
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        reader.fail(f"its general.alignment is {alignment!r}, not a power of two")
    tensors = []
    for i in range(num_tensors):
        reader.place = f"tensor {i + 1} of {num_tensors}"
        tensors.append(_read_tensor(reader))
    data_offset = -(-reader.pos // alignment) * alignment
    return GGUFHeader(
        version=_U32.unpack_from(reader.data, 4)[0],
        architecture=architecture,
        metadata=metadata,
        tensors=tuple(tensors),
        data_offset=data_offset,
        expected_size=_expected_size(tensors, reader.pos, data_offset),
    )


def _read_key(reader: _Reader, metadata: dict[str, Scalar]) -> None:
    key = reader.string()
    kind = reader.u32()
    if kind == _STRING:
        metadata[key] = reader.string()
    elif kind == _ARRAY:
        reader.skip_array()
    elif kind in _NUMBERS:
        metadata[key] = reader.number(_NUMBERS[kind])
    else:
        reader.fail(f"a value of type {kind}, which GGUF does not have")


def _read_tensor(reader: _Reader) -> TensorInfo:
    name = reader.string()
    num_dims = reader.u32()
    if num_dims > MAX_DIMS:
        reader.fail(f"a tensor with {num_dims} dimensions")
    shape = tuple(reader.u64() for _ in range(num_dims))
    kind, offset = reader.u32(), reader.u64()
    if kind not in BLOCK_SIZES:
        return TensorInfo(name, shape, kind, offset, None)
    elements, size = BLOCK_SIZES[kind]
    row = shape[0] if shape else 1
    if row % elements:
        reader.fail(f"a row of {row} elements in a format that packs them by {elements}")
    return TensorInfo(name, shape, kind, offset, row // elements * size * math.prod(shape[1:]))


def _expected_size(tensors: list[TensorInfo], header_end: int, start: int) -> int | None:
    """Where the last tensor ends. Files often have padding after it, which is never read."""
    end = header_end
    for tensor in tensors:
        if tensor.num_bytes is None:
            return None
        end = max(end, start + tensor.offset + tensor.num_bytes)
    return end

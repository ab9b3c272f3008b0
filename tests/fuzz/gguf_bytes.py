"""Reads a GGUF file into parts that can be changed one by one, and writes them without checking anything."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

STRING, ARRAY, UINT32, FLOAT32 = 8, 9, 4, 6
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


@dataclass(slots=True)
class Value:
    kind: int
    data: bytes = b""  # a number as packed, a text without its length
    element: int = 0  # of an array
    items: list[bytes] = field(default_factory=list)
    claimed: int | None = None  # a count or length that is not the true one

    def packed(self) -> bytes:
        if self.kind == STRING:
            return _with_length(self.data, self.claimed)
        if self.kind != ARRAY:
            return self.data
        count = len(self.items) if self.claimed is None else self.claimed
        items = [_with_length(item) if self.element == STRING else item for item in self.items]
        return struct.pack("<IQ", self.element, count) + b"".join(items)


@dataclass(slots=True)
class Tensor:
    name: bytes
    shape: list[int]
    kind: int
    offset: int


@dataclass(slots=True)
class RawGGUF:
    keys: list[tuple[bytes, Value]]
    tensors: list[Tensor]
    data: bytes
    version: int = 3

    def set(self, key: str, value: Value) -> RawGGUF:
        """Replace a key, or add it."""
        name = key.encode()
        self.keys = [pair for pair in self.keys if pair[0] != name] + [(name, value)]
        return self

    def get(self, key: str) -> Value:
        return dict(self.keys)[key.encode()]

    def write(self, path: Path) -> Path:
        parts = [b"GGUF", struct.pack("<IQQ", self.version, len(self.tensors), len(self.keys))]
        for name, value in self.keys:
            parts += [_with_length(name), struct.pack("<I", value.kind), value.packed()]
        for tensor in self.tensors:
            shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
            parts += [_with_length(tensor.name), shape, struct.pack("<IQ", tensor.kind, tensor.offset)]
        header = b"".join(parts)
        path.write_bytes(header + b"\0" * (-len(header) % 32) + self.data)
        return path


def uint32(value: int) -> Value:
    return Value(UINT32, struct.pack("<I", value))


def float32(value: float) -> Value:
    return Value(FLOAT32, struct.pack("<f", value))


def text(value: str | bytes) -> Value:
    return Value(STRING, value.encode() if isinstance(value, str) else value)


def _with_length(data: bytes, claimed: int | None = None) -> bytes:
    return struct.pack("<Q", len(data) if claimed is None else claimed) + data


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> int:
        return int(struct.unpack(f"<{form}", self.take(struct.calcsize(form)))[0])

    def string(self) -> bytes:
        return self.take(self.number("Q"))

    def value(self) -> Value:
        kind = self.number("I")
        if kind == STRING:
            return Value(kind, self.string())
        if kind != ARRAY:
            return Value(kind, self.take(SIZES[kind]))
        element, count = self.number("I"), self.number("Q")
        items = [self.string() if element == STRING else self.take(SIZES[element]) for _ in range(count)]
        return Value(kind, element=element, items=items)

    def tensor(self) -> Tensor:
        name, dims = self.string(), self.number("I")
        return Tensor(name, [self.number("Q") for _ in range(dims)], self.number("I"), self.number("Q"))


def read_gguf(path: Path) -> RawGGUF:
    """A file that the `gguf` package wrote."""
    cursor = _Cursor(path.read_bytes())
    cursor.take(4)
    version, num_tensors, num_keys = cursor.number("I"), cursor.number("Q"), cursor.number("Q")
    keys = [(cursor.string(), cursor.value()) for _ in range(num_keys)]
    tensors = [cursor.tensor() for _ in range(num_tensors)]
    cursor.take(-cursor.at % 32)
    return RawGGUF(keys, tensors, cursor.data[cursor.at :], version)

"""Identifies a model by the header of its file: sizes, tensor types, vocabulary and other metadata, without weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from outpace.errors import ModelError
from outpace.models.gguf_header import GGUFHeader, read_header

_DIGITS = 16


def fingerprint(path: Path) -> str:
    """Of a GGUF file, or of a Hugging Face folder."""
    return _folder_fingerprint(path) if path.is_dir() else gguf_fingerprint(path, read_header(path))


def gguf_fingerprint(path: Path, header: GGUFHeader) -> str:
    """The same for copies of a file; another for another quantisation, fine-tune with other metadata, or vocabulary."""
    digest = hashlib.sha256(str(path.stat().st_size).encode())
    with path.open("rb") as file:
        digest.update(file.read(header.data_offset))
    return digest.hexdigest()[:_DIGITS]


def _folder_fingerprint(folder: Path) -> str:
    """From config.json and the sizes and headers of all safetensors files."""
    try:
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        for path in sorted(folder.glob("*.safetensors")):
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(int.from_bytes(file.read(8), "little") % (1 << 28)))
    except OSError as error:
        raise ModelError(f"cannot read {folder}: {error.strerror or error}; check the path") from error
    return digest.hexdigest()[:_DIGITS]

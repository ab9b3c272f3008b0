"""Identifies a model by the header of its file: sizes, tensor types, vocabulary and other metadata, without weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from outpace.models.gguf_header import GGUFHeader

_DIGITS = 16


def gguf_fingerprint(path: Path, header: GGUFHeader) -> str:
    """The same for copies of a file; another for another quantisation, fine-tune with other metadata, or vocabulary."""
    digest = hashlib.sha256(str(path.stat().st_size).encode())
    with path.open("rb") as file:
        digest.update(file.read(header.data_offset))
    return digest.hexdigest()[:_DIGITS]

"""A tiny model on any backend, for tests of what all of them do."""

from __future__ import annotations

from pathlib import Path

import pytest

from outpace import LLM
from outpace.backends.native.library import load_library
from outpace.config import BackendName
from outpace.errors import BackendError


def tiny_llm(path: Path, backend: BackendName) -> LLM:
    """Skips the test where the backend is not installed."""
    if backend == "torch":
        pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")
    if backend == "native":
        try:
            load_library()
        except BackendError as error:
            pytest.skip(str(error))
    return LLM(str(path), backend=backend, device="cpu", max_context=256, max_step_tokens=64, threads=1)

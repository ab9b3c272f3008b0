"""What holds for every test."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Collections skip the almost one million objects of the libraries that test modules load: all live to the end."""
    gc.collect()
    gc.freeze()

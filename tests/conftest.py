"""What holds for every test."""

from __future__ import annotations

import gc
import os

import pytest

# One thread each for torch and for NumPy's BLAS, also in child processes: the arrays of tests are small, and threads
# that wait for each other in a loop cost more than they compute as soon as another process wants their core.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module", autouse=True)
def what_was_loaded_before_is_not_collected() -> None:
    """Garbage collections skip the more than one million objects of the libraries that earlier test files loaded."""
    gc.collect()
    gc.freeze()

"""What holds for every test."""

from __future__ import annotations

import gc
import os

# One thread each for torch and for NumPy's BLAS, also in child processes: the arrays of tests are small, and threads
# that wait for each other in a loop cost more than they compute as soon as another process wants their core.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish() -> None:
    """Collections skip the almost one million objects of the libraries that test modules load: all live to the end."""
    gc.collect()
    gc.freeze()

"""Wraps logits in a library's memory as an array, without a copy."""

from __future__ import annotations

import ctypes as c

import numpy as np
from numpy.typing import NDArray


def logits_at(address: int, num_rows: int, vocab_size: int) -> NDArray[np.float32]:
    """A read-only [num_rows, vocab_size] array, valid as long as that memory is. With no rows, `address` is unused."""
    if num_rows == 0:
        return np.empty((0, vocab_size), np.float32)
    memory = memoryview((c.c_float * (num_rows * vocab_size)).from_address(address)).cast("B")
    logits: NDArray[np.float32] = np.ndarray((num_rows, vocab_size), np.float32, memory)
    logits.flags.writeable = False
    return logits

"""What rank 0 tells the other ranks, through a pipe to each: how to start, then one small message per step.

A step's tokens, positions and pages are not in the message. They are one buffer on the device (`execution/step.py`),
which the forward pass gets from rank 0 first, so that a captured step includes it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import IO

from outpace.backends.base import Capacity
from outpace.backends.torch.execution.step import StepShape

_MESSAGE = struct.Struct("<8i")


class Kind(IntEnum):
    RUN = 0  # a step, kernel by kernel
    CAPTURE = 1  # a step as a graph, which is not run
    REPLAY = 2  # that graph
    COPY_PAGE = 3


@dataclass(frozen=True, slots=True)
class Setup:
    """What a rank needs to load its part of the model."""

    model: str
    rank: int
    size: int
    port: int  # of the store where the ranks meet
    device: str
    dtype: str
    capacity: Capacity
    num_pages: int
    threads: int
    quantization: str

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Setup:
        values = json.loads(line)
        return cls(**{**values, "capacity": Capacity(**values["capacity"])})


def encode(kind: Kind, numbers: Sequence[int]) -> bytes:
    return _MESSAGE.pack(kind, *numbers, *[0] * (7 - len(numbers)))


def numbers_of(shape: StepShape) -> tuple[int, ...]:
    s = shape
    sizes = s.num_tokens, s.num_rows, s.num_outputs, s.max_row_tokens, s.table_width
    return *sizes, int(s.is_packed), int(s.gives_peaks)


def receive(pipe: IO[bytes]) -> tuple[Kind, list[int]] | None:
    """The next message; None if rank 0 has closed the pipe, or is gone."""
    content = pipe.read(_MESSAGE.size)
    if len(content) < _MESSAGE.size:
        return None
    kind, *numbers = _MESSAGE.unpack(content)
    return Kind(kind), numbers


def shape_of(numbers: Sequence[int]) -> StepShape:
    num_tokens, num_rows, num_outputs, max_row_tokens, table_width, is_packed, gives_peaks = numbers
    return StepShape(num_tokens, num_rows, num_outputs, max_row_tokens, table_width, bool(is_packed), bool(gives_peaks))

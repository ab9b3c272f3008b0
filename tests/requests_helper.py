"""Requests for tests that need only their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, cast

from outpace.config import SamplingParams
from outpace.core import Request

_ids = count()


def make_request(prompt: Sequence[int], output: Sequence[int] = ()) -> Request:
    """A request that has already emitted `output`, with a unique id, as in an engine."""
    return Request(
        id=next(_ids),
        params=SamplingParams(),
        prompt=list(prompt),
        seed=0,
        shaper=cast(Any, None),
        writer=cast(Any, None),
        max_length=10**6,
        tokens=[*prompt, *output],
    )

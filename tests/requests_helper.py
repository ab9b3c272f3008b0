"""Requests for tests that need their tokens and nothing else of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, cast

from outpace.config import SamplingParams
from outpace.core import Request

_ids = count()


def make_request(prompt: Sequence[int], output: Sequence[int] = ()) -> Request:
    """A request that has already said `output`. Its id is its own, as an engine's would be."""
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

"""Compiles functions with torch.compile on a GPU; elsewhere they run as they are.

Shapes are static: every batch has the same number of tokens (`batches.py`). What cannot be compiled runs uncompiled,
only slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
_MOST_VARIANTS = 64  # of one function: with and without gradients, one per number of drafted tokens


def compiled(function: Callable[P, R], *, enabled: bool) -> Callable[P, R]:
    if not enabled:
        return function
    import torch._dynamo

    torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.recompile_limit = _MOST_VARIANTS
    found: Callable[P, R] = torch.compile(function, dynamic=False)
    return found


def compiled_for_training(function: Callable[P, R], *, enabled: bool) -> Callable[P, R]:
    """Uncompiled where no gradients are wanted: an evaluation takes seconds, and compiling another variant longer."""
    fast = compiled(function, enabled=enabled)

    def choose(*args: P.args, **kwargs: P.kwargs) -> R:
        return (fast if torch.is_grad_enabled() else function)(*args, **kwargs)

    return choose

"""How many kernels Triton has compiled in this process, or loaded from its cache on disk: steps that wait for one take
long, once."""

from __future__ import annotations

from typing import Any

_num_compiled = 0


def num_compiled() -> int:
    return _num_compiled


def watch() -> None:
    """Count from now on, beside whatever else listens."""
    from triton import knobs

    before = knobs.compilation.listener
    if getattr(before, "counts", False):
        return

    def listener(**event: Any) -> None:
        global _num_compiled
        _num_compiled += 1
        if before is not None:
            before(**event)

    listener.counts = True  # type: ignore[attr-defined]
    knobs.compilation.listener = listener

"""What our policy's own time is in the simulator: constants, so that a seed gives the same figures everywhere.

They are what `python -m benchmarks.policy_time` measured.
"""

from __future__ import annotations

# Seconds of a step, of each of its rows, and of each row with a lookup or a draft. `idle`: nothing was looked at;
# `decided`: something was, and the step is plain; `drafted`: drafts were chosen, and their verdicts learned.
_COLD = {  # where the CPU computes the model, and its weights pass through the caches between two steps
    "idle": (15e-6, 0.0, 0.0),
    "decided": (90e-6, 7.5e-6, 23e-6),
    "drafted": (133e-6, 14e-6, 10e-6),
}
_WARM = {  # where a GPU does
    "idle": (2e-6, 0.0, 0.0),
    "decided": (22e-6, 4.8e-6, 19e-6),
    "drafted": (36e-6, 9.9e-6, 13e-6),
}


def policy_seconds(rows: int, num_touched: int, *, is_cold: bool, is_idle: bool, has_drafts: bool) -> float:
    """`num_touched` rows had something looked up or drafted for them."""
    did = "drafted" if has_drafts else "idle" if is_idle else "decided"
    step, row, touched = (_COLD if is_cold else _WARM)[did]
    return step + rows * row + num_touched * touched

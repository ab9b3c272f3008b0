"""What our policy's own time is in the simulator: constants, so that a seed gives the same figures everywhere.

They are what `python -m benchmarks.policy_time` measured.
"""

from __future__ import annotations

# Seconds of a step, of each of its rows, and of each row with a lookup or a draft. `idle`: nothing was looked at;
# `decided`: something was, and the step is plain; `drafted`: drafts were chosen, and their verdicts learned.
_COLD = {  # where the CPU computes the model, and its weights pass through the caches between two steps
    "idle": (10e-6, 0.0, 0.0),
    "decided": (77e-6, 4.0e-6, 11e-6),
    "drafted": (114e-6, 6.0e-6, 14e-6),
}
_WARM = {  # where a GPU does
    "idle": (3e-6, 0.0, 0.0),
    "decided": (25e-6, 1.0e-6, 7e-6),
    "drafted": (35e-6, 2.0e-6, 10e-6),
}


def policy_seconds(rows: int, num_touched: int, *, is_cold: bool, is_idle: bool, has_drafts: bool) -> float:
    """`num_touched` rows had something looked up or drafted for them."""
    did = "drafted" if has_drafts else "idle" if is_idle else "decided"
    step, row, touched = (_COLD if is_cold else _WARM)[did]
    return step + rows * row + num_touched * touched

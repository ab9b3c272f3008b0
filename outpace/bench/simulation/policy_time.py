"""The time that our policy takes in the simulator: constants, so that a seed gives the same figures everywhere.

They were measured with `python -m benchmarks.policy_time`.
"""

from __future__ import annotations

# Seconds per step, per row, and per row with a lookup or a draft. `idle`: the policy examined no request;
# `decided`: it examined some, and the step is plain; `drafted`: drafts were chosen, and their verdicts learned;
# `repeated`: an earlier plan was run again.
_COLD = {  # the CPU runs the model, so the weights displace the policy's data from the CPU caches between two steps
    "idle": (19e-6, 0.06e-6, 0.0),
    "decided": (119e-6, 3.1e-6, 19e-6),
    "drafted": (257e-6, 11e-6, 0.0),
    "repeated": (85e-6, 5.3e-6, 0.0),
}
_WARM = {  # a GPU runs the model, and learning from drafts overlaps with its work
    "idle": (4e-6, 0.09e-6, 0.0),
    "decided": (43e-6, 1.6e-6, 13e-6),
    "drafted": (80e-6, 5.9e-6, 0.0),
    "repeated": (8e-6, 1.3e-6, 0.0),
}


def policy_seconds(
    rows: int, num_touched: int, *, is_cold: bool, is_idle: bool, has_drafts: bool, is_repeated: bool = False
) -> float:
    """`num_touched` rows had a lookup or a draft."""
    did = "idle" if is_idle else "repeated" if is_repeated else "drafted" if has_drafts else "decided"
    step, row, touched = (_COLD if is_cold else _WARM)[did]
    return step + rows * row + num_touched * touched

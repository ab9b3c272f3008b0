"""The time that our policy takes in the simulator: constants, so that a seed gives the same figures everywhere.

They were measured with `python -m benchmarks.policy_time --rounds 3`, twice, on two quiet cores of an EPYC.
"""

from __future__ import annotations

# Seconds per step, per row, and per row with a lookup or a draft. `idle`: the policy examined no request;
# `decided`: it examined some, and the step is plain; `drafted`: drafts were chosen, and their verdicts learned;
# `repeated`: an earlier plan was run again.
_COLD = {  # the CPU runs the model, so the weights displace the policy's data from the CPU caches between two steps
    "idle": (12e-6, 0.02e-6, 0.0),
    "decided": (105e-6, 1.4e-6, 8.4e-6),
    "drafted": (209e-6, 0.0, 19e-6),
    "repeated": (46e-6, 4.0e-6, 0.0),
}
_WARM = {  # a GPU runs the model, and learning from drafts overlaps with its work
    "idle": (2.4e-6, 0.04e-6, 0.0),
    "decided": (27e-6, 1.0e-6, 6.9e-6),
    "drafted": (55e-6, 6.5e-6, 8.6e-6),
    "repeated": (3.5e-6, 0.38e-6, 0.0),
}


def policy_seconds(
    rows: int, num_touched: int, *, is_cold: bool, is_idle: bool, has_drafts: bool, is_repeated: bool = False
) -> float:
    """`num_touched` rows had a lookup or a draft."""
    did = "idle" if is_idle else "repeated" if is_repeated else "drafted" if has_drafts else "decided"
    step, row, touched = (_COLD if is_cold else _WARM)[did]
    return step + rows * row + num_touched * touched

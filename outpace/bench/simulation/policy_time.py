"""What our policy's own time is in the simulator: constants, so that a seed gives the same figures everywhere.

They are what `python -m benchmarks.policy_time` measured: seconds of a step, and of each of its rows.
"""

from __future__ import annotations

# fmt: off
_IDLE    = (11e-6, 0.0)      # nothing was looked at
_DECIDED = (118e-6, 2.7e-6)  # everything was, and the step is plain
_DRAFTED = (205e-6, 17e-6)   # drafts were chosen, and their verdicts learned
# fmt: on


def policy_seconds(rows: int, *, is_idle: bool, has_drafts: bool) -> float:
    step, row = _DRAFTED if has_drafts else _IDLE if is_idle else _DECIDED
    return step + rows * row

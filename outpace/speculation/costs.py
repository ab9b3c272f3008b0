"""What a step costs on this machine: measured at start, kept current by every step that runs.

A curve from the number of tokens in a forward pass to seconds. It answers two questions: what would plain decoding have
cost, and what does one more draft token cost.
"""

from __future__ import annotations

from bisect import bisect_left
from time import perf_counter

from outpace.backends.base import Runner
from outpace.core import Row, StepPlan

CALIBRATED_SIZES = (1, 2, 4, 8, 16)
_REPEATS = 3
_NEW_WEIGHT = 0.1  # of an observation against what is known; a machine's speed drifts, single steps are noisy


class CostCurve:
    def __init__(self, points: dict[int, float] | None = None) -> None:
        self._points = dict(points or {})

    @classmethod
    def measure(cls, runner: Runner) -> CostCurve:
        """A few forward passes of each size in a scratch sequence; the fastest of each counts, the rest is noise."""
        curve = cls()
        largest = min(runner.capacity.max_step_tokens, runner.capacity.max_context // 2)
        scratch = runner.capacity.max_sequences - 1
        plain = StepPlan([Row(scratch, 0, [0], 1)])
        _timed(runner, plain)  # the first pass pays for touching memory
        for size in [n for n in CALIBRATED_SIZES if n <= largest]:
            plan = StepPlan([Row(scratch, 0, [0] * size, size)])
            curve._points[size] = min(_timed(runner, plan) for _ in range(_REPEATS))
        return curve

    def observe(self, num_tokens: int, seconds: float) -> None:
        known = self._points.get(num_tokens)
        self._points[num_tokens] = seconds if known is None else known + _NEW_WEIGHT * (seconds - known)

    @property
    def is_known(self) -> bool:
        return bool(self._points)

    def seconds(self, num_tokens: int) -> float:
        """Straight lines between measured sizes; beyond them as the last line went, but never cheaper for more."""
        sizes = sorted(self._points)
        assert sizes, "nothing has been measured"
        right = bisect_left(sizes, num_tokens)
        if right < len(sizes) and (right == 0 or sizes[right] == num_tokens):
            return self._points[sizes[right]]
        if len(sizes) == 1:
            return self._points[sizes[0]]
        beyond = right == len(sizes)
        low, high = (sizes[-2], sizes[-1]) if beyond else (sizes[right - 1], sizes[right])
        slope = (self._points[high] - self._points[low]) / (high - low)
        if beyond:
            return self._points[high] + max(slope, 0.0) * (num_tokens - high)
        return self._points[low] + slope * (num_tokens - low)


def _timed(runner: Runner, plan: StepPlan) -> float:
    try:
        begin = perf_counter()
        runner.forward(plan)
        return perf_counter() - begin
    finally:
        runner.free(plan.rows[0].seq)

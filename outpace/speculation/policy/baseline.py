"""Keeps the current time of a plain decoding step: the calibrated value, corrected by observed plain steps.

Every gain and loss is measured against this baseline. Steps with drafts correct the cost curves but not the baseline,
because their delays need not occur in plain steps.
"""

from __future__ import annotations

from outpace.core import StepStats
from outpace.speculation.costs.curves import Costs
from outpace.speculation.policy.planner import Situation

_LEARNING_RATE = 0.05  # of a plain step; higher for the first ones
_CALIBRATION_WEIGHT = 2  # calibration counts as this many observed plain steps
_MAX_SURPRISE = 1.2  # limits the effect of a single disturbed step
DISTURBED = 1.5  # times the usual time of a pass or a draft; the excess is not charged


class Baseline:
    def __init__(self, costs: Costs, *, begins_ahead: bool) -> None:
        self._costs = costs
        self._begins_ahead = begins_ahead  # consecutive plain steps overlap with the host; a single one does not
        self._seen: dict[int, tuple[float, float, int]] = {}  # by rows: seconds of a plain step, context, count
        self._num_idle = 0  # idle steps begun ahead since the last decision
        self._idle_seconds = 0.0  # their total time

    def ratio(self, rows: int, context: float) -> float:
        """The time of a plain step relative to the sum of its costs."""
        return self.plain_seconds(rows, context) / self._costs.plain_seconds(rows, context)

    def plain_seconds(self, rows: int, context: float) -> float:
        expected = self._costs.plain_seconds(rows, context)
        seconds, seen_context, _ = self._seen.setdefault(rows, (expected, context, 0))
        if seen_context == context:
            return seconds
        return seconds * expected / self._costs.plain_seconds(rows, seen_context)

    def observe(self, rows: int, context: float, stats: StepStats) -> None:
        """Learn from a plain step, without the time of deciding."""
        seconds = stats.total_seconds - stats.deciding_seconds
        if self._begins_ahead and not stats.hidden_seconds:
            seconds = min(seconds, self.plain_seconds(rows, context))  # a single one waits for the host
        self._update(rows, context, seconds)

    def _update(self, rows: int, context: float, seconds: float) -> None:
        expected = self.plain_seconds(rows, context)
        num_seen = self._seen[rows][2]
        surprise = max(1.0 / _MAX_SURPRISE, min(_MAX_SURPRISE, seconds / expected))
        expected *= surprise ** max(_LEARNING_RATE, 1.0 / (_CALIBRATION_WEIGHT + num_seen))
        self._seen[rows] = expected, context, num_seen + 1

    def decoding_seconds(self, situation: Situation, num_drafted: int, stats: StepStats) -> tuple[float, float]:
        """The time of a step without the share that the cost curve assigns to prefill, and the part of it that was due
        to a disturbance."""
        seconds = stats.schedule_seconds + stats.forward_seconds + stats.verify_seconds
        rows, target, context = situation.rows, self._costs.target, situation.context
        usual = target.seconds(rows, rows + num_drafted, context)
        if stats.num_prefill_tokens:
            whole = target.seconds(rows, rows + num_drafted + stats.num_prefill_tokens, context)
            seconds *= usual / whole
            usual = whole
        excused = max(0.0, stats.forward_seconds - DISTURBED * usual) if num_drafted else 0.0
        return stats.speculation_seconds + stats.draft_seconds + seconds, excused

    def idle(self, stats: StepStats) -> None:
        """Add a plain step without a decision."""
        if stats.hidden_seconds and not stats.num_prefill_tokens and not stats.had_one_time_work:
            self._num_idle += 1
            self._idle_seconds += stats.total_seconds

    def end_idling(self, rows: int, context: float) -> None:
        """Learn from the idle steps of this size that were begun ahead."""
        if self._num_idle:
            self._update(rows, context, self._idle_seconds / self._num_idle)
            self._num_idle, self._idle_seconds = 0, 0.0

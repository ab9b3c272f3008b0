"""What plain decoding takes now: what calibration said of it, corrected by plain steps as they are seen.

Every gain and loss is measured by this. Steps with drafts move the cost curve and not the baseline: what is slow in
them need not be so in plain ones.
"""

from __future__ import annotations

from outpace.core import StepStats
from outpace.speculation.costs.curves import Costs
from outpace.speculation.policy.planner import Situation

_RATE = 0.05
_CALIBRATED = 2  # what calibration said of a plain step counts as so many
_MOST_SURPRISE = 1.2  # what one that was disturbed says at most
_DISTURBED = 1.5  # times what a pass should have taken: something else was done in that time


class Baseline:
    def __init__(self, costs: Costs, *, begins_ahead: bool) -> None:
        self._costs = costs
        self._begins_ahead = begins_ahead  # plain steps on end, before each is asked for: a lone one takes longer
        self._seen: dict[int, tuple[float, float, int]] = {}  # by rows: seconds of a plain step, its context, how many
        self._num_begun = 0  # idle steps that a device began ahead, since they were last looked at,
        self._begun_seconds = 0.0  # and what they took

    def ratio(self, rows: int, context: float) -> float:
        """A plain step of so many rows over what the costs of its parts say."""
        return self.plain_seconds(rows, context) / self._costs.plain_seconds(rows, context)

    def plain_seconds(self, rows: int, context: float) -> float:
        believed = self._costs.plain_seconds(rows, context)
        seconds, its_context, _ = self._seen.setdefault(rows, (believed, context, 0))
        if its_context == context:
            return seconds
        return seconds * believed / self._costs.plain_seconds(rows, its_context)

    def observe(self, rows: int, context: float, stats: StepStats) -> None:
        """A plain step, beside what deciding took in it."""
        seconds = stats.total_seconds - stats.deciding_seconds
        if self._begins_ahead and not stats.hidden_seconds:
            seconds = min(seconds, self.plain_seconds(rows, context))  # a lone one waits for the host
        self._follow(rows, context, seconds)

    def _follow(self, rows: int, context: float, seconds: float) -> None:
        believed = self.plain_seconds(rows, context)
        num_seen = self._seen[rows][2]
        surprise = max(1.0 / _MOST_SURPRISE, min(_MOST_SURPRISE, seconds / believed))
        believed *= surprise ** max(_RATE, 1.0 / (_CALIBRATED + num_seen))
        self._seen[rows] = believed, context, num_seen + 1

    def decoding_seconds(self, situation: Situation, num_drafted: int, stats: StepStats) -> tuple[float, float]:
        """What a step took, less the share of it that the cost curve gives to prompts; and what of that was due to a
        disturbance. Prompts would have been read in any case."""
        seconds = stats.schedule_seconds + stats.forward_seconds + stats.verify_seconds
        rows, target, context = situation.rows, self._costs.target, situation.context
        usual = target.seconds(rows, rows + num_drafted, context)
        if stats.num_prefill_tokens:
            whole = target.seconds(rows, rows + num_drafted + stats.num_prefill_tokens, context)
            seconds *= usual / whole
            usual = whole
        excused = max(0.0, stats.forward_seconds - _DISTURBED * usual) if num_drafted else 0.0
        return stats.speculation_seconds + stats.draft_seconds + seconds, excused

    def idle(self, stats: StepStats) -> None:
        """A plain step in which nothing was looked at."""
        if stats.hidden_seconds and not stats.num_prefill_tokens and not stats.has_prepared:
            self._num_begun += 1
            self._begun_seconds += stats.total_seconds

    def end_idling(self, rows: int, context: float) -> None:
        """Steps of this size were idle: what those took that a device began ahead says what a plain one takes."""
        if self._num_begun:
            self._follow(rows, context, self._begun_seconds / self._num_begun)
            self._num_begun, self._begun_seconds = 0, 0.0

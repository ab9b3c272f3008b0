"""What was decided for a step, and all that has to be remembered of it until its outcome is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outpace.core import Draft, Request
from outpace.speculation.policy.planner import Plan, Situation
from outpace.speculation.policy.state import Choice
from outpace.speculation.policy.trace import StepTrace


@dataclass(slots=True)
class Decision:
    step: int
    requests: Sequence[Request]
    choices: list[Choice]
    reason: str = "nothing to weigh"
    is_idle: bool = False  # nothing was looked at
    situation: Situation | None = None  # None where nobody could be decided about
    found: Mapping[int, Sequence[Draft]] = field(default_factory=dict)  # what was looked up, by row
    plan: Plan | None = None
    is_trial: bool = False  # of a model, for fewer requests than would pay
    is_refused: bool = False  # there was a faster plan, and no budget covered it
    trace: StepTrace | None = None

    @property
    def has_drafts(self) -> bool:
        return any(choice.depth for choice in self.choices)

    @property
    def is_weighed(self) -> bool:
        """Something was decided, and what comes of it bears upon the next decision."""
        return self.situation is not None and bool(self.situation.auto)

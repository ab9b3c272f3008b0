"""The decision for one step, or for several. It keeps what learning needs once a step's outcome is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outpace.core import Draft, Request
from outpace.speculation.policy.planner import Plan, Situation
from outpace.speculation.policy.state import Choice
from outpace.speculation.policy.times import Seen
from outpace.speculation.policy.trace import StepTrace


@dataclass(slots=True)
class Decision:
    step: int
    requests: Sequence[Request]
    choices: list[Choice]
    reason: str = "nothing to weigh"
    is_repeated: bool = False  # an earlier decision stands: no plans were compared
    situation: Situation | None = None  # None if there was nothing to decide
    found: Mapping[int, Sequence[Draft]] = field(default_factory=dict)  # looked-up drafts, by row
    plan: Plan | None = None
    is_refused: bool = False  # a plan was faster than plain, but budgets did not cover it
    seen: Seen = field(default_factory=Seen)
    trace: StepTrace | None = None

    @property
    def has_drafts(self) -> bool:
        return any(choice.depth for choice in self.choices)

    @property
    def is_idle(self) -> bool:
        """Plain, without comparing any plans."""
        return self.is_repeated and self.plan is None

    @property
    def is_weighed(self) -> bool:
        """The policy chose for at least one request, so the outcome affects later decisions."""
        return self.situation is not None and bool(self.situation.auto) and not self.is_idle

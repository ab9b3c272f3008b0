"""Keeps why a step was decided as it was: the reason, what was expected and what happened.

Traces are kept only on request: by `outpace run --trace`, and while somebody looks at the server's page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from outpace.core import Verdict

if TYPE_CHECKING:
    from outpace.speculation.policy.decision import Decision


@dataclass(slots=True)
class RowTrace:
    request_id: int
    method: str
    depth: int
    expected_tokens: float
    num_drafted: int = 0  # one after another: of a tree, its depth
    num_accepted: int = 0
    num_emitted: int = 0

    def as_text(self) -> str:
        if not self.depth:
            return f"plain, {self.num_emitted} emitted"
        result = f"{self.num_accepted} accepted, {self.num_emitted} emitted"
        return f"{self.method} {self.depth}: {result}, {self.expected_tokens:.1f} expected"


@dataclass(slots=True)
class StepTrace:
    reason: str
    plain_seconds: float  # expected time of a plain step of this batch
    rows: list[RowTrace] = field(default_factory=list)
    seconds: float | None = None  # actual time of this step
    step: int = 0  # its number, of those in which requests might speculate

    @classmethod
    def of(cls, decision: Decision, max_rows: int | None = None) -> StepTrace:
        """`max_rows`: keep so many requests at most, because each takes time."""
        rows = [
            RowTrace(request.id, choice.method, choice.depth, choice.expected)
            for request, choice in zip(decision.requests[:max_rows], decision.choices[:max_rows], strict=True)
        ]
        plain_seconds = decision.situation.plain_seconds if decision.situation is not None else 0.0
        return cls(decision.reason, plain_seconds, rows, step=decision.step)

    def add_outcomes(self, verdicts: Sequence[Verdict]) -> None:
        for row, verdict in zip(self.rows, verdicts, strict=False):
            row.num_drafted, row.num_accepted = verdict.depth, verdict.num_accepted
            row.num_emitted = len(verdict.tokens)

    def as_line(self) -> str:
        """For a terminal: time, reason, and each request's draft with its expected and actual tokens."""
        rows = [row.as_text() for row in self.rows]
        took = f"{1e3 * self.seconds:.2f} ms" if self.seconds is not None else "not timed"
        plain = f" (plain {1e3 * self.plain_seconds:.2f} ms)" if self.plain_seconds else ""
        return f"{took}{plain}; {self.reason}: {' | '.join(rows)}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

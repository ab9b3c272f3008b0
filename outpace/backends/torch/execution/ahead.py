"""Verification that begins behind a draft, before the host has seen what was drafted.

Drafted tokens are on the device already, and what the target will be asked is known: each request's last token and the
draft. So the target's step is started right behind the draft model's, fed from there; while the device works through
both, the host receives the draft and makes its plan. A plan that is another than expected is run as usual, and what was
begun is dropped: its places in the cache lie behind what the sequences hold and are written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from torch import Tensor

from outpace.backends.base import DraftTask
from outpace.backends.torch.execution.launched import Launched
from outpace.backends.torch.execution.step import DRAFTED
from outpace.backends.torch.sampling.draws import Fetch, mode_for
from outpace.core import Case, Request, Row, StepPlan

if TYPE_CHECKING:
    from outpace.backends.torch.runner import TorchRunner


@dataclass(slots=True)
class Ahead:
    """A step under way that nobody has asked for yet."""

    rows: list[Row]  # as the plan will have them; what is drafted comes with `expect`
    launched: Launched
    fetch: Fetch
    since: float = 0.0  # when the draft was done, and the device went on with this
    _said: list[list[int]] = field(default_factory=list)

    def expect(self, said: list[list[int]]) -> None:
        """What was drafted, now that the host knows."""
        self._said, self.since = said, perf_counter()

    def is_in(self, plan: StepPlan, cases: Sequence[Case]) -> dict[int, Case] | None:
        """Where in a plan its rows are, in order, and their cases; None if one is missing or another."""
        waiting = iter(cases)
        planned = {row.seq: (i, row, next(waiting)) for i, row in enumerate(plan.rows) if row.num_logits}
        found = {}
        for row, said in zip(self.rows, self._said, strict=True):
            i, asked, case = planned.get(row.seq, (-1, None, None))
            if (
                case is None
                or asked is None
                or asked.start != row.start
                or list(asked.tokens) != [row.tokens[0], *said]
            ):
                return None
            found[i] = case
        return found


def begin(runner: TorchRunner, tasks: Sequence[DraftTask], drawn: Tensor) -> Ahead | None:
    """Start verifying what the tasks say, `drawn` [depth, 2, rows] on the device; None where that is not possible."""
    rows = []
    for task in tasks:
        request, count = task.request, 1 + task.depth
        if not _can_wait(request) or not runner.holds(request.seq, request.num_computed):
            return None
        assert request.seq is not None
        if request.num_computed + count > runner.capacity.max_context:
            return None
        rows.append(Row(request.seq, request.num_computed, [request.tokens[-1]] + [DRAFTED] * task.depth, count))
    plan, mode = StepPlan(rows), mode_for(task.request for task in tasks)
    if not runner.is_prepared(plan, mode) or not all(runner.try_reserve(row.seq, len(row.tokens)) for row in rows):
        return None
    launched = runner.launch(plan, drawn[:, 0])
    requests = [task.request for task in tasks for _ in range(1 + task.depth)]
    positions = [len(task.request.tokens) + i for task in tasks for i in range(1 + task.depth)]
    return Ahead(rows, launched, launched.drawn(mode, requests, positions).fetch())


def _can_wait(request: Request) -> bool:
    """Whether its row is one token and a draft, and nobody will ask for more than what is drawn from it."""
    return len(request.tokens) == request.num_computed + 1 and speaks_for_itself(request)


def speaks_for_itself(request: Request) -> bool:
    """Its tokens are decided on the device by the target's logits, and nobody asks for those."""
    params = request.params
    return params.logprobs is None and not request.shaper.may_adjust and not params.speculation.is_lossy

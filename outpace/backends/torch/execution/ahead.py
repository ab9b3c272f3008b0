"""Starts verification right after a draft, before the host has received the drafted tokens.

The drafted tokens are already on the device, and the target's rows are known: each request's last token and its draft.
So the target's step is launched directly after the draft model's and takes its tokens on the device. Meanwhile the host
receives the draft and makes its plan. If the plan differs from the expected one, it runs as usual and the early step is
dropped: its cache entries lie after the sequence's tokens, and the next step overwrites them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter
from typing import TYPE_CHECKING

from outpace.backends.base import DraftTask
from outpace.backends.torch.execution.drafting import LoopRun
from outpace.backends.torch.execution.following import Verified
from outpace.backends.torch.execution.launched import Launched
from outpace.backends.torch.execution.step import DRAFTED
from outpace.backends.torch.model.model import Model
from outpace.backends.torch.sampling.draws import Draws, Fetch, Mode, mode_for
from outpace.backends.torch.sampling.rejection import KeptDraft, Rejection
from outpace.core import Case, Request, Row, StepPlan

if TYPE_CHECKING:
    from outpace.backends.torch.runner import TorchRunner


@dataclass(slots=True)
class Ahead:
    """A verification step that runs before its plan arrives."""

    rows: list[Row]  # as in the expected plan; `expect` supplies the drafted tokens
    launched: Launched
    draws: Draws
    fetch: Fetch
    rejection: Rejection
    verified: Verified  # what it verifies, for a draft that follows it
    since: float = 0.0  # when the draft was done and the device started this step
    _drafted: list[list[int]] = field(default_factory=list)

    def expect(self, drafted: list[list[int]]) -> None:
        """The host has received the drafted tokens."""
        self._drafted, self.since = drafted, perf_counter()

    def is_in(self, plan: StepPlan, cases: Sequence[Case]) -> dict[int, Case] | None:
        """Its rows' indexes in the plan, with their cases; None if a row is missing or differs."""
        waiting = iter(cases)
        planned = {row.seq: (i, row, next(waiting)) for i, row in enumerate(plan.rows) if row.num_logits}
        found = {}
        for row, drafted in zip(self.rows, self._drafted, strict=True):
            i, asked, case = planned.get(row.seq, (-1, None, None))
            if (
                case is None
                or asked is None
                or asked.start != row.start
                or list(asked.tokens) != [row.tokens[0], *drafted]
            ):
                return None
            found[i] = case
        return found


def begin(runner: TorchRunner, tasks: Sequence[DraftTask], run: LoopRun) -> Ahead | None:
    """Start to verify the drafts of a loop that still runs; None if that is not possible."""
    rows = []
    for task in tasks:
        request, count = task.request, 1 + task.depth
        if not _can_wait(request) or not runner.holds(request.seq, request.num_computed):
            return None
        assert request.seq is not None
        if request.num_computed + count > runner.capacity.max_context:
            return None
        rows.append(Row(request.seq, request.num_computed, [request.tokens[-1]] + [DRAFTED] * task.depth, count))
    plan, mode = StepPlan(rows), drawing_mode([task.request for task in tasks], runner.model)
    if not runner.is_prepared(plan, mode) or not all(runner.try_reserve(row.seq, len(row.tokens)) for row in rows):
        return None
    drafted = run.tokens()
    launched = runner.launch(plan, drafted, gives_peaks=mode == "peaks")
    requests = [task.request for task in tasks for _ in range(1 + task.depth)]
    positions = [len(task.request.tokens) + i for task in tasks for i in range(1 + task.depth)]
    # Rejection decides every sampled request, by distributions: their own tokens are drawn only where it is not used.
    needs_tokens = run.loop.kept is None or any(task.request.params.is_greedy for task in tasks)
    draws = launched.drawn(mode, requests, positions, needs_tokens=needs_tokens)
    fetch = draws.fetch()
    begins = list(accumulate([1 + task.depth for task in tasks], initial=0))
    rejecting = None
    if run.loop.kept is not None:
        kept = [
            KeptDraft(task.request, launched.lines[begin : begin + 1 + task.depth], row)
            for task, begin, row in zip(tasks, begins, run.rows, strict=False)
        ]
        rejecting = launched.rejection(draws, run.loop.kept, kept, drafted)
    verified = Verified(
        launched.lines[begins[:-1]].tolist(),
        [task.depth for task in tasks],
        drafted,
        draws.on_device,
        rejecting.found if rejecting is not None else None,
        runner.vocab_size,
    )
    return Ahead(rows, launched, draws, fetch, Rejection(list(range(len(tasks))), rejecting), verified)


def _can_wait(request: Request) -> bool:
    """Whether its row is one token and a draft, and only the drawn tokens are needed."""
    return len(request.tokens) == request.num_computed + 1 and needs_only_tokens(request)


def drawing_mode(requests: Sequence[Request], model: Model) -> Mode:
    """How a step's tokens are drawn. A sharded model gives greedy requests no logits, unless one needs them."""
    mode = mode_for(requests)
    return "peaks" if mode == "greedy" and model.can_give_peaks and all(map(needs_only_tokens, requests)) else mode


def needs_only_tokens(request: Request) -> bool:
    """The device decides its tokens from the target's logits, and the host does not need the logits."""
    params = request.params
    return params.logprobs is None and not request.shaper.may_adjust and not params.speculation.is_lossy

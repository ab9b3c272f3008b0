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

import numpy as np
from numpy.typing import NDArray

from outpace.backends.base import DraftTask
from outpace.backends.torch.execution.drafting import LoopRun
from outpace.backends.torch.execution.following import Verified
from outpace.backends.torch.execution.launched import Launched
from outpace.backends.torch.execution.step import DRAFTED
from outpace.backends.torch.execution.tree_drafting import TreeRun
from outpace.backends.torch.model.model import Model
from outpace.backends.torch.sampling.draws import Draws, Fetch, Mode, mode_for
from outpace.backends.torch.sampling.rejection import KeptDraft, Rejection
from outpace.core import Case, Request, Row, StepPlan
from outpace.decoding.tree import Tree

if TYPE_CHECKING:
    from outpace.backends.torch.runner import TorchRunner


@dataclass(frozen=True, slots=True)
class Verifying:
    """A row of a verification: the token that the cache lacks, and the draft after it."""

    request: Request
    seq: int
    start: int  # position of that token
    token: int
    depth: int  # drafted tokens
    tree: Tree | None = None

    @classmethod
    def of(cls, task: DraftTask) -> Verifying:
        request = task.request
        assert request.seq is not None
        return cls(request, request.seq, request.num_computed, request.tokens[-1], task.depth, task.tree)

    @property
    def num_tokens(self) -> int:
        return 1 + self.depth

    @property
    def positions(self) -> Sequence[int]:
        """Of the tokens that are drawn."""
        if self.tree is None:
            return range(self.start + 1, self.start + 1 + self.num_tokens)
        return [self.start + 1 + offset for offset in (0, *self.tree.depths)]

    @property
    def row(self) -> Row:
        tokens = [self.token] + [DRAFTED] * self.depth
        return Row(self.seq, self.start, tokens, self.num_tokens, tree=self.tree)


@dataclass(slots=True)
class Ahead:
    """A verification step that runs before its plan arrives."""

    rows: list[Row]  # as in the expected plan; `expect` supplies the drafted tokens
    starts: dict[int, int]  # of the rows, by sequence
    launched: Launched
    draws: Draws
    fetch: Fetch
    rejection: Rejection
    verified: Verified  # what it verifies, for a draft that follows it
    draws_tokens: bool  # the target's own; else rejection decides all rows
    moved: dict[int, int] = field(default_factory=dict)
    """By sequence: the tokens before a tree whose accepted path is moved on the device, behind this step."""
    since: float = 0.0  # when the draft was done and the device started this step
    _drafted: list[list[int]] = field(default_factory=list)

    def expect(self, drafted: list[list[int]]) -> None:
        """The host has received the drafted tokens."""
        self._drafted, self.since = drafted, perf_counter()

    def needs_logits(self, exact: NDArray[np.int32]) -> bool:
        """Whether the host must verify some of its rows again. `exact`: whether each of its tokens is; waits for it."""
        return not self.rejection.is_exact or (self.draws_tokens and not exact.all())

    def is_in(self, plan: StepPlan, cases: Sequence[Case]) -> dict[int, Case] | None:
        """Its rows' indexes in the plan, with their cases; None if a row is missing or differs."""
        if not self._drafted:
            return None
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
                or asked.tree != row.tree
            ):
                return None
            found[i] = case
        return found


def begin(runner: TorchRunner, verifying: Sequence[Verifying], run: LoopRun | TreeRun) -> Ahead | None:
    """Start to verify the drafts of a loop that still runs; None if that is not possible."""
    ends = [each.start + each.num_tokens for each in verifying]
    if max(ends) > runner.capacity.max_context or not all(needs_only_tokens(each.request) for each in verifying):
        return None
    rows = [each.row for each in verifying]
    requests = [each.request for each in verifying]
    plan, mode = StepPlan(rows), drawing_mode(requests, runner.model)
    if not runner.is_prepared(plan, mode):
        return None
    if not all(runner.try_reserve_until(row.seq, end) for row, end in zip(rows, ends, strict=True)):
        return None
    drafted = run.tokens()
    launched = runner.launch(plan, drafted, gives_peaks=mode == "peaks")
    # Rejection decides every sampled request, by distributions: their own tokens are drawn only where it is not used.
    needs_tokens = run.loop.kept is None or any(request.params.is_greedy for request in requests)
    draws = launched.drawn(
        mode,
        [each.request for each in verifying for _ in range(each.num_tokens)],
        [position for each in verifying for position in each.positions],
        needs_tokens=needs_tokens,
    )
    fetch = draws.fetch()
    begins = list(accumulate([each.num_tokens for each in verifying], initial=0))
    rejecting = None
    if run.loop.kept is not None:
        kept = [
            KeptDraft(each.request, each.start + 1, launched.lines[begin : begin + each.num_tokens], row)
            for each, begin, row in zip(verifying, begins, run.rows, strict=False)
        ]
        rejecting = launched.rejection(draws, run.loop.kept, kept, drafted)
    verified = Verified(
        launched.lines[begins[:-1]].tolist(),
        [each.depth for each in verifying],
        drafted,
        draws.on_device,
        rejecting.found if rejecting is not None else None,
        runner.vocab_size,
    )
    starts = {row.seq: row.start for row in rows}
    rejection = Rejection(list(range(len(rows))), rejecting)
    return Ahead(rows, starts, launched, draws, fetch, rejection, verified, needs_tokens)


def drawing_mode(requests: Sequence[Request], model: Model) -> Mode:
    """How a step's tokens are drawn. A sharded model gives greedy requests no logits, unless one needs them."""
    mode = mode_for(requests)
    return "peaks" if mode == "greedy" and model.can_give_peaks and all(map(needs_only_tokens, requests)) else mode


def needs_only_tokens(request: Request) -> bool:
    """The device decides its tokens from the target's logits, and the host does not need the logits."""
    params = request.params
    return params.logprobs is None and not request.shaper.may_adjust and not params.speculation.is_lossy

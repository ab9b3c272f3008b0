"""Drafts with a head on the device: all passes of a draft in captured graphs, verified before the host has seen it.

A first pass takes the few tokens that the last step emitted. A row that lacks more is caught up by ordinary passes
first, and the loop starts from their logits and states. Tokens are drawn as those of a draft model are
(`execution/drafting.py`). Behind each verification the next draft begins, while the host decides whether it is wanted
(`execution/following.py`). Its verification begins as soon as the host knows how many tokens were accepted, before it
commits them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from outpace.backends.base import USUAL_UNCACHED, DraftedTokens, DraftTask, HeadTask
from outpace.backends.torch.execution.ahead import Ahead, Verifying
from outpace.backends.torch.execution.drafting import LoopRun
from outpace.backends.torch.execution.executor import FollowingDraft
from outpace.backends.torch.execution.graphs import Graphs
from outpace.backends.torch.execution.head_passes import HeadPasses
from outpace.backends.torch.execution.pages import PAGE_TOKENS
from outpace.backends.torch.execution.tree_drafting import TreeLoops, TreeRun
from outpace.backends.torch.model.head import HeadLoop, HeadModel
from outpace.backends.torch.sampling.draws import mode_for
from outpace.core import Case, MeasuredAcceptance, Request, Row
from outpace.decoding.tree import Tree
from outpace.kv.entries import HeadEntries

if TYPE_CHECKING:
    from outpace.backends.torch.runner import TorchRunner


_RATE = 1 / 16  # of the moving average of wanted drafts
_LEAST_WANTED = 0.5  # a draft that is not wanted delays the next step by what it takes longer than the host


@dataclass(frozen=True, slots=True)
class _NextDraft:
    """A draft that began behind a verification, or could have begun there."""

    run: LoopRun | TreeRun | None  # None: it was not begun
    rows: dict[int, int]  # by sequence: the row of the loop
    requests: list[Request]
    starts: list[int]  # the first position that each row feeds
    tables: NDArray[np.int32]  # the pages of each row
    depth: int
    num_steps: int  # of the runner, before the verification
    tree: Tree | None = None

    def find(self, drafts: Sequence[DraftTask], num_steps: int) -> list[int] | None:
        """The rows of these drafts; None if it is not the draft that they ask for."""
        rows = [self.rows.get(draft.row.seq, -1) for draft in drafts]
        is_asked = num_steps == self.num_steps + 1 and all(
            row >= 0
            and draft.request is self.requests[row]
            and draft.row.start == self.starts[row]
            and draft.depth <= self.depth
            and draft.tree == self.tree
            for row, draft in zip(rows, drafts, strict=True)
        )
        return rows if is_asked else None


class TorchHead:
    stops_early = False

    def __init__(
        self, model: HeadModel, measured: MeasuredAcceptance | None, runner: TorchRunner, graphs: Graphs
    ) -> None:
        self.measured = measured
        self.has_trees = model.has_trees and runner.model.has_trees
        self._model = model
        self._runner = runner
        self.entries = HeadEntries(runner.capacity.max_sequences)
        self.size_bytes = model.weights.num_bytes
        self._logits = torch.empty(0, device=runner.device)
        self._loops = graphs.loops_of(self._loop_model)
        self._passes = HeadPasses(model, graphs)
        self._trees = TreeLoops(model, graphs)
        self.drafts_ahead = runner.device.type == "cuda"  # else nothing runs beside the host
        self._next: _NextDraft | None = None
        self._share_wanted = 1.0  # of drafts that began or could have begun behind a verification
        runner.executor.next_draft = self._foresee

    def _loop_model(self, num_rows: int) -> HeadLoop:
        if len(self._logits) < num_rows:
            most = max(num_rows, self._runner.capacity.max_sequences)
            self._logits = torch.full((most, self._runner.vocab_size), -torch.inf, device=self._runner.device)
        return HeadLoop(self._model, num_rows, self._logits)

    def num_uncached(self, seq: int, num_tokens: int) -> int:
        return self.entries.num_uncached(seq, num_tokens)

    def draft(self, tasks: Sequence[HeadTask]) -> list[DraftedTokens]:
        self._runner.check_open()
        drafts = [self._begun(task) for task in tasks]
        if drafts[0].tree is not None:
            return self._draft_trees(drafts, drafts[0].tree)
        executor, taken = self._runner.executor, self._take_next(drafts)
        assert not isinstance(taken, TreeRun)
        ahead = executor.verifies(drafts) if taken is not None else None
        run = taken or self._launch(drafts)
        if ahead is None:
            run.loop.keep()
            ahead = executor.begin_verifying(drafts, run)
        if ahead is not None and self.drafts_ahead:
            self._begin_next(drafts, ahead)
        drafted = run.fetch(drafts)
        if taken is not None:
            executor.foresight.learn_drafted(taken.seconds_behind())
        if ahead is not None:
            ahead.expect([each.tokens for each in drafted])
        return drafted

    def _begun(self, task: HeadTask) -> DraftTask:
        """The row that a draft begins with; its entries count as cached, and the draft has its pages."""
        request = task.request
        seq, length = request.seq, len(request.tokens)
        assert seq is not None and request.num_computed == length - 1, "only a decoding request has drafts"
        start = self.entries.take(seq, length)
        # A tree's entries lie after all of the text's, a chain's last token has none.
        self._runner.reserve(seq, length - 1, task.depth if task.tree is None else 1 + len(task.tree))
        row = Row(seq, start, request.tokens[start:], 1)
        return DraftTask(row, request, task.depth if task.tree is None else len(task.tree), task.tree)

    def _draft_trees(self, drafts: list[DraftTask], tree: Tree) -> list[DraftedTokens]:
        taken = self._take_next(drafts)
        run = taken if isinstance(taken, TreeRun) else self._launch_trees(drafts, tree)
        ahead = self._runner.executor.begin_verifying(drafts, run)
        if ahead is not None and self.drafts_ahead:
            self._begin_next_trees(drafts, tree, ahead)
        drafted = run.fetch(drafts)
        if ahead is not None:
            ahead.expect([each.tokens for each in drafted])
        return drafted

    def _launch_trees(self, drafts: list[DraftTask], tree: Tree) -> TreeRun:
        drafts, width = self._caught_up(drafts, tree.depth + 1)
        loop = self._trees.find(tree, drafts, width)
        loop.fill(drafts, self._runner.tables)
        return loop.launch()

    def _begin_next_trees(self, drafts: Sequence[DraftTask], tree: Tree, ahead: Ahead) -> None:
        """Begin the next trees behind the verification of these, for the same requests."""
        runner, requests = self._runner, [draft.request for draft in drafts]
        starts, seqs = [len(request.tokens) for request in requests], [draft.row.seq for draft in drafts]
        width, run = tree.depth + 1, None
        # The host may verify tokens again that a filter makes uncertain; then it moves what it accepts itself.
        is_sure = mode_for(requests) != "filtered"
        is_wanted = self._share_wanted >= _LEAST_WANTED and self._trees.is_prepared(tree, drafts, width)
        # What this verification appends, and the next draft's nodes.
        num_tokens = width + 1 + len(tree)
        has_room = max(starts) - 1 + num_tokens <= runner.capacity.max_context
        if is_sure and is_wanted and has_room and all(runner.try_reserve(seq, num_tokens) for seq in seqs):
            loop = self._trees.find(tree, drafts, width)
            loop.fill_following(drafts, runner.tables, ahead.verified)
            run = loop.launch(ahead.verified, runner.move)
            ahead.moved.update(zip(seqs, starts, strict=True))
        rows, tables = {seq: row for row, seq in enumerate(seqs)}, runner.tables[seqs]
        self._next = _NextDraft(run, rows, requests, starts, tables, len(tree), runner.executor.num_steps, tree)

    def _launch(self, drafts: list[DraftTask]) -> LoopRun:
        depth = max(draft.depth for draft in drafts)
        drafts, width = self._caught_up(drafts, depth + 1)
        loop = self._loops.find([draft.request for draft in drafts], width, depth)
        loop.fill(drafts, self._runner.tables)
        return loop.launch()

    def _take_next(self, drafts: Sequence[DraftTask]) -> LoopRun | TreeRun | None:
        """The draft that began behind the last verification, if it is the one that is wanted now."""
        before, self._next = self._next, None
        if before is None:
            return None
        rows = before.find(drafts, self._runner.executor.num_steps)
        self._share_wanted += _RATE * ((rows is not None) - self._share_wanted)
        if rows is None or before.run is None:
            return None
        run = before.run.only(rows)
        seqs = [draft.row.seq for draft in drafts]
        num_pages = 1 + max(len(draft.request.tokens) + before.depth for draft in drafts) // PAGE_TOKENS
        has_moved = (self._runner.tables[seqs, :num_pages] != before.tables[rows, :num_pages]).any()
        # The device has accepted what the host has, unless the host had to verify again.
        accepted, last = run.fed().tolist()
        tokens = [draft.row.tokens for draft in drafts]
        is_fed = accepted == [len(each) - 1 for each in tokens] and last == [each[-1] for each in tokens]
        return run if is_fed and not has_moved else None

    def _begin_next(self, drafts: Sequence[DraftTask], ahead: Ahead) -> None:
        """Begin the next draft behind the verification of these: as deep, for the same requests."""
        runner, requests = self._runner, [draft.request for draft in drafts]
        depth = max(draft.depth for draft in drafts)
        starts, seqs = [len(request.tokens) for request in requests], [draft.row.seq for draft in drafts]
        rows = {seq: row for row, seq in enumerate(seqs)}
        run = None
        is_wanted = self._share_wanted >= _LEAST_WANTED and self._loops.is_prepared(requests, depth + 1, depth)
        # As many tokens as this verification and the next one can append.
        num_tokens = 2 * (depth + 1)
        has_room = max(starts) - 1 + num_tokens <= runner.capacity.max_context
        if is_wanted and has_room and all(runner.try_reserve(seq, num_tokens) for seq in seqs):
            loop = self._loops.find(requests, depth + 1, depth)
            loop.fill_following(drafts, runner.tables, ahead.verified)
            run = loop.launch(ahead.verified)
        tables = runner.tables[seqs]
        self._next = _NextDraft(run, rows, requests, starts, tables, depth, runner.executor.num_steps)

    def _foresee(self, cases: Sequence[Case]) -> FollowingDraft | None:
        """The draft that began behind the verification of these cases, for all requests that do not end there."""
        before = self._next
        if (
            before is None
            or not isinstance(before.run, LoopRun)
            or self._runner.executor.num_steps != before.num_steps + 1
        ):
            return None
        rows = [before.rows.get(case.request.seq, -1) for case in cases if case.request.seq is not None]
        if sorted(rows) != list(range(len(before.rows))):
            return None
        accepted, last = before.run.only(rows).fed().tolist()
        verifying, going_on = list[Verifying](), list[int]()
        for case, row, num_accepted, token in zip(cases, rows, accepted, last, strict=True):
            request, start = case.request, before.starts[row] + num_accepted
            if request is not before.requests[row]:
                return None
            if _ends(request, start + 1, [*case.tokens[:num_accepted], token]):
                continue
            depth = min(before.depth, request.max_length - start - 2)  # at least one token is not drafted
            if depth < 1:
                return None  # its row will be plain
            assert request.seq is not None
            verifying.append(Verifying(request, request.seq, start, token, depth))
            going_on.append(row)
        return FollowingDraft(before.run.only(going_on), verifying, accepted, last) if verifying else None

    def truncate(self, seq: int, num_tokens: int) -> None:
        """Tokens of a sequence were removed."""
        self.entries.truncate(seq, num_tokens)
        if self._next is not None and self._next.run is not None and seq in self._next.rows:
            # The draft and its verification write to the pages after these tokens: they are the next ones to be taken
            # again.
            self._runner.try_reserve(seq, 1 + self._next.depth)

    def _caught_up(self, drafts: list[DraftTask], usual: int) -> tuple[list[DraftTask], int]:
        """With rows that a loop's first pass can take, and of how many tokens: `usual`, or some more after a few plain
        steps. Of longer rows, all tokens but the last are entered before."""
        longest = max(len(draft.row.tokens) for draft in drafts)
        if width := next((size for size in (usual, USUAL_UNCACHED) if size >= longest), 0):
            return drafts, width
        rows = [draft.row for draft in drafts]
        behind = [Row(row.seq, row.start, row.tokens[:-1], 1) for row in rows if len(row.tokens) > 1]
        for part in passes(behind, self._runner.capacity.max_step_tokens):
            self._passes.find(part).run(part, self._runner.tables)
        last = [Row(row.seq, row.start + len(row.tokens) - 1, row.tokens[-1:], 1) for row in rows]
        return [replace(draft, row=row) for draft, row in zip(drafts, last, strict=True)], usual


def _ends(request: Request, length: int, new: Sequence[int]) -> bool:
    """Whether a request ends with its `new` tokens, which make it `length` long, as far as they tell."""
    stop_ids = request.shaper.stop_ids
    return length >= request.max_length or bool(stop_ids.size and np.isin(new, stop_ids).any())


def passes(rows: Sequence[Row], limit: int) -> list[list[Row]]:
    """The rows in as few passes of at most `limit` tokens as possible; a long row goes on in the next."""
    found: list[list[Row]] = []
    room = 0
    for row in rows:
        at = 0
        while at < len(row.tokens):
            if not room:
                found.append([])
                room = limit
            tokens = row.tokens[at : at + room]
            found[-1].append(Row(row.seq, row.start + at, tokens, 1))
            at += len(tokens)
            room -= len(tokens)
    return found

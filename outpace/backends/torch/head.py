"""Drafts with a head on the device: all passes of a draft in captured graphs, verified before the host has seen it.

A first pass takes the few tokens that the last step emitted. A row that lacks more is caught up by ordinary passes
first, and the loop starts from their logits and states. Tokens are drawn as those of a draft model are
(`execution/drafting.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from outpace.backends.base import USUAL_UNCACHED, DraftedTokens, DraftTask, HeadTask
from outpace.backends.torch.execution.graphs import Graphs
from outpace.backends.torch.execution.head_passes import HeadPasses
from outpace.backends.torch.model.head import HeadLoop, HeadModel
from outpace.core import MeasuredAcceptance, Row
from outpace.kv.entries import HeadEntries

if TYPE_CHECKING:
    from outpace.backends.torch.runner import TorchRunner


class TorchHead:
    stops_early = False

    def __init__(
        self, model: HeadModel, measured: MeasuredAcceptance | None, runner: TorchRunner, graphs: Graphs
    ) -> None:
        self.measured = measured
        self._model = model
        self._runner = runner
        self.entries = HeadEntries(runner.capacity.max_sequences)
        self.size_bytes = model.weights.num_bytes
        self._logits = torch.empty(0, device=runner.device)
        self._loops = graphs.loops_of(self._loop_model)
        self._passes = HeadPasses(model, graphs)

    def _loop_model(self, num_rows: int) -> HeadLoop:
        if len(self._logits) < num_rows:
            most = max(num_rows, self._runner.capacity.max_sequences)
            self._logits = torch.full((most, self._runner.vocab_size), -torch.inf, device=self._runner.device)
        return HeadLoop(self._model, num_rows, self._logits)

    def num_uncached(self, seq: int, num_tokens: int) -> int:
        return self.entries.num_uncached(seq, num_tokens)

    def draft(self, tasks: Sequence[HeadTask]) -> list[DraftedTokens]:
        self._runner.check_open()
        drafts: list[DraftTask] = []
        for task in tasks:
            request = task.request
            seq, length = request.seq, len(request.tokens)
            assert seq is not None and request.num_computed == length - 1, "only a decoding request has drafts"
            start = self.entries.take(seq, length)
            self._runner.reserve(seq, length - 1, task.depth)
            drafts.append(DraftTask(Row(seq, start, request.tokens[start:], 1), request, task.depth))
        depth = max(task.depth for task in tasks)
        longest = max(len(draft.row.tokens) for draft in drafts)
        # After a draft as deep as this one, or after a deeper one or some plain steps; else rows catch up first.
        width = next((size for size in (depth + 1, USUAL_UNCACHED) if size >= longest), 0)
        loop = self._loops.find([task.request for task in tasks], width, depth)
        if not width:
            assert isinstance(loop.model, HeadLoop)
            self._catch_up([draft.row for draft in drafts], loop.model)
        loop.fill(drafts, self._runner.tables)
        loop.launch()
        ahead = self._runner.executor.begin_verifying(drafts, loop.drawn)
        drafted = loop.fetch(drafts)
        if ahead is not None:
            ahead.expect([each.tokens for each in drafted])
        return drafted

    def _catch_up(self, rows: Sequence[Row], loop: HeadLoop) -> None:
        """Compute the rows' entries; the logits and states after their last tokens start the loop."""
        logits = self._loops.first_logits(len(rows), self._runner.device)
        logits.fill_(-torch.inf)
        ids = self._model.weights.ids
        for part in passes(rows, self._runner.capacity.max_step_tokens):
            found, states = self._pass([row for _, row in part])
            # A row that goes on in the next pass is overwritten there.
            places = torch.tensor([i for i, _ in part], device=self._runner.device)
            logits[places[:, None], ids] = found
            loop.states[places] = states

    def _pass(self, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
        return self._passes.find(rows).run(rows, self._runner.tables)


def passes(rows: Sequence[Row], limit: int) -> list[list[tuple[int, Row]]]:
    """The rows, by index, in as few passes of at most `limit` tokens as possible; a long row goes on in the next."""
    found: list[list[tuple[int, Row]]] = []
    room = 0
    for i, row in enumerate(rows):
        at = 0
        while at < len(row.tokens):
            if not room:
                found.append([])
                room = limit
            tokens = row.tokens[at : at + room]
            found[-1].append((i, Row(row.seq, row.start + at, tokens, 1)))
            at += len(tokens)
            room -= len(tokens)
    return found

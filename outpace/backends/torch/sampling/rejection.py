"""Verifies a step's independent drafts by rejection: on the device, behind the step, captured on a GPU.

Its many small operations would take longer to launch one by one than the draft took. The tokens may still be on the
device, so a draft that the host has not seen can be verified, and the next draft can begin from the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.backends.torch.execution.capturing import Pool, captured
from outpace.backends.torch.sampling import acceptance
from outpace.backends.torch.sampling.acceptance import Drafts
from outpace.backends.torch.sampling.draws import Draws
from outpace.core import Request, Verdict


@dataclass(frozen=True, slots=True)
class KeptDraft:
    """One draft whose distributions are kept."""

    request: Request
    anchor: int  # position of its first token
    lines: NDArray[np.integer]  # of the target's logits: one per drafted token, and one more
    source: int  # its row in the kept distributions

    @property
    def length(self) -> int:
        return len(self.lines) - 1


class RejectionPass:
    """Verifies drafts of fixed places; what it found is valid until it runs again."""

    def __init__(self, draws: Draws, kept: Tensor, *, mixes_rules: bool, pool: Pool | None) -> None:
        """`kept` [rows, depth, vocab]: what drafts were drawn from. `mixes_rules`: some are verified token by token."""
        on_gpu = kept.is_cuda
        self._draws, self._kept, self._mixes_rules = draws, kept, mixes_rules
        self.num_rows, self.depth = rows, depth = kept.shape[:2]
        shapes = [(rows, depth), (rows, depth + 1), (rows, 2 * depth + 1), (rows,), (rows,), (rows,)]
        sizes = [int(np.prod(shape)) for shape in shapes]
        self._host_words = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=on_gpu)
        self._words = self._host_words.to(kept.device)

        def parts(words: Tensor) -> list[Tensor]:
            return [part.view(shape) for part, shape in zip(words.split(sizes), shapes, strict=True)]

        self._host = [part.numpy() for part in parts(self._host_words)]
        self._tokens, self._lines, self._noise, self._lengths, self._sources, self._by_token = parts(self._words)
        self.found = torch.zeros((rows, 3), dtype=torch.int64, device=kept.device)
        """Accepted tokens, the target's own token after them, and whether both are exact."""
        self._on_host = torch.zeros((rows, 3), dtype=torch.int64, pin_memory=on_gpu)
        self._event: Any | None = torch.cuda.Event() if on_gpu else None
        self._graph: torch.cuda.CUDAGraph | None = None
        if pool is not None:
            self._graph, _ = captured(self._run, pool, kept.device)

    @torch.inference_mode()
    def _run(self) -> None:
        uniform = self._noise.view(torch.float64)
        drafts = Drafts(
            self._tokens, self._lengths, self._lines, uniform[:, : self.depth], uniform[:, self.depth :]
        )  # fmt: skip
        target_probs, exact = self._draws.distributions()
        if self._kept.is_cuda and not self._mixes_rules:
            from outpace.backends.torch.kernels import rejecting

            rejecting.verify_block(drafts, self._kept, self._sources, target_probs, exact, self.found)
            return
        draft_probs = self._kept.index_select(0, self._sources)
        verdicts = acceptance.verify_block(drafts, draft_probs, target_probs)
        if self._mixes_rules:
            verdicts = acceptance.reject(drafts, draft_probs, target_probs).where(self._by_token != 0, verdicts)
        is_exact = (exact[self._lines] != 0).all(dim=-1).long()
        torch.stack([verdicts.num_accepted, verdicts.final_token, is_exact], dim=1, out=self.found)

    @torch.inference_mode()
    def launch(self, drafts: Sequence[KeptDraft], tokens: Sequence[Sequence[int]] | Tensor) -> None:
        """Start to verify; `tokens` [depth, rows] if they are on the device. The step's draws are launched."""
        host_tokens, lines, noise, lengths, sources, by_token = self._host
        used = slice(0, len(drafts))
        lengths.fill(0)
        for row, draft in enumerate(drafts):
            lines[row, : draft.length + 1] = draft.lines
            lines[row, draft.length + 1 :] = draft.lines[-1]
        lengths[used] = [draft.length for draft in drafts]
        sources[used] = [draft.source for draft in drafts]
        requests = [draft.request for draft in drafts]
        anchors = [draft.anchor for draft in drafts]
        noise[used] = acceptance.noise_of([request.seed for request in requests], anchors, self.depth).view(np.int64)
        by_token[used] = [request.params.speculation.acceptance == "rejection" for request in requests]
        if not isinstance(tokens, Tensor):
            for row, each in enumerate(tokens):
                host_tokens[row, : len(each)] = each
        self._words.copy_(self._host_words, non_blocking=True)
        if isinstance(tokens, Tensor):
            depth = min(len(tokens), self.depth)
            self._tokens[used, :depth] = tokens[:depth, used].T
        if self._graph is not None:
            self._graph.replay()
        else:
            self._run()
        self._on_host.copy_(self.found, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def wait(self) -> list[list[int]]:
        """What was found, by row; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        found: list[list[int]] = self._on_host.tolist()
        return found


@dataclass(slots=True)
class Rejection:
    """The launched verification of a step's independent drafts."""

    indexes: list[int]  # of its cases, in the order of its rows
    running: RejectionPass | None
    _found: list[list[int]] | None = None

    def wait(self) -> list[list[int]]:
        """What was found, by row; once this was called, the pass may run again."""
        if self._found is None:
            self._found = [] if self.running is None else self.running.wait()[: len(self.indexes)]
        return self._found

    @property
    def is_exact(self) -> bool:
        return all(is_exact for _, _, is_exact in self.wait())

    def verdicts(self, drafted: Sequence[Sequence[int]]) -> dict[int, Verdict]:
        """By case, for those that it decides; waits for the device. `drafted`: the tokens of all cases."""
        return {
            i: Verdict([*drafted[i][:accepted], final], len(drafted[i]), accepted)
            for i, (accepted, final, is_exact) in zip(self.indexes, self.wait(), strict=False)
            if is_exact
        }


def mixes_rules(requests: Sequence[Request]) -> bool:
    return any(request.params.speculation.acceptance == "rejection" for request in requests)

"""A launched step, and its logits on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.backends.torch.execution.graphs import Bucket
from outpace.backends.torch.sampling.draws import Draws, Mode
from outpace.backends.torch.sampling.rejection import KeptDraft, RejectionPass, mixes_rules
from outpace.core import Request


@dataclass(frozen=True, slots=True)
class Launched:
    """A launched step. Its logits are valid until the next step."""

    _given: Tensor  # logits, or peaks
    lines: NDArray[np.integer]  # indexes of the requested logits, in order
    device_lines: Tensor
    draws: Callable[[Mode], Draws]
    bucket: Bucket | None
    gives_peaks: bool = False

    @property
    def _logits(self) -> Tensor:
        if self.gives_peaks:
            raise RuntimeError("this step has no logits, because no request needed them")
        return self._given

    def __getitem__(self, lines: slice) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._logits.index_select(0, self.device_lines[lines]).cpu().numpy()
        return found

    def drawn(
        self, mode: Mode, requests: Sequence[Request], positions: Sequence[int], *, needs_tokens: bool = True
    ) -> Draws:
        """Draw a token from each line, for the request and the position of that line."""
        draws = self.draws(mode)
        draws.fill(self.lines, requests, positions)
        draws.launch(needs_tokens=needs_tokens)
        return draws

    def rejection(
        self, draws: Draws, kept: Tensor, drafts: Sequence[KeptDraft], tokens: Sequence[Sequence[int]] | Tensor
    ) -> RejectionPass:
        """Start to verify drafts against these logits, by the distributions `kept` that they were drawn from."""
        mixed = mixes_rules([draft.request for draft in drafts])
        if self.bucket is None:
            running = RejectionPass(draws, kept, mixes_rules=mixed, pool=None)
        else:
            running = self.bucket.rejection(draws, kept, mixes_rules=mixed)
        running.launch(drafts, tokens)
        return running

    def some(self, which: Sequence[int]) -> Tensor:
        """Logits of some of the requested lines, on the device."""
        logits = self._logits
        return logits.index_select(0, self.device_lines[torch.tensor(which, device=logits.device)])


class DiscardedLogits:
    """Stands for the logits of a step whose successor already runs."""

    def __getitem__(self, lines: slice) -> NDArray[np.float32]:
        raise RuntimeError("the logits of this step were not kept, because no request asked for them")

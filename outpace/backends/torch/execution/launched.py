"""A step under way on the device, and the logits it leaves there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.backends.torch.execution.graphs import Bucket
from outpace.backends.torch.sampling.draws import Draws, Mode
from outpace.core import Request


@dataclass(frozen=True, slots=True)
class Launched:
    """A step under way. Its logits are valid until the next one."""

    _logits: Tensor
    lines: NDArray[np.integer]  # those asked for, in order
    device_lines: Tensor
    draws: Callable[[Mode], Draws]
    bucket: Bucket | None

    def __getitem__(self, lines: slice) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._logits.index_select(0, self.device_lines[lines]).cpu().numpy()
        return found

    def drawn(self, mode: Mode, requests: Sequence[Request], positions: Sequence[int]) -> Draws:
        """Have a token drawn from each line; it is the request's at that position of its text."""
        draws = self.draws(mode)
        draws.words.fill(self.lines, requests, positions)
        draws.launch()
        return draws

    def some(self, which: Sequence[int]) -> Tensor:
        """Of the lines asked for, these, on the device."""
        return self._logits.index_select(0, self.device_lines[torch.tensor(which, device=self._logits.device)])


class NotKept:
    """The logits of a step whose successor runs already."""

    def __getitem__(self, lines: slice) -> NDArray[np.float32]:
        raise RuntimeError("the logits of this step were not asked for and are gone")

"""Keeps hidden states for a draft head: the residual stream after some layers, of every token in the cache.

They are stored by page and slot, as keys and values are, so forks and rewinds need nothing of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.backends.torch.execution.step import StepInputs


class TapStore:
    def __init__(
        self, layers: Sequence[int], num_pages: int, page_tokens: int, width: int, like: Tensor
    ) -> None:  # fmt: skip
        """`layers`: numbers of layers after which states are kept. `like` has the model's dtype and device."""
        self.layers = tuple(layers)
        self._page_tokens = page_tokens
        # The last place is for tokens in gaps.
        self._states = like.new_zeros((num_pages * page_tokens + 1, len(self.layers), width))

    def places(self, step: StepInputs, before: int = 0) -> Tensor:
        """Where the states of the step's tokens are stored, or of the tokens `before` places earlier."""
        if step.tokens.is_cuda:
            from outpace.backends.torch.kernels import tap_places

            return tap_places.places(step, before, self._page_tokens, len(self._states) - 1)
        positions = step.slots() - before
        at = positions.clamp(min=0)
        pages = step.tables[step.token_rows.long(), (at // self._page_tokens).long()]
        places = pages * self._page_tokens + at % self._page_tokens
        return torch.where(positions >= 0, places, len(self._states) - 1).long()

    def write(self, layer: int, places: Tensor, residual: Tensor) -> None:
        self._states[:, self.layers.index(layer)].index_copy_(0, places, residual)

    def read_before(self, step: StepInputs) -> Tensor:
        """The states of the token before each of the step's, [tokens, taps, width]."""
        return self._states.index_select(0, self.places(step, before=1))

    def move(self, pages: Tensor, slots: Tensor, to_pages: Tensor, to_slots: Tensor) -> None:
        """`Pages.move`"""
        self._states[to_pages * self._page_tokens + to_slots] = self._states[pages * self._page_tokens + slots]

    def copy_page(self, source: int, target: int) -> None:
        size = self._page_tokens
        self._states[target * size : (target + 1) * size] = self._states[source * size : (source + 1) * size]

"""The loss of drafted tokens: cross-entropy to the target's distribution, restricted to the draft vocabulary.

Logits of a whole batch would take gigabytes, several times over. They are made chunk by chunk, and the gradients with
them: what remains is a row of the head's width per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outpace.training.compiling import compiled

ChunkLoss = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class DraftLoss:
    def __init__(self, chunk: int, *, compile: bool = False) -> None:
        self.chunk = chunk
        self._probs = compiled(_restricted_probs, enabled=compile)
        self._loss = compiled(_chunk_loss, enabled=compile)

    @torch.no_grad()
    def target_probs(self, last: Tensor, rows: Tensor, output: Tensor, num_more: int) -> Tensor:
        """The target's distribution over the draft vocabulary at these rows: [rows + num_more, draft vocabulary].

        `output`: the rows of the target's output matrix. The added rows are empty.
        """
        probs = torch.zeros((len(rows) + num_more, len(output)), dtype=last.dtype, device=last.device)
        for at in range(0, len(rows), self.chunk):
            here = slice(at, at + self.chunk)
            probs[here] = self._probs(last[rows[here]], output)
        return probs

    def __call__(self, x: Tensor, output: Tensor, probs: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of cross-entropies.

        x [rows, width] and output [draft vocabulary, width] of the head; probs [rows, draft vocabulary].
        """
        found: Tensor = _Loss.apply(x, output, probs, weights, self.chunk, self._loss)  # type: ignore[no-untyped-call]
        return found


def _restricted_probs(last: Tensor, output: Tensor) -> Tensor:
    return torch.softmax((last @ output.T).float(), dim=-1).to(last.dtype)


def _chunk_loss(x: Tensor, output: Tensor, probs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and the gradients of x and output."""
    logits = (x @ output.T).float()
    shifted = logits - logits.amax(-1, keepdim=True)
    exponentials = torch.exp(shifted)
    sums = exponentials.sum(-1, keepdim=True)
    wide = probs.float()
    cross_entropies = torch.log(sums).squeeze(-1) * wide.sum(-1) - (wide * shifted).sum(-1)
    d_logits = ((exponentials / sums - wide) * weights[:, None]).to(x.dtype)
    return (cross_entropies * weights).sum(), d_logits @ output, d_logits.T @ x


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, output: Tensor, probs: Tensor, weights: Tensor, chunk: int, chunk_loss: ChunkLoss
    ) -> Tensor:
        loss, d_x = torch.zeros((), device=x.device), []
        d_output = torch.zeros(output.shape, dtype=torch.float32, device=x.device)
        for at in range(0, len(x), chunk):
            here = slice(at, at + chunk)
            part, d_rows, d_matrix = chunk_loss(x[here], output, probs[here], weights[here])
            loss += part
            d_x.append(d_rows)
            d_output += d_matrix
        ctx.save_for_backward(torch.cat(d_x), d_output.to(output.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_x, d_output = ctx.saved_tensors
        return grads[0] * d_x, grads[0] * d_output, None, None, None, None

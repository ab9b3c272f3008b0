"""A draft head (EAGLE-3): one layer that drafts from its target's hidden states.

The entry of position p joins the token at p with the target's taps at p - 1. Later passes take the head's own output in
place of taps. An entry lies at the slot of its token and has the RoPE angle of the position before; slot 0 is unused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.backends.torch.execution.step import StepInputs
from outpace.backends.torch.kernels.base import Cache, Hidden, Ops
from outpace.backends.torch.model.taps import TapStore
from outpace.backends.torch.model.weights import Layer


@dataclass(slots=True)
class HeadWeights:
    fuse: Tensor  # [width, taps * target's width]
    tap_norms: Tensor  # [taps, target's width]: each tap is normed before they are fused
    token_norm: Tensor
    layer: Layer  # qkv is [q + 2 kv, 2 width]: token, then state
    final_norm: Tensor
    head: Tensor  # [draft vocabulary, width]
    ids: Tensor  # int64 [draft vocabulary]: the target's tokens

    @property
    def num_bytes(self) -> int:
        named = [getattr(self.layer, name) for name in Layer.__dataclass_fields__]
        mine = [self.fuse, self.tap_norms, self.token_norm, self.final_norm, self.head, self.ids]
        return sum(tensor.nbytes for tensor in [*mine, *named] if tensor is not None)


class HeadModel:
    def __init__(
        self,
        weights: HeadWeights,
        epsilon: float,
        ops: Ops,
        embedding: Tensor,
        taps: TapStore,
        cache: Cache,
        rope: Tensor,
    ) -> None:
        """`embedding`, `taps` and `rope` are the target's; `cache` has its pages."""
        self.weights = weights
        self._epsilon = epsilon
        self._ops = ops
        self._embedding = embedding
        self._taps = taps
        self._cache = cache
        self._rope = torch.cat([rope[:1], rope[:-1]])  # the angle of the position before

    @torch.inference_mode()
    def fuse(self, step: StepInputs) -> Tensor:
        """The states that a first pass begins with, [tokens, width]."""
        taps, norms = self._taps.read_before(step), self.weights.tap_norms
        parts = [self._ops.norm(taps[:, i].contiguous(), norm, self._epsilon) for i, norm in enumerate(norms)]
        return self._ops.linear(torch.cat(parts, 1), self.weights.fuse)

    @torch.inference_mode()
    def forward(self, step: StepInputs, states: Tensor) -> tuple[Tensor, Tensor]:
        """Logits over the draft vocabulary and the states, both of the requested tokens."""
        ops, w, layer, epsilon = self._ops, self.weights, self.weights.layer, self._epsilon
        token = ops.norm(ops.embed(step.tokens, self._embedding).residual, w.token_norm, epsilon)
        state = ops.norm(states, layer.attention_norm, epsilon)
        qkv = ops.linear(torch.cat([token, state], -1), layer.qkv)
        mixed = ops.attend(qkv, self._cache, step, self._rope, layer.q_norm, layer.k_norm, epsilon)
        # Cloned, because products may be added in place.
        h = ops.linear_add(mixed, layer.out, None, Hidden(states.clone()), layer.mlp_norm)
        x = ops.norm_swiglu(h, layer.mlp_norm, epsilon, layer.gate_up, None)
        h = ops.linear_add(x, layer.down, None, h, w.final_norm)
        if step.shape.num_outputs != len(h.residual):
            h = Hidden(h.residual.index_select(0, step.outputs))
        return ops.norm_logits(h, w.final_norm, epsilon, w.head), h.residual


class HeadLoop:
    """What a draft loop of a head runs: the states go from one pass to the next in a buffer of their own."""

    def __init__(self, model: HeadModel, num_rows: int, logits: Tensor) -> None:
        """`logits` [rows, target's vocabulary]: -inf where the head knows no token; loops share it."""
        self.device = logits.device
        self._model = model
        self._logits = logits[:num_rows]
        self.states = logits.new_zeros((num_rows, model.weights.fuse.shape[0]), dtype=model.weights.fuse.dtype)

    def begin(self, step: StepInputs) -> Tensor:
        return self._run(step, self._model.fuse(step))

    def go_on(self, step: StepInputs) -> Tensor:
        return self._run(step, self.states)

    def _run(self, step: StepInputs, states: Tensor) -> Tensor:
        logits, last = self._model.forward(step, states)
        self.states.copy_(last)
        return self._logits.index_copy_(1, self._model.weights.ids, logits)

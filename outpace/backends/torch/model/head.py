"""A draft head (EAGLE-3): one layer that drafts from its target's hidden states, with options from its config.

The entry of position p joins the token at p with the target's taps at p - 1. Later passes take the head's own output in
place of taps. An entry lies at the slot of its token and has the RoPE angle of the position before; slot 0 is unused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.backends.torch.execution.step import StepInputs
from outpace.backends.torch.kernels.base import Cache, Hidden, Ops
from outpace.backends.torch.model.head_weights import HeadWeights
from outpace.backends.torch.model.taps import TapStore
from outpace.models.head_file import HeadConfig


class HeadModel:
    def __init__(
        self,
        config: HeadConfig,
        weights: HeadWeights,
        ops: Ops,
        embedding: Tensor,
        taps: TapStore,
        cache: Cache,
        rope: Tensor,
    ) -> None:
        """`embedding`, `taps` and `rope` are the target's; `cache` has its pages."""
        self.config = config
        self.weights = weights
        self.device = embedding.device
        self._ops = ops
        self._embedding = embedding if weights.embedding is None else weights.embedding
        self._taps = taps
        self._cache = cache
        if config.rope is not None:
            rope = torch.from_numpy(config.rope.table(len(rope))).to(rope.device)
        self._rope = torch.cat([rope[:1], rope[:-1]])  # the angle of the position before

    @property
    def has_trees(self) -> bool:
        """Whether the rows of a pass may have branches."""
        return self._ops.has_trees

    @torch.inference_mode()
    def fuse(self, step: StepInputs) -> Tensor:
        """The states that a first pass begins with, [tokens, width]."""
        return self._ops.linear(self._normed(self._taps.read_before(step)), self.weights.fuse)

    def _normed(self, taps: Tensor) -> Tensor:
        """[tokens, taps, width] to [tokens, taps * width]."""
        norm, epsilon = self.weights.tap_norm, self.config.epsilon
        if norm is None:
            return taps.flatten(1)
        if self.config.tap_norm == "joint":
            return self._ops.norm(taps.flatten(1), norm, epsilon)
        parts = [self._ops.norm(taps[:, i].contiguous(), each, epsilon) for i, each in enumerate(norm)]
        return torch.cat(parts, 1)

    @torch.inference_mode()
    def enter(self, step: StepInputs) -> None:
        """Write the step's entries. Of a head's one layer, later tokens need nothing but keys and values."""
        ops, layer, c = self._ops, self.weights.layer, self.config
        joined, _ = self._joined(step, self.fuse(step))
        begin, weight = 0, layer.qkv
        if isinstance(weight, Tensor):  # other storages cannot leave out the queries
            begin, weight = c.q_size, weight[c.q_size :]
        kv = ops.linear(joined, weight)
        if layer.qkv_bias is not None:
            kv = kv + layer.qkv_bias[begin:]
        ops.rotate_and_store(kv, self._cache, step, self._rope, layer.q_norm, layer.k_norm, c.epsilon)

    def _joined(self, step: StepInputs, states: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer's first product takes, and the part of it that is the normed states."""
        ops, w, c = self._ops, self.weights, self.config
        token = ops.norm(ops.embed(step.tokens, self._embedding).residual, w.token_norm, c.epsilon)
        state = ops.norm(states, w.layer.attention_norm, c.epsilon)
        return torch.cat([token, state], -1), state

    @torch.inference_mode()
    def forward(self, step: StepInputs, states: Tensor) -> tuple[Tensor, Tensor]:
        """Logits over the draft vocabulary and the states for the next pass, both of the requested tokens."""
        ops, w, layer, c = self._ops, self.weights, self.weights.layer, self.config
        joined, state = self._joined(step, states)
        qkv = ops.linear(joined, layer.qkv)
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias
        mixed = ops.attend(qkv, self._cache, step, self._rope, layer.q_norm, layer.k_norm, c.epsilon)
        # Cloned, because products may be added in place.
        h = Hidden(state if c.norm_before_residual else states.clone())
        h = ops.linear_add(mixed, layer.out, layer.out_bias, h, layer.mlp_norm)
        x = ops.norm_swiglu(h, layer.mlp_norm, c.epsilon, layer.gate_up, layer.gate_up_bias)
        h = ops.linear_add(x, layer.down, layer.down_bias, h, w.final_norm)
        if step.shape.num_outputs != len(h.residual):
            h = Hidden(h.residual.index_select(0, step.outputs))
        logits = ops.norm_logits(h, w.final_norm, c.epsilon, w.head)
        return logits, ops.norm(h.residual, w.final_norm, c.epsilon) if c.norm_output else h.residual


class HeadLoop:
    """What a draft loop of a head runs: the states go from one pass to the next in a buffer of their own."""

    def __init__(self, model: HeadModel, num_rows: int, logits: Tensor) -> None:
        """`logits` [rows, target's vocabulary]: -inf where the head knows no token; loops share it."""
        self.device = logits.device
        self.columns = model.weights.ids
        self._model = model
        self._logits = logits[:num_rows]
        self.states = logits.new_zeros((num_rows, model.config.width), dtype=model.weights.token_norm.dtype)

    def begin(self, step: StepInputs) -> Tensor:
        return self._run(step, self._model.fuse(step))

    def go_on(self, step: StepInputs) -> Tensor:
        return self._run(step, self.states)

    def _run(self, step: StepInputs, states: Tensor) -> Tensor:
        logits, last = self._model.forward(step, states)
        self.states.copy_(last)
        return self._logits.index_copy_(1, self._model.weights.ids, logits)

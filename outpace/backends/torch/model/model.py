"""The forward pass of every family: one decoder with options from the config."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outpace.backends.torch.execution.step import StepInputs, StepShape
from outpace.backends.torch.kernels.base import Cache, Hidden, Ops, Scores
from outpace.backends.torch.model.taps import TapStore
from outpace.backends.torch.model.weights import Layer, Weights
from outpace.backends.torch.storage import Weight
from outpace.errors import BackendLost
from outpace.models.architecture import Architecture
from outpace.models.rope import Rope


class Model:
    def __init__(self, config: Architecture, weights: Weights, ops: Ops, max_context: int) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self.rope = self._table(config.rope, max_context)
        local = self.rope if config.local_rope is None else self._table(config.local_rope, max_context)
        c, dtype = config, weights.embedding.dtype
        windows = c.windows or (None,) * c.num_layers
        self._scores = [Scores(c.attention_scale, c.attention_softcap, window) for window in windows]
        self._ropes = [self.rope if window is None else local for window in windows]
        self._embedding_scale = float(torch.tensor(c.embedding_scale, dtype=dtype))  # rounded, as in training
        self.taps: TapStore | None = None  # keeps hidden states for a draft head

    def _table(self, rope: Rope, max_context: int) -> Tensor:
        table = rope.table(max_context, self.config.head_dim // 2)
        return torch.from_numpy(table).to(self.weights.embedding.device)

    @property
    def has_trees(self) -> bool:
        """Whether the rows of a step may have branches."""
        return self.ops.has_trees

    can_give_peaks = False  # whether a step can leave out what greedy requests do not need; of a sharded model
    on_loss: Callable[[Callable[[BackendLost], None]], None] | None = None  # see `Capabilities`; of a sharded model

    def replaying(self, step: StepInputs) -> None:
        """A captured forward pass is about to run again. A model that is sharded tells the other ranks."""

    def copying_page(self, source: int, target: int) -> None:
        """The same for a page of the caches that is copied."""

    def close(self) -> None:
        """The same for the end."""

    @torch.inference_mode()
    def forward(
        self, step: StepInputs, caches: list[Cache], room: Tensor | None = None, states: list[Tensor] | None = None
    ) -> Tensor:
        """Logits of the requested tokens, float32 [num_outputs, vocab_size]; writes keys and values into the caches.

        `room`: a tensor to write the logits into. `states` receives the requested tokens' hidden states after the final
        norm, [num_outputs, width].
        """
        ops, weights, epsilon = self.ops, self.weights, self.config.epsilon
        h = ops.embed(step.tokens, weights.embedding)
        if self._embedding_scale != 1.0:
            h.residual.mul_(self._embedding_scale)
        next_norms = [*(layer.attention_norm for layer in weights.layers[1:]), weights.final_norm]
        taps = self.taps
        places = taps.places(step) if taps is not None else None
        rules = zip(self._ropes, self._scores, next_norms, strict=True)
        for number, (layer, cache, rule) in enumerate(zip(weights.layers, caches, rules, strict=True), 1):
            rope, scores, next_norm = rule
            qkv = ops.norm_linear(h, layer.attention_norm, epsilon, layer.qkv, layer.qkv_bias)
            mixed = ops.attend(qkv, cache, step, rope, layer.q_norm, layer.k_norm, epsilon, scores)
            h = self._add(mixed, layer.out, layer.out_bias, layer.attention_output_norm, h, layer.mlp_norm)
            h = self._mlp(layer, h, step, next_norm)
            if taps is not None and places is not None and number in taps.layers:
                taps.write(number, places, h.residual)
        if step.shape.num_outputs != len(h.residual):
            h = Hidden(h.residual.index_select(0, step.outputs))
        if states is not None:
            states.append(ops.norm(h.residual, weights.final_norm, epsilon))
        return self.outputs(h, step.shape, room)

    def outputs(self, h: Hidden, shape: StepShape, room: Tensor | None) -> Tensor:
        """What a forward pass gives: logits."""
        logits = self.ops.norm_logits(h, self.weights.final_norm, self.config.epsilon, self.weights.head, room)
        cap = self.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def num_columns(self, shape: StepShape) -> int:
        """Of what a forward pass gives."""
        return self.config.vocab_size

    def _mlp(self, layer: Layer, h: Hidden, step: StepInputs, next_norm: Tensor) -> Hidden:
        ops, c = self.ops, self.config
        if layer.router is not None and c.experts is not None:
            x = ops.norm(h.residual, layer.mlp_norm, c.epsilon)
            mixed = ops.experts(x, step.positions, layer.router, layer.gate_up, layer.down, c.experts)
            return Hidden(h.residual + mixed)
        if c.activation == "silu":
            x = ops.norm_swiglu(h, layer.mlp_norm, c.epsilon, layer.gate_up, layer.gate_up_bias)
        else:
            x = ops.geglu(ops.norm_linear(h, layer.mlp_norm, c.epsilon, layer.gate_up, layer.gate_up_bias))
        return self._add(x, layer.down, layer.down_bias, layer.mlp_output_norm, h, next_norm)

    def _add(
        self, x: Tensor, weight: Weight, bias: Tensor | None, norm: Tensor | None, h: Hidden, next_norm: Tensor
    ) -> Hidden:
        """`norm`: of the product, before it is added."""
        if norm is None:
            return self.ops.linear_add(x, weight, bias, h, next_norm)
        return self.ops.linear_norm_add(x, weight, bias, norm, self.config.epsilon, h, next_norm)

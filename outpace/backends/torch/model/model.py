"""The forward pass of Llama, Mistral, SmolLM2, Qwen2 and Qwen3: one decoder with options from the config."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outpace.backends.torch.execution.step import StepInputs, StepShape
from outpace.backends.torch.kernels.base import Cache, Hidden, Ops
from outpace.backends.torch.model.taps import TapStore
from outpace.backends.torch.model.weights import Weights
from outpace.errors import BackendLost
from outpace.models.architecture import Architecture


class Model:
    def __init__(self, config: Architecture, weights: Weights, ops: Ops, max_context: int) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self.rope = torch.from_numpy(config.rope.table(max_context)).to(weights.embedding.device)
        self.taps: TapStore | None = None  # keeps hidden states for a draft head

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
        next_norms = [*(layer.attention_norm for layer in weights.layers[1:]), weights.final_norm]
        taps = self.taps
        places = taps.places(step) if taps is not None else None
        for number, (layer, cache, next_norm) in enumerate(zip(weights.layers, caches, next_norms, strict=True), 1):
            qkv = ops.norm_linear(h, layer.attention_norm, epsilon, layer.qkv, layer.qkv_bias)
            mixed = ops.attend(qkv, cache, step, self.rope, layer.q_norm, layer.k_norm, epsilon)
            h = ops.linear_add(mixed, layer.out, layer.out_bias, h, layer.mlp_norm)
            x = ops.norm_swiglu(h, layer.mlp_norm, epsilon, layer.gate_up, layer.gate_up_bias)
            h = ops.linear_add(x, layer.down, layer.down_bias, h, next_norm)
            if taps is not None and places is not None and number in taps.layers:
                taps.write(number, places, h.residual)
        if step.shape.num_outputs != len(h.residual):
            h = Hidden(h.residual.index_select(0, step.outputs))
        if states is not None:
            states.append(ops.norm(h.residual, weights.final_norm, epsilon))
        return self.outputs(h, step.shape, room)

    def outputs(self, h: Hidden, shape: StepShape, room: Tensor | None) -> Tensor:
        """What a forward pass gives: logits."""
        return self.ops.norm_logits(h, self.weights.final_norm, self.config.epsilon, self.weights.head, room)

    def num_columns(self, shape: StepShape) -> int:
        """Of what a forward pass gives."""
        return self.config.vocab_size

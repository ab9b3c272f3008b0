"""The forward pass of Llama, Mistral, SmolLM2, Qwen2 and Qwen3: one decoder, whose options the config names."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from outpace.backends.torch.config import ModelConfig
from outpace.backends.torch.kernels.base import Cache, Ops
from outpace.backends.torch.step import StepInputs
from outpace.backends.torch.weights import Weights


class Model:
    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, max_context: int) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self._rope = torch.from_numpy(config.rope.table(max_context)).to(weights.embedding.device)

    @torch.inference_mode()
    def forward(self, step: StepInputs, caches: list[Cache]) -> Tensor:
        """Logits of the tokens asked for, [num_outputs, vocab_size] in float32; keys and values go into the caches."""
        ops, weights, epsilon = self.ops, self.weights, self.config.epsilon
        x = functional.embedding(step.tokens, weights.embedding)
        for layer, cache in zip(weights.layers, caches, strict=True):
            qkv = ops.norm_linear(x, layer.attention_norm, epsilon, layer.qkv, layer.qkv_bias)
            q = ops.rotate_and_store(qkv, cache, step, self._rope, layer.q_norm, layer.k_norm, epsilon)
            mixed = ops.attention(q, cache, step)
            x = ops.linear_add(mixed, layer.out, layer.out_bias, x)
            h = ops.norm_swiglu(x, layer.mlp_norm, epsilon, layer.gate_up, layer.gate_up_bias)
            x = ops.linear_add(h, layer.down, layer.down_bias, x)
        if step.shape.num_outputs != len(x):
            x = x.index_select(0, step.outputs)
        return ops.norm_logits(x, weights.final_norm, epsilon, weights.head)

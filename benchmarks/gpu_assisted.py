"""Loads the padded weights into `transformers` models, to compare with its assisted generation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from outpace.backends.torch.model.weights import Weights, named_tensors
from outpace.models.architecture import Architecture


def as_transformers(config: Architecture, weights: Weights) -> Any:
    """A LlamaForCausalLM that shares the memory of `weights`; only the RoPE frequencies are copied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    described = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.width, intermediate_size=config.hidden,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads, head_dim=config.head_dim, rms_norm_eps=config.epsilon,
        max_position_embeddings=config.context, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(described)
    model.load_state_dict(named_tensors(weights, config), strict=True, assign=True)
    frequencies = torch.tensor(config.rope.frequencies, dtype=torch.float32, device=weights.embedding.device)
    for name in ("inv_freq", "original_inv_freq"):
        setattr(model.model.rotary_emb, name, frequencies.clone())
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def generate(
    model: Any, prompt: Sequence[int], num_tokens: int, temperature: float, assistant: Any = None
) -> tuple[list[int], float]:
    """The new tokens, and the seconds of the whole call, including prefill."""
    tokens = torch.tensor([list(prompt)], device=model.device)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(0)
    begin = time.perf_counter()
    found = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=num_tokens, assistant_model=assistant, **sampling
    )
    emitted = found[0, len(prompt) :].tolist()  # waits for the device
    return emitted, time.perf_counter() - begin

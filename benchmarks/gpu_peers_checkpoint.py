"""Writes a padded model and its head as folders that other engines load: config.json and safetensors, no tokenizer.

A padded model keeps the rotation frequencies of the small one in the first pairs of its larger heads. The larger heads
get them from a power of the small model's base, since base ** (-2i / head_dim) is what other engines compute. The pairs
after them rotate zeros, so theirs do not matter.

The head is written as SafeAILab's EAGLE-3 files are, with the keys that vLLM reads there. vLLM 0.24.0 drops `fc_norm`
from a file in the format of `speculators`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from outpace.backends.torch.model.head_weights import HeadWeights, named_head_tensors
from outpace.backends.torch.model.safetensors_folder import INDEX
from outpace.backends.torch.model.weights import Weights, named_tensors
from outpace.backends.torch.storage import plain_tensor
from outpace.models.architecture import Architecture
from outpace.models.head_file import HeadConfig
from outpace.models.rope import Rope

_SHARD_BYTES = 2**31
_WRITERS = 4
_BOS, _EOS = 1, 2  # SmolLM2's; the measured requests ignore the end of text


def write_model(folder: Path, config: Architecture, weights: Weights) -> None:
    """Write a model without biases and QK-norms as a Llama."""
    assert not (config.qkv_bias or config.out_bias or config.mlp_bias or config.has_qk_norm)
    folder.mkdir(parents=True, exist_ok=True)
    described = _layer_keys(config, config.rope) | {
        "architectures": ["LlamaForCausalLM"], "vocab_size": config.vocab_size, "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.context,
    }  # fmt: skip
    _write_tensors(folder, {name: plain_tensor(part) for name, part in named_tensors(weights, config).items()})
    _write_json(folder / "config.json", described)


def write_head(folder: Path, head: HeadConfig, weights: HeadWeights, target: Architecture) -> None:
    """Write an EAGLE-3 head that uses the target's embedding."""
    assert not (head.qkv_bias or head.out_bias or head.mlp_bias or head.has_qk_norm or head.has_embedding)
    folder.mkdir(parents=True, exist_ok=True)
    described = _layer_keys(head, head.rope or target.rope) | {
        "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": head.vocab_size, "num_hidden_layers": 1,
        "max_position_embeddings": target.context, "draft_vocab_size": head.draft_vocab_size,
        "target_hidden_size": head.tap_width, "eagle_aux_hidden_state_layer_ids": list(head.taps),
        "num_aux_hidden_states": len(head.taps), "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": head.tap_norm == "joint", "fc_norm": head.tap_norm == "each",
        "norm_output": head.norm_output,
    }  # fmt: skip
    tensors = {name: plain_tensor(part) for name, part in named_head_tensors(weights, head).items()}
    tensors["d2t"] = weights.ids - torch.arange(len(weights.ids), device=weights.ids.device)
    _write_tensors(folder, tensors)
    _write_json(folder / "config.json", described)


def plain_base(rope: Rope) -> float:
    """The base that gives these frequencies; those after the last one that is not 0 are free."""
    frequencies = rope.frequencies
    used = int(np.count_nonzero(frequencies))
    base = float(frequencies[1]) ** -len(frequencies)
    expected = base ** (-np.arange(used) / len(frequencies))
    if rope.scale != 1.0 or not np.allclose(frequencies[:used], expected, rtol=1e-9, atol=0):
        raise ValueError("the model's RoPE is scaled; only one with a plain base can be written")
    return base


def _layer_keys(sizes: Any, rope: Rope) -> dict[str, Any]:
    base = plain_base(rope)
    return {
        "model_type": "llama", "hidden_size": sizes.width, "intermediate_size": sizes.hidden,
        "num_attention_heads": sizes.num_heads, "num_key_value_heads": sizes.num_kv_heads, "head_dim": sizes.head_dim,
        "rms_norm_eps": sizes.epsilon, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "rope_theta": base, "rope_parameters": {"rope_type": "default", "rope_theta": base},
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": _BOS, "eos_token_id": _EOS,
    }  # fmt: skip


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    shards = list(_shards(tensors))
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]

    def write(name: str, shard: dict[str, Tensor]) -> None:
        on_host = {key: tensor.cpu().contiguous() for key, tensor in shard.items()}
        save_file(on_host, folder / name, metadata={"format": "pt"})

    with ThreadPoolExecutor(_WRITERS) as writers:
        list(writers.map(write, names, shards))
    where = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _shards(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if shard and sum(each.nbytes for each in shard.values()) + tensor.nbytes > _SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

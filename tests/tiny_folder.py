"""Writes a small random model as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "eos_token_id": 1, "tie_word_embeddings": True,
}  # fmt: skip


def write_folder(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """`changes` replace keys of the config."""
    import tokenizers
    import torch
    from safetensors.torch import save_file

    from outpace.backends.torch.model.weights import allocate, named_tensors
    from outpace.models.hf_config import parse_config

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    made.train_from_iterator(["the cat sat on the mat"], trainer)
    made.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    wanted = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(wanted))
    config = parse_config(wanted)
    torch.manual_seed(seed)
    weights = allocate(config, tied=wanted["tie_word_embeddings"], dtype=torch.float32, device=torch.device("cpu"))
    for tensor in weights.tensors:
        assert isinstance(tensor, torch.Tensor)
        tensor.normal_(1.0 if tensor.dim() == 1 else 0.0, 0.3)
    named = named_tensors(weights, config)
    tensors = {name: tensor.clone() for name, tensor in named.items() if isinstance(tensor, torch.Tensor)}
    save_file(tensors, folder / "model.safetensors")
    return folder

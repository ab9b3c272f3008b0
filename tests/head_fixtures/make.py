"""Writes tiny random draft heads with the programs that publish them, and the logits that those programs compute.

    python -m tests.head_fixtures.make speculators
    python -m tests.head_fixtures.make eagle FOLDER

The first needs the package `speculators` (0.9 was used), the second a checkout of SafeAILab's EAGLE. The results are
kept in the repository, so that tests need neither. `expected.safetensors` holds hidden states of an imagined target
[positions, taps * width], a text [positions + 1], and logits [passes, positions, draft vocabulary]: pass s at position
p has read the hidden states up to p and the tokens up to p + 1 + s. It is defined where that token exists.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HERE = Path(__file__).parent
POSITIONS, PASSES, VOCAB, DRAFT_VOCAB = 9, 3, 24, 12
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
}  # fmt: skip


def fill(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.4)


def vocabulary() -> tuple[Tensor, Tensor]:
    """d2t and t2d."""
    kept = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    return kept - torch.arange(DRAFT_VOCAB), torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, True)


def inputs(width: int) -> tuple[Tensor, Tensor]:
    return torch.randn(POSITIONS, width), torch.randint(0, VOCAB, (POSITIONS + 1,))


def save_expected(folder: Path, taps: Tensor, text: Tensor, logits: Tensor) -> None:
    save_file({"taps": taps, "text": text, "logits": logits.contiguous()}, folder / "expected.safetensors")


def make_speculators(name: str, layer: Any, **options: Any) -> None:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=[1, 4, 5],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="someone/tiny", architectures=["LlamaForCausalLM"]),
        ),
        **options,
    )
    model = Eagle3DraftModel(config).eval()
    fill(model)
    d2t, t2d = vocabulary()
    model.load_vocab_mappings(t2d, d2t)
    taps, text = inputs(3 * layer.hidden_size)
    found: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, out: found.append(out[0].detach()))
    with torch.no_grad():
        model(taps[None], text[None, 1:], torch.zeros(1, POSITIONS, dtype=torch.long), ttt_steps=PASSES)
    model.save_pretrained(HERE / name)
    (HERE / name / "config.py").unlink()  # a copy of the package's own code
    save_expected(HERE / name, taps, text, torch.stack(found))


def make_eagle(checkout: Path) -> None:
    sys.path.insert(0, str(checkout))
    from eagle.model.cnets import Model

    target_width, folder = 10, HERE / "safeailab"
    folder.mkdir(exist_ok=True)
    config = CONFIG | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": DRAFT_VOCAB,
        "target_hidden_size": target_width, "pad_token_id": 0, "rope_theta": 300.0,
    }  # fmt: skip
    # Not a PretrainedConfig, because newer versions of transformers add RoPE keys that EAGLE reads otherwise.
    model = Model(SimpleNamespace(**config, rope_scaling=None, pretraining_tp=1)).eval()
    fill(model)
    model.d2t, model.t2d = vocabulary()
    taps, text = inputs(3 * target_width)
    logits = torch.zeros(PASSES, POSITIONS, DRAFT_VOCAB)
    with torch.no_grad():
        for p in range(POSITIONS):
            states, cache = model(taps[None, : p + 1], text[None, 1 : p + 2], use_cache=True)
            for s in range(PASSES):
                logits[s, p] = model.lm_head(model.norm(states[0, -1]))
                if p + 2 + s > POSITIONS:
                    break
                states, cache = model(
                    states[:, -1:], text[None, p + 2 + s : p + 3 + s], past_key_values=cache, use_cache=True
                )
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    save_expected(folder, taps, text, logits)


def main() -> None:
    torch.manual_seed(1)
    if sys.argv[1] == "eagle":
        make_eagle(Path(sys.argv[2]))
        return
    from transformers import LlamaConfig, Qwen3Config

    rope = {
        "rope_type": "llama3", "rope_theta": 300.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    llama = LlamaConfig(**CONFIG, rope_parameters=rope, attention_bias=True, mlp_bias=True)
    make_speculators("speculators_llama", llama, norm_before_residual=True, norm_before_fc=True)
    qwen3 = Qwen3Config(**CONFIG, head_dim=6, rope_parameters={"rope_type": "default", "rope_theta": 1000.0})
    make_speculators("speculators_qwen3", qwen3, norm_before_residual=False, fc_norm=True, norm_output=True)


if __name__ == "__main__":
    main()

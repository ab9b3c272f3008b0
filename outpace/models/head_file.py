"""The description of a draft head, and its config.json in the format of the `speculators` project.

A head folder holds config.json and safetensors. What that format cannot say (the target's fingerprint) is under the
key `outpace`, which other programs ignore.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from outpace.errors import ModelError
from outpace.models.rope import Rope

FORMAT = 1  # of the values under `outpace`; readers refuse a higher one
_KIND = "eagle3"  # the one that is trained and run, as `speculators` names it
TapNorm = Literal["each", "joint", "none"]  # one norm per tap, one norm over all of them, or no norm before fusing
_SIZES = ("width", "hidden", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "draft_vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """What a head computes, whatever file it is in. The defaults are those of heads that `outpace distill` trains."""

    width: int  # of the head
    hidden: int  # of the head's MLP
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # the target's
    draft_vocab_size: int
    taps: tuple[int, ...]  # the target's residual after this many layers
    epsilon: float
    rope_theta: float | None = None  # written for other programs; drafting uses `rope`
    num_steps: int = 1  # tokens per draft that it was trained for
    target: Mapping[str, Any] = field(default_factory=dict)  # name, fingerprint, architectures
    target_width: int | None = None  # None: the head's
    rope: Rope | None = None  # None: the target's
    tap_norm: TapNorm = "each"
    norm_before_residual: bool = False  # the residual begins with the normed state, not with the state
    norm_output: bool = False  # a later pass takes the state after the final norm
    has_embedding: bool = False  # of its own; else it uses the target's
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    has_qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in (*_SIZES, "num_steps", "tap_width"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ModelError(f"the head's {name} must be a whole number of at least 1; got {value!r}")
        if self.num_heads % self.num_kv_heads or self.draft_vocab_size > self.vocab_size or not self.taps:
            raise ModelError(
                f"the head's sizes do not fit together: {self.num_heads} heads over {self.num_kv_heads}, "
                f"{self.draft_vocab_size} of {self.vocab_size} tokens, taps {list(self.taps)}; its config is damaged"
            )

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def tap_width(self) -> int:
        return self.width if self.target_width is None else self.target_width

    @property
    def cache_elements_per_token(self) -> int:
        """Keys and values of an entry, and the hidden states that the target keeps."""
        return 2 * self.kv_size + len(self.taps) * self.tap_width


def write_config(config: HeadConfig, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(as_json(config), indent=2) + "\n", encoding="utf-8")


def as_json(c: HeadConfig) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": c.num_steps}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": _KIND,
        "speculators_config": {
            "algorithm": _KIND,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": c.target.get("name"),
                "architectures": c.target.get("architectures", []),
            },
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": c.width,
            "intermediate_size": c.hidden,
            "num_hidden_layers": 1,
            "num_attention_heads": c.num_heads,
            "num_key_value_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
            "rms_norm_eps": c.epsilon,
            "rope_theta": c.rope_theta,
            "vocab_size": c.vocab_size,
            "attention_bias": c.qkv_bias,
            "mlp_bias": c.mlp_bias,
        },
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.tap_width,
        "eagle_aux_hidden_state_layer_ids": list(c.taps),
        "norm_before_residual": c.norm_before_residual,  # always written: readers disagree about a missing one
        "norm_before_fc": c.tap_norm == "joint",
        "fc_norm": c.tap_norm == "each",
        "norm_output": c.norm_output,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "outpace": {
            "format": FORMAT,
            "target": dict(c.target),
        },
    }


def read_head_config(folder: Path) -> HeadConfig:
    """The config of a head that `outpace distill` wrote."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        own, layer = values["outpace"], values["transformer_layer_config"]
        if own["format"] > FORMAT:
            raise ModelError(f"{path} has format {own['format']}, newer than this version's {FORMAT}; update Outpace")
        if (kind := values["speculators_model_type"]) != _KIND:
            raise ModelError(
                f"{path} describes a head of kind {kind!r}, which Outpace neither runs nor trains; train a new head "
                "into another folder"
            )
        return HeadConfig(
            width=layer["hidden_size"],
            hidden=layer["intermediate_size"],
            num_heads=layer["num_attention_heads"],
            num_kv_heads=layer["num_key_value_heads"],
            head_dim=layer["head_dim"],
            vocab_size=layer["vocab_size"],
            draft_vocab_size=values["draft_vocab_size"],
            taps=tuple(values["eagle_aux_hidden_state_layer_ids"]),
            epsilon=layer["rms_norm_eps"],
            rope_theta=layer["rope_theta"],
            num_steps=values["speculators_config"]["proposal_methods"][0]["speculative_tokens"],
            target=own["target"],
        )
    except OSError as error:
        raise ModelError(
            f"{folder} has no readable config.json ({error.strerror}); name a folder that `outpace distill` wrote"
        ) from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ModelError(f"{path} is not the config of a head ({error!r}); train the head again") from error

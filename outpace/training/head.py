"""A draft head as torch functions: one layer that runs once per drafted token, as EAGLE-3's.

A head drafts from all entries of a batch at once. `begin` reads the target's features; each `step` takes one token per
entry (the true one in training, the drafted one in evaluation) and gives rows that, times the output matrix, are the
logits of the token after it. The layer's output is the next step's feature. Parameters are float32 under the names of
the `speculators` format; a pass uses copies in the target's dtype, rounded to the served format if asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from outpace.backends.torch.kernels.reference import rms_norm, rotate, swiglu
from outpace.backends.torch.storage import dense
from outpace.models.architecture import Architecture
from outpace.models.head_file import HeadConfig
from outpace.training.attention import ChainAttention
from outpace.training.batches import Batch
from outpace.training.compiling import compiled_for_training
from outpace.training.quantise import straight_through
from outpace.training.target import Features, Target, causal

Parameters = dict[str, Tensor]
LAYER_MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
                  "mlp.up_proj", "mlp.down_proj")  # fmt: skip


def default_taps(num_layers: int) -> tuple[int, ...]:
    """After an early, a middle and the last layer."""
    return tuple(sorted({min(3, num_layers), max(num_layers // 2, 1), num_layers}))


def rope_theta(target: Architecture) -> float:
    """The base of the target's RoPE, from the ratio of its first two frequencies."""
    first, second = target.rope.frequencies[:2]
    return float(round((first / second) ** (target.head_dim / 2), 3))


def working_copies(parameters: Parameters, dtype: torch.dtype, *, rounded: bool) -> Parameters:
    """Matrices in the dtype of the pass, rounded if asked; vectors stay float32."""
    return {
        name: (straight_through(p) if rounded else p).to(dtype) if p.dim() > 1 else p for name, p in parameters.items()
    }


def random_matrix(rows: int, cols: int, scale: float = 1.0) -> Tensor:
    return (torch.rand(rows, cols) * 2 - 1) * (scale / math.sqrt(cols))


def first_parameters(config: HeadConfig, target: Target, kept: Tensor) -> Parameters:
    """Start values outside of layers: the fused feature is the target's last state, logits are its own rows."""
    c, width = config, config.width
    fc = random_matrix(width, len(c.taps) * width, 0.05)
    fc[:, -width:] += torch.eye(width)
    found = {
        "fc.weight": fc,
        "lm_head.weight": target.weights.dense_head[kept].float().cpu(),
        "norm.weight": torch.ones(width),
    }
    found |= {f"fc_norm.{i}.weight": torch.ones(width) for i in range(len(c.taps))}
    found[f"fc_norm.{len(c.taps) - 1}.weight"] = target.weights.final_norm.float().cpu().clone()
    return found


def layer_parameters(config: HeadConfig, target: Target, inputs: int) -> Parameters:
    """A layer whose MLP and output begin as the target's last layer's, at a fraction of their size."""
    c, last = config, target.weights.layers[-1]
    found = {
        "self_attn.q_proj.weight": random_matrix(c.q_size, inputs),
        "self_attn.k_proj.weight": random_matrix(c.kv_size, inputs),
        "self_attn.v_proj.weight": random_matrix(c.kv_size, inputs),
        "self_attn.o_proj.weight": 0.3 * dense(last.out, torch.float32).float().cpu(),
        "mlp.gate_proj.weight": random_matrix(c.hidden, c.width),
        "mlp.up_proj.weight": random_matrix(c.hidden, c.width),
        "mlp.down_proj.weight": random_matrix(c.width, c.hidden, 0.3),
        "input_layernorm.weight": torch.ones(c.width),
        "post_attention_layernorm.weight": torch.ones(c.width),
    }
    if c.hidden == target.config.hidden:
        gate, up = dense(last.gate_up, torch.float32).float().cpu().chunk(2)
        found |= {"mlp.gate_proj.weight": gate.clone(), "mlp.up_proj.weight": up.clone()}
        found["mlp.down_proj.weight"] = 0.3 * dense(last.down, torch.float32).float().cpu()
    return found


def start_values(config: HeadConfig, target: Target, kept: Tensor) -> Parameters:
    """`kept`: the target's tokens that the head can draft."""
    layer = layer_parameters(config, target, 2 * config.width) | {"hidden_norm.weight": torch.ones(config.width)}
    return first_parameters(config, target, kept) | {f"layers.0.{name}": p for name, p in layer.items()}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's working copies, fused as in the target."""

    qkv: Tensor
    out: Tensor
    norm: Tensor
    gate_up: Tensor
    down: Tensor

    @staticmethod
    def of(working: Parameters, prefix: str) -> LayerWeights:
        q, k, v, out, gate, up, down = (working[f"{prefix}{name}.weight"] for name in LAYER_MATRICES)
        norm = working[f"{prefix}post_attention_layernorm.weight"]
        return LayerWeights(torch.cat([q, k, v]), out, norm, torch.cat([gate, up]), down)


def fuse_taps(taps: Tensor, norms: Tensor, fc: Tensor, epsilon: float) -> Tensor:
    """taps [tokens, num_taps, width], norms [num_taps, width], fc [width, num_taps * width]."""
    return functional.linear(rms_norm(taps, norms, epsilon).flatten(1), fc)


def project(x: Tensor, qkv: Tensor, rope: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    heads = functional.linear(x, qkv).view(len(x), num_heads + 2 * num_kv_heads, -1)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return rotate(q, rope), rotate(k, rope), v.contiguous()


def finish_layer(h: Tensor, mixed: Tensor, out: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor,
                 epsilon: float) -> Tensor:  # fmt: skip
    h = h + functional.linear(mixed, out)
    return h + functional.linear(swiglu(functional.linear(rms_norm(h, norm, epsilon), gate_up)), down)


def _enter(
    h: Tensor, e: Tensor, hidden_norm: Tensor, input_norm: Tensor, qkv: Tensor, rope: Tensor, num_heads: int,
    num_kv_heads: int, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    x = torch.cat([rms_norm(e, input_norm, epsilon), rms_norm(h, hidden_norm, epsilon)], dim=-1)
    return project(x, qkv, rope, num_heads, num_kv_heads)


class Head:
    def __init__(self, config: HeadConfig, target: Target, parameters: Parameters, *, compile: bool = False) -> None:
        self.config, self.target, self.parameters = config, target, parameters
        self.attention = ChainAttention(target.device, compile=compile)
        self.fuse = compiled_for_training(fuse_taps, enabled=compile)
        self.enter: Callable[..., tuple[Tensor, Tensor, Tensor]] = compiled_for_training(_enter, enabled=compile)
        self.finish: Callable[..., Tensor] = compiled_for_training(finish_layer, enabled=compile)

    def begin(self, features: Features, batch: Batch, *, rounded: bool = False) -> Chains:
        working = working_copies(self.parameters, self.target.dtype, rounded=rounded)
        norms = torch.stack([working[f"fc_norm.{i}.weight"] for i in range(len(self.config.taps))])
        h = self.fuse(features.taps, norms, working["fc.weight"], self.config.epsilon)
        return Chains(self, batch, working, LayerWeights.of(working, "layers.0."), working["lm_head.weight"], h)


@dataclass(slots=True)
class Chains:
    """Drafts in progress, one per entry of a batch."""

    head: Head
    batch: Batch
    working: Parameters
    layer: LayerWeights
    output: Tensor  # [draft vocabulary, width]
    h: Tensor  # [tokens, width]: the fused features, later the output of the previous step
    keys: Tensor | None = None  # of the entries
    values: Tensor | None = None
    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # keys and values of the drafted tokens
    num_fed: int = 0

    def step(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """Feed one token per place of the batch; rows for the output matrix at the chosen places."""
        head, c, layer, batch = self.head, self.head.config, self.layer, self.batch
        e = functional.embedding(tokens, head.target.weights.embedding)
        rope = head.target.rope(batch.positions() + self.num_fed, batch.length + self.num_fed)
        q, k, v = head.enter(
            self.h, e, self.working["layers.0.hidden_norm.weight"], self.working["layers.0.input_layernorm.weight"],
            layer.qkv, rope, c.num_heads, c.num_kv_heads, c.epsilon,
        )  # fmt: skip
        if self.keys is None or self.values is None:
            group = c.num_heads // c.num_kv_heads
            self.keys, self.values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            mixed = causal(q, self.keys, self.values, batch.length)
        else:
            self.own.append((k, v))
            mixed = head.attention(q, self.keys, self.values, self.own, batch.length)
        self.num_fed += 1
        self.h = head.finish(self.h, mixed, layer.out, layer.norm, layer.gate_up, layer.down, c.epsilon)
        return rms_norm(self.h[rows], self.working["norm.weight"], c.epsilon)

"""The one-pass kind of head, which lost the comparison: a block of slots after the text, all drafted together.

Slot 0 holds the text's last token, the others a learned mask; slot k predicts the token k + 1 places after it. Every
layer looks at keys and values of the target's fused features and at the block's earlier slots, so a short draft is
the beginning of a long one. What slots cannot know, the token just before, enters by a small matrix after the layers (a
Markov term), and a confidence says how likely a drafted token is accepted.

Training is the package's, with the loss of the confidence added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from outpace.backends.torch.kernels.reference import rms_norm, rotate
from outpace.models.head_file import HeadConfig
from outpace.training.batches import Batch
from outpace.training.compiling import compiled, compiled_for_training
from outpace.training.head import (
    Head,
    LayerWeights,
    Parameters,
    first_parameters,
    layer_parameters,
    project,
    working_copies,
)
from outpace.training.target import Features, Target
from outpace.training.train import Progress, Trainer, TrainSettings

NUM_LAYERS = 2
NUM_STEPS = 7  # drafted tokens per entry in training


@dataclass(frozen=True, slots=True, kw_only=True)
class OnePassConfig(HeadConfig):
    num_layers: int = NUM_LAYERS
    markov_rank: int


def start_values(config: OnePassConfig, target: Target, kept: Tensor) -> Parameters:
    """The layers begin as the target's last one. Where their MLP is a part of its MLP, each takes another part."""
    c, num_parts = config, max(target.config.hidden // config.hidden, 1)
    found = first_parameters(c, target, kept)
    for i in range(c.num_layers):
        layer = layer_parameters(replace(c, hidden=num_parts * c.hidden), target, c.width)
        for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
            layer[name] = layer[name][i % num_parts :: num_parts].clone()
        layer["mlp.down_proj.weight"] = layer["mlp.down_proj.weight"][:, i % num_parts :: num_parts].clone()
        found |= {f"layers.{i}.{name}": p for name, p in layer.items()}
    return found | {
        "hidden_norm.weight": torch.ones(c.width),
        "mask_embedding": target.weights.embedding.float().std().item() * torch.randn(c.width),
        "markov_w1.weight": torch.randn(c.vocab_size, c.markov_rank) / c.markov_rank**0.5,
        "markov_w2.weight": torch.zeros(c.draft_vocab_size, c.markov_rank),
        "confidence_head.proj.weight": torch.zeros(c.width + c.markov_rank),
        "confidence_head.proj.bias": torch.zeros(1),
    }


def _enter(
    h: Tensor, norm: Tensor, qkv: Tensor, rope: Tensor, num_heads: int, num_kv_heads: int, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    return project(rms_norm(h, norm, epsilon), qkv, rope, num_heads, num_kv_heads)


def _context(c: Tensor, qkv: Tensor, rope: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the features, for every query head."""
    size = len(qkv) // (num_heads + 2 * num_kv_heads)
    k, v = functional.linear(c, qkv[num_heads * size :]).view(len(c), 2, num_kv_heads, size).unbind(1)
    group = num_heads // num_kv_heads
    return rotate(k, rope).repeat_interleave(group, 1), v.repeat_interleave(group, 1)


class OnePassHead(Head):
    config: OnePassConfig

    def __init__(self, config: OnePassConfig, target: Target, parameters: Parameters, *, compile: bool = False) -> None:
        super().__init__(config, target, parameters, compile=compile)
        self.context = compiled_for_training(_context, enabled=compile)
        self.enter = compiled_for_training(_enter, enabled=compile)

    def begin(  # type: ignore[override]  # other chains, with the same `output` and `step`
        self, features: Features, batch: Batch, *, rounded: bool = False
    ) -> OnePassChains:
        c = self.config
        working = working_copies(self.parameters, self.target.dtype, rounded=rounded)
        norms = torch.stack([working[f"fc_norm.{i}.weight"] for i in range(len(c.taps))])
        fused = self.fuse(features.taps, norms, working["fc.weight"], c.epsilon)
        fused = rms_norm(fused, working["hidden_norm.weight"], c.epsilon)
        layers = [LayerWeights.of(working, f"layers.{i}.") for i in range(c.num_layers)]
        rope = self.target.rope(batch.positions(), batch.length)
        contexts = [self.context(fused, layer.qkv, rope, c.num_heads, c.num_kv_heads) for layer in layers]
        output = torch.cat([working["lm_head.weight"], working["markov_w2.weight"]], dim=1)
        own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
        return OnePassChains(self, batch, working, layers, contexts, output, own)


@dataclass(slots=True)
class OnePassChains:
    head: OnePassHead
    batch: Batch
    working: Parameters
    layers: list[LayerWeights]
    contexts: list[tuple[Tensor, Tensor]]
    output: Tensor  # the Markov term's matrix beside the vocabulary's: both products in one
    own: list[list[tuple[Tensor, Tensor]]]  # by layer: keys and values of the slots so far
    confidence: Tensor = field(init=False)
    """Of the last step: the logit of the chance that a token drafted from these rows is accepted."""
    num_fed: int = 0

    def step(self, tokens: Tensor, rows: Tensor) -> Tensor:
        head, c, batch, epsilon = self.head, self.head.config, self.batch, self.head.config.epsilon
        # The block begins one position after the entry's features.
        rope = head.target.rope(batch.positions() + 1 + self.num_fed, batch.length + 1 + self.num_fed)
        h = self._slot(tokens)
        for i, (layer, (keys, values)) in enumerate(zip(self.layers, self.contexts, strict=True)):
            norm = self.working[f"layers.{i}.input_layernorm.weight"]
            q, k, v = head.enter(h, norm, layer.qkv, rope, c.num_heads, c.num_kv_heads, epsilon)
            self.own[i].append((k, v))
            mixed = head.attention(q, keys, values, self.own[i], batch.length)
            h = head.finish(h, mixed, layer.out, layer.norm, layer.gate_up, layer.down, epsilon)
        self.num_fed += 1
        before = functional.embedding(tokens[rows], self.working["markov_w1.weight"])
        found = torch.cat([rms_norm(h[rows], self.working["norm.weight"], epsilon), before], dim=1)
        weight, bias = (self.working[f"confidence_head.proj.{name}"] for name in ("weight", "bias"))
        self.confidence = found.detach().float() @ weight + bias  # learns from drafts, and does not change them
        return found

    def _slot(self, tokens: Tensor) -> Tensor:
        embedding = self.head.target.weights.embedding
        if self.num_fed == 0:
            return functional.embedding(tokens, embedding)
        return self.working["mask_embedding"].to(embedding.dtype).expand(len(tokens), -1).contiguous()


# Training.


class OnePassTrainer(Trainer):
    head: OnePassHead

    def __init__(
        self, target: Target, head: OnePassHead, kept: Tensor, settings: TrainSettings, progress: Progress, *,
        compile: bool,
    ) -> None:  # fmt: skip
        super().__init__(target, head, kept, settings, progress, compile=compile)
        self._chunk_loss = compiled(_chunk_loss, enabled=compile)

    def batch_loss(self, batch: Batch) -> Tensor:
        """The package's, and the confidence should say how likely a sampled token is accepted: the overlap."""
        features = self.target.features(batch, self.head.config.taps)
        shape = self.settings.shape
        rows = (batch.entries + 1).clamp(max=len(batch.tokens) - 1)
        probs = self.loss.target_probs(features.last, rows, self.output, shape.num_steps)
        chains = self.head.begin(features, batch, rounded=self.is_rounded)
        total = torch.zeros((), device=self.target.device)
        for step in range(shape.num_steps):
            drafted = chains.step(batch.shifted(1 + step), batch.entries)
            weights = batch.weights[step] / max(batch.num_drafted[step], 1)
            here = probs[step : step + len(drafted)]
            loss, overlaps = _Loss.apply(drafted, chains.output, here, weights, shape.chunk, self._chunk_loss)  # type: ignore[no-untyped-call]
            total = total + self.settings.step_decay**step * loss
            total = total + functional.binary_cross_entropy_with_logits(
                chains.confidence, overlaps, weights, reduction="sum"
            )
        return total


ChunkLoss = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]


def _chunk_loss(x: Tensor, output: Tensor, probs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The weighted sum of cross-entropies, each row's overlap of the two distributions, and the gradients of x and
    output."""
    logits = (x @ output.T).float()
    shifted = logits - logits.amax(-1, keepdim=True)
    exponentials = torch.exp(shifted)
    sums = exponentials.sum(-1, keepdim=True)
    wide = probs.float()
    cross_entropies = torch.log(sums).squeeze(-1) * wide.sum(-1) - (wide * shifted).sum(-1)
    draft_probs = exponentials / sums
    overlaps = torch.minimum(draft_probs, wide).sum(-1)
    d_logits = ((draft_probs - wide) * weights[:, None]).to(x.dtype)
    return (cross_entropies * weights).sum(), overlaps, d_logits @ output, d_logits.T @ x


class _Loss(torch.autograd.Function):
    """The package's loss by chunks, which gives the overlaps too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, output: Tensor, probs: Tensor, weights: Tensor, chunk: int, chunk_loss: ChunkLoss
    ) -> tuple[Tensor, Tensor]:
        loss, overlaps, d_x = torch.zeros((), device=x.device), [], []
        d_output = torch.zeros(output.shape, dtype=torch.float32, device=x.device)
        for at in range(0, len(x), chunk):
            here = slice(at, at + chunk)
            part, overlap, d_rows, d_matrix = chunk_loss(x[here], output, probs[here], weights[here])
            loss += part
            overlaps.append(overlap)
            d_x.append(d_rows)
            d_output += d_matrix
        ctx.save_for_backward(torch.cat(d_x), d_output.to(output.dtype))
        joined = torch.cat(overlaps)
        ctx.mark_non_differentiable(joined)
        return loss, joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_x, d_output = ctx.saved_tensors
        return grads[0] * d_x, grads[0] * d_output, None, None, None, None

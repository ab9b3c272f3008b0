"""Drafts of both kinds of heads over a paged cache, with the torch backend's operations, as a server would make them.

The package runs the autoregressive kind only (`HeadModel`). The one-pass kind is here: the target's new features become
keys and values of every layer, and behind them lies a block of slots, [last token, mask, mask, ...], that attends to
them and to its own earlier slots. Layers run once for all slots. Then tokens are chosen slot by slot, because the
Markov term of a slot depends on the token before it. Greedy only.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_models import captured, random_caches, replay_ms
from benchmarks.head_kinds_onepass import OnePassConfig
from outpace.backends.torch.execution.pages import PAGE_TOKENS
from outpace.backends.torch.execution.step import HostStep, StepInputs, StepShape, views
from outpace.backends.torch.kernels.base import Cache, Hidden, Ops
from outpace.backends.torch.model.head import HeadModel
from outpace.backends.torch.model.head_weights import HeadWeights, allocate_head
from outpace.backends.torch.model.taps import TapStore
from outpace.backends.torch.model.weights import Layer, allocate_layer
from outpace.backends.torch.storage import plain_tensor
from outpace.models.architecture import Architecture
from outpace.models.head_file import HeadConfig
from outpace.training.head import LayerWeights

NEW_ENTRIES = 3  # per request: features that the last step of the target added, about as many as tokens a step


@dataclass(slots=True)
class OnePassWeights:
    fuse: Tensor  # [width, taps * width]
    tap_norm: Tensor  # [taps, width]
    hidden_norm: Tensor
    mask: Tensor  # [width]: the embedding of slots after the first
    layers: list[Layer]
    final_norm: Tensor
    head: Tensor  # [draft vocabulary, width]
    ids: Tensor  # int64 [draft vocabulary]: the target's tokens
    markov_in: Tensor  # [vocabulary, rank]
    markov_out: Tensor  # [draft vocabulary, rank]

    @classmethod
    def of(cls, config: OnePassConfig, parameters: Mapping[str, Tensor], kept: Tensor, like: Tensor) -> OnePassWeights:
        """From a training's parameters, in the dtype and on the device of `like`."""
        p = {name: tensor.detach().to(like) for name, tensor in parameters.items()}
        layers = []
        for i in range(config.num_layers):
            fused = LayerWeights.of(p, f"layers.{i}.")
            layers.append(
                Layer(
                    attention_norm=p[f"layers.{i}.input_layernorm.weight"], qkv=fused.qkv, qkv_bias=None, q_norm=None,
                    k_norm=None, out=fused.out, out_bias=None, mlp_norm=fused.norm, gate_up=fused.gate_up,
                    gate_up_bias=None, down=fused.down, down_bias=None,
                )
            )  # fmt: skip
        return cls(
            fuse=p["fc.weight"], tap_norm=torch.stack([p[f"fc_norm.{i}.weight"] for i in range(len(config.taps))]),
            hidden_norm=p["hidden_norm.weight"], mask=p["mask_embedding"], layers=layers, final_norm=p["norm.weight"],
            head=p["lm_head.weight"], ids=kept.to(like.device), markov_in=p["markov_w1.weight"],
            markov_out=p["markov_w2.weight"],
        )  # fmt: skip

    @classmethod
    def random(cls, config: OnePassConfig, dtype: torch.dtype, device: torch.device) -> OnePassWeights:
        c = config

        def matrix(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, 0.02)

        layers = [allocate_layer(c, inputs=c.width, dtype=dtype, device=device) for _ in range(c.num_layers)]
        for layer in layers:
            _randomise(layer)
        ones = torch.ones(c.width, dtype=dtype, device=device)
        return cls(
            fuse=matrix(c.width, len(c.taps) * c.width), tap_norm=ones.repeat(len(c.taps), 1), hidden_norm=ones,
            mask=matrix(c.width), layers=layers, final_norm=ones, head=matrix(c.draft_vocab_size, c.width),
            ids=torch.arange(c.draft_vocab_size, device=device), markov_in=matrix(c.vocab_size, c.markov_rank),
            markov_out=matrix(c.draft_vocab_size, c.markov_rank),
        )  # fmt: skip


class Drafter(Protocol):
    def draft(self, taps: Tensor, tokens: Tensor, depth: int) -> Tensor: ...


class OnePassDrafter:
    """Drafts for `num_rows` requests at once, each with `known` tokens of which the last has no features yet."""

    def __init__(
        self, config: OnePassConfig, weights: OnePassWeights, ops: Ops, embedding: Tensor, rope: Tensor,
        caches: Sequence[Cache], num_rows: int, known: int, table_width: int,
    ) -> None:  # fmt: skip
        self.config, self.weights, self._ops, self._embedding, self._rope = config, weights, ops, embedding, rope
        self._caches, self._num_rows, self._known, self._table_width = caches, num_rows, known, table_width
        self._steps: dict[tuple[int, int], StepInputs] = {}

    @torch.inference_mode()
    def draft(self, taps: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """taps [rows * entries, num_taps, width]: those that the cache lacks. tokens [rows]: each one's last.
        Returns [rows, depth]."""
        c, w, ops, rows = self.config, self.weights, self._ops, self._num_rows
        fused = ops.norm(fuse(ops, taps, w.tap_norm, w.fuse, c.epsilon), w.hidden_norm, c.epsilon)
        step = self._step(len(taps) // rows, depth)
        block = w.mask.repeat(rows, depth, 1)
        block[:, 0] = ops.embed(tokens, self._embedding).residual
        h = Hidden(block.view(rows * depth, -1))
        following = [layer.attention_norm for layer in w.layers[1:]] + [w.final_norm]
        for layer, cache, next_norm in zip(w.layers, self._caches, following, strict=True):
            h = self._layer(h, fused, layer, cache, step, next_norm)
        logits = ops.norm_logits(h, w.final_norm, c.epsilon, w.head).view(rows, depth, -1)
        drafted = []
        for slot in range(depth):
            markov = functional.linear(functional.embedding(tokens, w.markov_in), w.markov_out)
            tokens = w.ids[(logits[:, slot] + markov).argmax(-1)].to(tokens.dtype)
            drafted.append(tokens)
        return torch.stack(drafted, 1)

    def _layer(
        self, h: Hidden, fused: Tensor, layer: Layer, cache: Cache, step: StepInputs, next_norm: Tensor
    ) -> Hidden:
        c, ops, rows = self.config, self._ops, self._num_rows
        mine = ops.norm_linear(h, layer.attention_norm, c.epsilon, layer.qkv, None).view(rows, -1, step_width(c))
        # Entries have keys and values only; what their empty queries find is left out.
        theirs = functional.pad(ops.linear(fused, plain_tensor(layer.qkv)[c.q_size :]), (c.q_size, 0))
        theirs = theirs.view(rows, -1, step_width(c))
        qkv = torch.cat([theirs, mine], 1).view(-1, step_width(c))
        mixed = ops.attend(qkv, cache, step, self._rope, None, None, c.epsilon).view(rows, -1, c.q_size)
        mixed = mixed[:, theirs.shape[1] :].contiguous().view(-1, c.q_size)
        h = ops.linear_add(mixed, layer.out, None, h, layer.mlp_norm)
        x = ops.norm_swiglu(h, layer.mlp_norm, c.epsilon, layer.gate_up, None)
        return ops.linear_add(x, layer.down, None, h, next_norm)

    def _step(self, entries: int, depth: int) -> StepInputs:
        if (entries, depth) not in self._steps:
            self._steps[entries, depth] = rows_step(
                self._num_rows, entries + depth, self._known - 1 + depth, self._table_width, self._embedding.device
            )
        return self._steps[entries, depth]


class ChainDrafter:
    """The same for the autoregressive kind: the first pass takes in the new entries, each further pass one token."""

    def __init__(
        self, config: HeadConfig, weights: HeadWeights, ops: Ops, embedding: Tensor, rope: Tensor, cache: Cache,
        num_rows: int, known: int, table_width: int, most: int, entries: int = NEW_ENTRIES,
    ) -> None:  # fmt: skip
        """Drafts have at most `most` tokens. The cache's first position is unused."""
        device = embedding.device
        taps = TapStore(config.taps, 1, PAGE_TOKENS, config.width, embedding)  # stays unused: `draft` gets the taps
        self._model = HeadModel(config, weights, ops, embedding, taps, cache, rope)
        self.config, self.weights, self._ops = config, weights, ops
        self._first = rows_step(num_rows, entries, known, table_width, device, last_only=True)
        self._others = [rows_step(num_rows, 1, known + i, table_width, device) for i in range(1, most)]

    @torch.inference_mode()
    def draft(self, taps: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """tokens [rows * entries]: those of the new entries, the last one of each row included."""
        w, c = self.weights, self.config
        assert w.tap_norm is not None
        states, drafted = fuse(self._ops, taps, w.tap_norm, plain_tensor(w.fuse), c.epsilon), []
        for step in [self._first, *self._others[: depth - 1]]:
            step.tokens.copy_(tokens)
            logits, states = self._model.forward(step, states)
            tokens = w.ids[logits.argmax(-1)].to(tokens.dtype)
            drafted.append(tokens)
        return torch.stack(drafted, 1)


def step_width(config: HeadConfig) -> int:
    return config.q_size + 2 * config.kv_size


def fuse(ops: Ops, taps: Tensor, norms: Tensor, matrix: Tensor, epsilon: float) -> Tensor:
    """taps [tokens, num_taps, width] to [tokens, width]."""
    parts = [ops.norm(taps[:, i].contiguous(), norm, epsilon) for i, norm in enumerate(norms)]
    return ops.linear(torch.cat(parts, 1), matrix)


def rows_step(
    num_rows: int, row_tokens: int, context: int, table_width: int, device: torch.device, *, last_only: bool = False
) -> StepInputs:
    """Rows of equal length, each on `table_width` pages of its own; `context` counts the new tokens."""
    tokens = num_rows * row_tokens
    num_outputs = num_rows if last_only else tokens
    host = HostStep(StepShape(tokens, num_rows, num_outputs, row_tokens, table_width), pinned=False)
    for row in range(num_rows):
        begin, end = row * row_tokens, (row + 1) * row_tokens
        host.begins[row], host.lengths[row], host.contexts[row] = begin, row_tokens, context
        host.positions[begin:end] = range(context - row_tokens, context)
        host.token_rows[begin:end] = row
        host.tables[row] = range(row * table_width, (row + 1) * table_width)
    host.outputs[:] = [(row + 1) * row_tokens - 1 for row in range(num_rows)] if last_only else range(tokens)
    return views(host.buffer.to(device), host.shape)


def draft_ms(
    config: HeadConfig, shape: Architecture, ops: Ops, embedding: Tensor, num_rows: int, depths: Sequence[int],
    context: int,
) -> dict[int, float]:  # fmt: skip
    """Milliseconds of a draft by depth, in one CUDA graph each; weights are random."""
    device, dtype, c = embedding.device, embedding.dtype, config
    rope = torch.from_numpy(shape.rope.table(context + 2 * max(depths))).to(device)
    table_width = -(-(context + max(depths)) // PAGE_TOKENS)
    num_layers = c.num_layers if isinstance(c, OnePassConfig) else 1
    caches = random_caches(shape, num_rows * table_width, device, num_layers=num_layers, dtype=dtype)
    taps = torch.randn((num_rows * NEW_ENTRIES, len(c.taps), c.width), device=device).to(dtype)
    drafter: Drafter
    if isinstance(c, OnePassConfig):
        weights = OnePassWeights.random(c, dtype, device)
        drafter = OnePassDrafter(c, weights, ops, embedding, rope, caches, num_rows, context, table_width)
        num_tokens = num_rows
    else:
        chain = allocate_head(c, dtype, device)
        _randomise(chain, chain.layer)
        chain.ids.copy_(torch.arange(c.draft_vocab_size))
        drafter = ChainDrafter(c, chain, ops, embedding, rope, caches[0], num_rows, context, table_width, max(depths))
        num_tokens = num_rows * NEW_ENTRIES
    tokens = torch.randint(0, c.draft_vocab_size, (num_tokens,), dtype=torch.int32, device=device)
    found = {}
    for depth in depths:
        graph = captured(lambda d=depth: drafter.draft(taps, tokens, d))  # type: ignore[misc]
        found[depth] = statistics.median(replay_ms(graph))
    return found


def _randomise(*holders: HeadWeights | Layer) -> None:
    for holder in holders:
        for name in holder.__dataclass_fields__:
            tensor = getattr(holder, name)
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                if tensor.dim() == 1 or name == "tap_norm":
                    tensor.fill_(1.0)
                else:
                    tensor.normal_(0.0, 0.02)

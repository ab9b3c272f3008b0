"""Every operation of a layer in plain torch: the reference for the Triton kernels, and the path without a GPU.

Sums are float32 for any dtype of the weights. Tokens in gaps (position -1) get undefined but finite results.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from outpace.backends.torch.execution.step import StepInputs, StepShape
from outpace.backends.torch.kernels.base import LLAMA, Cache, Hidden, Scores
from outpace.backends.torch.storage import Weight, dense, split_rows
from outpace.backends.torch.storage.scaled import round_to_scaled
from outpace.models.architecture import Experts


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * weight.float()).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """[tokens, 2 hidden] to [tokens, hidden]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def geglu(gate_up: Tensor) -> Tensor:
    """[tokens, 2 hidden] to [tokens, hidden]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def route(logits: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Each token's experts and their weights, both [tokens, experts per token]; the weights are float32."""
    weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(experts.per_token)
    if experts.is_normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights


class ReferenceOps:
    has_trees = True

    def product(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, matrix, bias)

    def embed(self, tokens: Tensor, embedding: Tensor) -> Hidden:
        return Hidden(functional.embedding(tokens, embedding))

    def norm(self, x: Tensor, norm: Tensor, epsilon: float) -> Tensor:
        return rms_norm(x, norm, epsilon)

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        return self.product(x, dense(weight, x.dtype))

    def norm_linear(self, h: Hidden, norm: Tensor, epsilon: float, weight: Weight, bias: Tensor | None) -> Tensor:
        return self.product(rms_norm(h.residual, norm, epsilon), dense(weight, h.residual.dtype), bias)

    def linear_add(self, x: Tensor, weight: Weight, bias: Tensor | None, h: Hidden, next_norm: Tensor) -> Hidden:
        return Hidden(h.residual + self.product(x, dense(weight, x.dtype), bias))

    def linear_norm_add(
        self, x: Tensor, weight: Weight, bias: Tensor | None, norm: Tensor, epsilon: float, h: Hidden, next_norm: Tensor
    ) -> Hidden:
        return Hidden(h.residual + rms_norm(self.product(x, dense(weight, x.dtype), bias), norm, epsilon))

    def geglu(self, gate_up: Tensor) -> Tensor:
        return geglu(gate_up)

    def experts(
        self, x: Tensor, positions: Tensor, router: Tensor, gate_up: Weight, down: Weight, experts: Experts
    ) -> Tensor:
        chosen, weights = route(self.product(x, router), experts)
        out = torch.zeros_like(x, dtype=torch.float32)
        first, second = (split_rows(each, [each.shape[0] // experts.count] * experts.count) for each in (gate_up, down))
        for number in chosen.unique().tolist():
            tokens, places = (chosen == number).nonzero(as_tuple=True)
            hidden = swiglu(self.product(x[tokens], dense(first[number], x.dtype)))
            mine = self.product(hidden, dense(second[number], x.dtype))
            out.index_add_(0, tokens, mine * weights[tokens, places, None])
        return out.to(x.dtype)

    def norm_swiglu(self, h: Hidden, norm: Tensor, epsilon: float, weight: Weight, bias: Tensor | None) -> Tensor:
        return swiglu(self.product(rms_norm(h.residual, norm, epsilon), dense(weight, h.residual.dtype), bias))

    def norm_logits(self, h: Hidden, norm: Tensor, epsilon: float, head: Weight, room: Tensor | None = None) -> Tensor:
        logits = self.product(rms_norm(h.residual, norm, epsilon), dense(head, h.residual.dtype)).float()
        return logits if room is None else room.copy_(logits)

    def attend(
        self,
        qkv: Tensor,
        cache: Cache,
        step: StepInputs,
        rope: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        epsilon: float,
        scores: Scores = LLAMA,
    ) -> Tensor:
        q = self.rotate_and_store(qkv, cache, step, rope, q_norm, k_norm, epsilon)
        return self.attention(q, cache, step, scores)

    def rotate_and_store(
        self,
        qkv: Tensor,
        cache: Cache,
        step: StepInputs,
        rope: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        epsilon: float,
    ) -> Tensor:
        _, num_kv_heads, page_tokens, dim = cache.keys.shape
        heads = qkv.view(len(qkv), -1, dim)
        num_heads = heads.shape[1] - 2 * num_kv_heads
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        k = k if cache.key_scales is None else k.float()  # rounded once, to 8 bits
        if q_norm is not None and k_norm is not None:
            q, k = rms_norm(q, q_norm, epsilon), rms_norm(k, k_norm, epsilon)
        real = (step.positions >= 0).nonzero().squeeze(1)
        positions = step.positions.clamp(min=0).long()
        q, k = rotate(q, rope[positions]), rotate(k, rope[positions])
        rows = step.token_rows[real].long()
        places = step.slots()[real].long()
        pages = step.tables[rows, places // page_tokens].long()
        for numbers, part, scales in ((k, cache.keys, cache.key_scales), (v, cache.values, cache.value_scales)):
            new = numbers[real]
            if scales is not None:
                codes = round_to_scaled(new.reshape(-1, dim), part.dtype)
                scales[pages, :, places % page_tokens] = codes.scales.view(-1, num_kv_heads)
                new = codes.values.view(new.shape)
            part[pages, :, places % page_tokens] = new
        return q.contiguous()

    def attention(self, q: Tensor, cache: Cache, step: StepInputs, options: Scores = LLAMA) -> Tensor:
        _, num_kv_heads, page_tokens, dim = cache.keys.shape
        group = q.shape[1] // num_kv_heads
        mixed = torch.zeros_like(q)
        for row in range(step.shape.num_rows):
            begin, length, context = (int(each[row]) for each in (step.begins, step.lengths, step.contexts))
            if not length:
                continue
            pages = step.tables[row, : -(-context // page_tokens)].long()
            k, v = (
                _numbers(part[pages], None if scales is None else scales[pages])
                .transpose(0, 1)
                .reshape(num_kv_heads, -1, dim)[:, :context]
                for part, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales))
            )
            # Query heads that share a key head are rows of one product, so keys are not copied.
            mine = q[begin : begin + length].float().view(length, num_kv_heads, group, dim)
            mine = mine.permute(1, 2, 0, 3).reshape(num_kv_heads, group * length, dim)
            scores = (mine @ k.transpose(1, 2)) * (options.scale or dim**-0.5)
            if options.softcap is not None:
                scores = (scores / options.softcap).tanh() * options.softcap
            hidden = torch.ones((length, context), dtype=torch.bool, device=q.device).triu(context - length + 1)
            hidden[:, : cache.first] = True
            if step.branches is not None:
                masks, nodes = (
                    step.branches.masks[begin : begin + length, None],
                    context - int(step.branches.roots[row]),
                )
                # A mask has no bit for what is not a node.
                of_nodes = masks >> torch.arange(nodes, device=q.device) & 1
                is_node = masks != 0
                hidden[:, context - nodes :] = torch.where(is_node, of_nodes == 0, hidden[:, context - nodes :])
            if options.window is not None:
                new = step.positions[begin : begin + length]
                known = torch.arange(context - length, device=q.device)
                hidden |= torch.cat([known, new]) <= new[:, None] - options.window
            scores.masked_fill_(hidden.repeat(group, 1), -torch.inf)
            out = (scores.softmax(-1) @ v).view(num_kv_heads, group, length, dim).permute(2, 0, 1, 3)
            mixed[begin : begin + length] = out.reshape(length, -1, dim).to(q.dtype)
        return mixed.view(len(q), -1)


class InvariantReferenceOps(ReferenceOps):
    """Token by token, so that no sum depends on what else is in the step."""

    has_trees = False

    def product(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        parts = [functional.linear(token, matrix, bias) for token in x.split(1)]
        return torch.cat(parts) if parts else functional.linear(x, matrix, bias)

    def attention(self, q: Tensor, cache: Cache, step: StepInputs, options: Scores = LLAMA) -> Tensor:
        if step.branches is not None:
            raise NotImplementedError("trees of tokens have no fixed order of sums")
        shape, each = step.shape, torch.arange(len(q), device=q.device)
        alone = replace(
            step,
            shape=StepShape(len(q), len(q), len(q), 1, shape.table_width),
            begins=each,
            lengths=(step.positions >= 0).int(),
            contexts=step.positions + 1,
            tables=step.tables[step.token_rows.long()],
        )
        return super().attention(q, cache, alone, options)


def _numbers(codes: Tensor, scales: Tensor | None) -> Tensor:
    """Numbers of a cache, in float32."""
    return codes.float() if scales is None else codes.float() * scales[..., None]


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate [tokens, heads, dim] by cosines and sines [tokens, dim]; pairs lie across the two halves of a head."""
    cosines, sines = rope[:, None].chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1).to(x.dtype)

"""Attention of many drafts at once: every entry of a text has a chain of drafted tokens of its own.

A drafted token looks at all entries of its text up to the one its chain began with, and at the earlier tokens of its
own chain. The first part is ordinary causal attention, for which a fused kernel exists; the second is a handful of
keys per query. Both parts are joined by their log-sum-exp. The fused kernel's backward pass takes the joined output
and log-sum-exp in place of its own: then its probabilities are those of the joined softmax, and its gradients exact.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outpace.training.compiling import compiled

_MOST_ERROR = 0.03  # relative, in bfloat16
_log = logging.getLogger("outpace.training")


class ChainAttention:
    def __init__(self, device: torch.device, *, compile: bool = False) -> None:
        # The fused kernel's operators are not part of torch's public interface: another version may change them.
        self._is_fused = device.type != "cuda" or _is_exact(device)
        self.join = compiled(_join, enabled=compile)
        self.gradients = compiled(_own_gradients, enabled=compile)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, own: list[tuple[Tensor, Tensor]], length: int) -> Tensor:
        """q, k, v [tokens, heads, dim] of entries in rows of `length`; `own`: keys and values [tokens, kv heads, dim]
        of each token of the chains so far, this one included. [tokens, heads * dim]"""
        if not self._is_fused:
            return plain_chain(q, k, v, own, length)
        own_k, own_v = (torch.stack([pair[i] for pair in own], dim=1) for i in (0, 1))
        join = self.join if torch.is_grad_enabled() else _join
        mixed: Tensor = _Chain.apply(q, k, v, own_k, own_v, length, join, self.gradients)  # type: ignore[no-untyped-call]
        return mixed.reshape(len(q), -1)


def _join(q: Tensor, lse: Tensor, causal: Tensor, own_k: Tensor, own_v: Tensor) -> tuple[Tensor, Tensor]:
    """q and causal [tokens, heads, dim]; lse [tokens, heads]; own [tokens, chain, kv heads, dim]. The joined output and
    log-sum-exp."""
    scores = _own_scores(q, own_k)  # [tokens, chain, kv heads, group]
    lse = lse.view(scores.shape[0], *scores.shape[2:])
    total = torch.logaddexp(lse, scores.logsumexp(1))
    own = (torch.exp(scores - total[:, None])[..., None] * own_v.float()[:, :, :, None]).sum(1)
    joined = own + torch.exp(lse - total)[..., None] * causal.float().view(own.shape)
    return joined.to(q.dtype).view(q.shape), total.reshape(len(q), -1)


def _own_scores(q: Tensor, own_k: Tensor) -> Tensor:
    num_tokens, _, num_kv_heads, dim = own_k.shape
    groups = q.float().view(num_tokens, 1, num_kv_heads, -1, dim)
    scores: Tensor = (groups * own_k.float()[:, :, :, None]).sum(-1)
    return scores / math.sqrt(dim)


def _own_gradients(
    grad: Tensor, q: Tensor, joined: Tensor, total: Tensor, own_k: Tensor, own_v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q (the own part), own_k and own_v."""
    num_tokens, _, num_kv_heads, dim = own_k.shape
    shape = (num_tokens, 1, num_kv_heads, -1, dim)
    wide = grad.float().view(shape)
    probs = torch.exp(_own_scores(q, own_k) - total.view(num_tokens, 1, num_kv_heads, -1))
    delta = (wide * joined.float().view(shape)).sum(-1)
    d_scores = probs * ((wide * own_v.float()[:, :, :, None]).sum(-1) - delta) * dim**-0.5
    d_q = (d_scores[..., None] * own_k.float()[:, :, :, None]).sum(1)
    d_k = (d_scores[..., None] * q.float().view(shape)).sum(3)
    d_v = (probs[..., None] * wide).sum(3)
    return d_q.to(q.dtype).view(q.shape), d_k.to(q.dtype), d_v.to(q.dtype)


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, length: int,
        join: Callable[..., tuple[Tensor, Tensor]], gradients: Callable[..., tuple[Tensor, Tensor, Tensor]],
    ) -> Tensor:  # fmt: skip
        out, lse, *state = _fused(*(_rows(each, length) for each in (q, k, v)))
        joined, total = join(q, lse.transpose(1, 2).reshape(q.shape[:2]), _flat(out), own_k, own_v)
        ctx.save_for_backward(q, k, v, own_k, own_v, joined, total)
        ctx.length, ctx.gradients, ctx.state = length, gradients, state
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, own_k, own_v, joined, total = ctx.saved_tensors
        grad, length = grads[0].contiguous(), ctx.length
        lse = total.view(-1, length, q.shape[1]).transpose(1, 2).contiguous()
        inputs = tuple(_rows(each, length) for each in (grad, q, k, v, joined))
        d_q, d_k, d_v = (_flat(each) for each in _fused_backward(inputs, lse, ctx.state))
        own_q, d_own_k, d_own_v = ctx.gradients(grad, q, joined, total, own_k, own_v)
        return d_q + own_q, d_k, d_v, d_own_k, d_own_v, None, None, None


def _rows(x: Tensor, length: int) -> Tensor:
    return x.view(-1, length, *x.shape[1:]).transpose(1, 2)


def _flat(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _fused(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Output, log-sum-exp [rows, heads, length], and what the backward pass wants to have back."""
    aten = torch.ops.aten
    if q.is_cuda:
        return tuple(aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[:8])
    return tuple(aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True))


def _fused_backward(inputs: tuple[Tensor, ...], lse: Tensor, state: list[Any]) -> list[Tensor]:
    """Gradients of q, k and v. `inputs`: the output's gradient, q, k, v, and the output."""
    aten = torch.ops.aten
    if not lse.is_cuda:
        return list(aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, lse, 0.0, True))
    cum_q, cum_k, max_q, max_k, *random = state
    return list(
        aten._scaled_dot_product_flash_attention_backward(*inputs, lse, cum_q, cum_k, max_q, max_k, 0.0, True, *random)
    )


def plain_chain(q: Tensor, k: Tensor, v: Tensor, own: list[tuple[Tensor, Tensor]], length: int) -> Tensor:
    """The same with all scores in memory: the reference."""
    rows, keys, values = (_rows(each, length).float() for each in (q, k, v))
    group = q.shape[1] // own[0][0].shape[1]
    scores = rows @ keys.transpose(2, 3)
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    parts = [scores.masked_fill(hidden, -torch.inf)]
    chains = [tuple(_rows(each.repeat_interleave(group, 1), length).float() for each in pair) for pair in own]
    parts += [(rows * own_keys).sum(-1, keepdim=True) for own_keys, _ in chains]
    probs = torch.softmax(torch.cat(parts, dim=-1) / math.sqrt(q.shape[2]), dim=-1)
    mixed = probs[..., :length] @ values
    for i, (_, own_values) in enumerate(chains):
        mixed = mixed + probs[..., length + i, None] * own_values
    return _flat(mixed).to(q.dtype).reshape(len(q), -1)


def _is_exact(device: torch.device) -> bool:
    """Whether the fused operators exist here and give the reference's output and gradients."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(128, heads, 64, generator=generator).to(device, torch.bfloat16) for heads in (6, 6, 6, 2, 2)]
    found = []
    try:
        for function in (ChainAttention(torch.device("cpu")), plain_chain):
            q, k, v, own_k, own_v = inputs = [each.clone().requires_grad_() for each in made]
            out = function(q, k, v, [(own_k, own_v), (own_v, own_k)], 64)
            found.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)])
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        _log.warning("the fused attention cannot be used (%s); training is slower", error)
        return False
    worst = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(*found, strict=True))
    if worst > _MOST_ERROR:
        _log.warning("the fused attention differs by %.3f; training is slower without it", worst)
    return worst <= _MOST_ERROR

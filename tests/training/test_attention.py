"""Attention of many drafts at once: the fused form equals the plain one, and both a loop over single queries."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[distill]")

import torch

from outpace.training import attention
from outpace.training.attention import ChainAttention, plain_chain

ROWS, LENGTH, HEADS, KV_HEADS, DIM = 2, 12, 4, 2, 8


def inputs(chain: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(HEADS, DIM)] * 3 + [(KV_HEADS, DIM)] * (2 * chain)
    return [torch.randn(ROWS * LENGTH, *shape, requires_grad=True) for shape in shapes]


def pairs(tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def one_by_one(q, k, v, own) -> torch.Tensor:
    out = []
    for n in range(ROWS * LENGTH):
        begin = n // LENGTH * LENGTH
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            keys = torch.cat([k[begin : n + 1, head], *(each[n, kv][None] for each, _ in own)])
            values = torch.cat([v[begin : n + 1, head], *(each[n, kv][None] for _, each in own)])
            out.append((keys @ q[n, head] / DIM**0.5).softmax(0) @ values)
    return torch.stack(out).view(ROWS * LENGTH, -1)


@pytest.mark.parametrize("chain", [1, 3])
@pytest.mark.parametrize("name", ["fused", "plain"])
def test_output_and_gradients_are_those_of_single_queries(name, chain):
    function = ChainAttention(torch.device("cpu")) if name == "fused" else plain_chain
    tensors = inputs(chain)
    q, k, v, *own = tensors
    found, expected = function(q, k, v, pairs(own), LENGTH), one_by_one(q, k, v, pairs(own))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    mix = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad((each * mix).sum(), tensors) for each in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_check_before_training_accepts_the_kernel_and_rejects_a_wrong_one(monkeypatch):
    device = torch.device("cpu")
    assert attention._is_exact(device)
    right = attention._fused_backward
    monkeypatch.setattr(attention, "_fused_backward", lambda *given: [2 * each for each in right(*given)])
    assert not attention._is_exact(device)

    def missing(*_):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(attention, "_fused_backward", missing)
    assert not attention._is_exact(device)

"""The children of a tree's nodes: the tokens that come first when the draft's distribution meets the target's noise.

A target's token is the one with the largest probability / noise (`decoding/sampling.choose`), its noise a function of
seed, position and token. So the tokens with the largest of the draft's probability / noise are the likeliest to equal
it. Greedy requests have no noise. Filters and penalties are left to the target, as in a chain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.backends.torch.sampling.noise import exponentials, keys
from outpace.backends.torch.sampling.numerics import powers_of_two
from outpace.decoding.randomness import Purpose


def first_tokens(logits: Tensor, columns: Tensor, words: Tensor, level: int, count: int, *, samples: bool) -> Tensor:
    """int32 [nodes, count]: the first tokens after each node, best first; of equals, the one with the lower column.

    `logits` [nodes, columns], of equally many nodes per request, and `columns` the tokens that they are about. `words`
    are those of draws, by request (`draws.DrawWords`), with the position after which the tree begins; the tokens lie
    `level` positions after that. Without `samples`, every request is greedy.
    """
    if logits.is_cuda:
        from outpace.backends.torch.kernels import children

        return children.first_tokens(logits, columns, words, level, count, samples=samples)
    scores = logits.double()
    if samples:
        seed, position, sharpness, is_greedy = words[:4].repeat_interleave(len(logits) // words.shape[1], 1)
        x = (logits - logits.amax(1, keepdim=True)) * sharpness.view(torch.float64).float()[:, None]
        noise = exponentials(keys(seed, Purpose.TOKEN, position + level)[:, None], columns)
        scores = torch.where(is_greedy[:, None] != 0, scores, powers_of_two(x).double() / noise)
    return columns[scores.sort(dim=1, descending=True, stable=True).indices[:, :count]].int()

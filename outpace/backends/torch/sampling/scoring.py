"""Log-probabilities of prompt tokens, computed where the logits are: numpy takes 0.3 ms for a row of 152,000.

`token_logprob` of `decoding/sampling.py` is the reference, apart from the rounding of `exp`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.core import TokenLogprob

_MOST_NUMBERS = 1 << 22  # of logits at once: a sort key and other copies take eight times as many bytes


def score(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """`logits` float32 [tokens, vocab_size]: row i precedes tokens[i]."""
    size = max(1, _MOST_NUMBERS // logits.shape[1])
    found: list[TokenLogprob] = []
    for begin in range(0, len(tokens), size):
        found += _score(logits[begin : begin + size], tokens[begin : begin + size], num_top)
    return found


def _score(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    wanted = torch.tensor(tokens, device=logits.device)[:, None]
    largest = logits.amax(1, keepdim=True)
    log_totals = largest.double() + (logits - largest).exp().sum(1, keepdim=True, dtype=torch.float64).log()
    own = logits.gather(1, wanted)
    ranks = 1 + (logits > own).sum(1)
    top = _likeliest(logits, min(num_top, logits.shape[1]))
    columns = [(own.double() - log_totals)[:, 0], ranks, top, logits.gather(1, top).double() - log_totals]
    return [
        TokenLogprob(token, logprob, list(zip(ids, logprobs, strict=True)), rank)
        for token, logprob, rank, ids, logprobs in zip(tokens, *(column.tolist() for column in columns), strict=True)
    ]


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """The likeliest tokens of rows, best first, [rows, count]; the lower id among equals, which topk does not keep."""
    logits = logits + 0.0  # minus zero equals zero
    bits = logits.view(torch.int32).long()
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # as the numbers are ordered
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (ordered * logits.shape[1] - ids).topk(count, dim=1).indices

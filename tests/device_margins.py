"""How close the host's decisions came to falling the other way, in float64.

The device code and the host compute in float32 and round differently in `exp` and in sums. Where they decide
differently, one of the numbers compared must have been within rounding of the other: a test that finds a difference
asks here how close it was, and accepts nothing above `ROUNDING`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outpace.config import SamplingParams
from outpace.randomness import Purpose, gumbels, key, uniform
from outpace.sampling import HEAD_RATIO

FloatRow = NDArray[np.float32]
DoubleRow = NDArray[np.float64]

# A few float32 roundings (6e-8 each), of probabilities or relative to them.
ROUNDING = 3e-6
_LARGEST = float(np.finfo(np.float32).max)


def token_margin(adjusted: FloatRow, params: SamplingParams, seed: int, position: int) -> float:
    """Of the token chosen: the least distance of anything compared on the way to it."""
    if params.is_greedy:
        return np.inf
    margins = [np.inf]
    with np.errstate(over="ignore"):  # these two float32 operations are the same everywhere, to the bit
        z = (adjusted - adjusted.max()) * np.float32(min(1.0 / params.temperature, _LARGEST))
    weights = np.exp(z.astype(np.float64))
    order = np.lexsort((np.arange(z.size), -adjusted))
    k = params.top_k
    if 0 < k < z.size:
        inside, outside = order[k - 1], order[k]
        if adjusted[inside] != adjusted[outside] and weights[outside] > 0:
            margins.append(weights[inside] / weights[outside] - 1)
        weights[order[k:]] = 0
    p = weights / weights.sum()
    if params.top_p < 1:
        mass = np.cumsum(p[order])
        margins.append(np.abs(mass - params.top_p).min())
        p[order[np.searchsorted(mass, params.top_p) + 1 :]] = 0
    ratios = p[(p > 0) & (p < p.max())] / p.max()
    if params.min_p > 0:
        margins.append(np.abs(ratios / params.min_p - 1).min(initial=np.inf))
        p[p < p.max() * params.min_p] = 0
    p /= p.sum()
    margins.append(np.abs(ratios / float(HEAD_RATIO) - 1).min(initial=np.inf))
    margins.append(_draw_margin(p, seed, position))
    return float(min(margins))


def _draw_margin(p: DoubleRow, seed: int, position: int) -> float:
    cut = p.max() * float(HEAD_RATIO)
    head, tail = np.flatnonzero(p >= cut), np.flatnonzero((p > 0) & (p < cut))
    token_key = key(seed, Purpose.TOKEN, position)
    scores = np.sort(np.log(p[head]) + gumbels(token_key, head))
    margin = float(scores[-1] - scores[-2]) if scores.size > 1 else np.inf
    if tail.size == 0:
        return margin
    # The tail's mass is what the head's leaves of one, so its error is absolute.
    tail_noise = gumbels(token_key, np.array([-1]))[0]
    border = np.exp(scores[-1] - tail_noise)  # the mass with which the tail would just win
    to_border = abs(float(p[tail].sum() - border))
    if p[tail].sum() < border:
        return min(margin, to_border)
    tail_scores = np.sort(np.log(p[tail]) + gumbels(key(seed, Purpose.TAIL, position), tail))
    return min(to_border, float(tail_scores[-1] - tail_scores[-2]) if tail.size > 1 else np.inf)


def weighted_margin(weights: NDArray[np.floating], noise: float) -> float:
    """Of an inverse transform: how far the aim was from the nearest border between two tokens."""
    ends = np.cumsum(weights, dtype=np.float64)
    return float(np.abs(ends[:-1][np.diff(ends) > 0] - noise * ends[-1]).min(initial=np.inf))


def verdict_margin(
    tokens: list[int], draft_probs: list[FloatRow], target_probs: list[FloatRow], seed: int, anchor: int, rule: str
) -> float:
    """Of a verdict of rejection sampling ("rejection") or of block verification ("block")."""
    draft = [row.astype(np.float64) for row in draft_probs]
    target = [row.astype(np.float64) for row in target_probs]
    noise = [uniform(key(seed, Purpose.ACCEPT, anchor, i)) for i in range(len(tokens))]
    margins, weight, accepted, final = [np.inf], 1.0, 0, target[0] if not tokens else None
    for i, token in enumerate(tokens):
        if final is None:
            final = np.maximum(target[0] - draft[0], 0)
        ratio = target[i][token] / draft[i][token]
        if rule == "rejection":
            margins.append(abs(noise[i] - min(1.0, ratio)))
            if noise[i] >= ratio:
                final = np.maximum(target[i] - draft[i], 0)
                break
            accepted, final = i + 1, target[i + 1]
            continue
        weight = min(1.0, weight * ratio)
        if i + 1 == len(tokens):
            kept, left_over, scale = weight, target[i + 1], 1.0
        else:
            left_over = np.maximum(weight * target[i + 1] - draft[i + 1], 0)
            scale = left_over.sum() + 1 - weight  # the numbers divided carry absolute errors
            kept = left_over.sum() / scale if left_over.sum() > 0 else 0.0
        margins.append(abs(noise[i] - kept) * scale)
        if noise[i] < kept:
            accepted, final = i + 1, left_over
    assert final is not None
    if not final.any():
        return 0.0
    margins.append(weighted_margin(final, uniform(key(seed, Purpose.RECOVER, anchor, accepted))))
    return float(min(margins))

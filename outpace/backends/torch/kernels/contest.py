"""A token for every row, straight from the whole vocabulary: greedy, or `sampling.choose` at a temperature.

    maxima    each chunk of a row: its largest logit, where that is, and the sum of its weights
    contest   each chunk: the best of its likely tokens and of its unlikely ones, against the row's noise
    decide    each row: the winner of all

No sorting, no candidates, so nothing is cut off and every token is exact. Filters (top-k, top-p, min-p) need an order:
those rows go through `kernels/sampling.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outpace.backends.torch.kernels.sampling import mixed_key, uniform_noise
from outpace.randomness import Purpose
from outpace.sampling import HEAD_RATIO

_CHUNK = 2048
_TOKEN = tl.constexpr(int(Purpose.TOKEN))
_TAIL = tl.constexpr(int(Purpose.TAIL))
_HEAD_RATIO = tl.constexpr(float(HEAD_RATIO))


@triton.jit
def _maxima_kernel(
    logits_ptr, inv_temperature_ptr, max_ptr, place_ptr, sum_ptr,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    row, chunk, num_chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * VOCAB + column, column < VOCAB, -float("inf"))
    largest = tl.max(x, axis=0)
    at = row * num_chunks + chunk
    tl.store(max_ptr + at, largest)
    tl.store(place_ptr + at, tl.min(tl.where(x == largest, column, VOCAB), axis=0))
    if SAMPLES:
        reference = tl.where(largest == -float("inf"), 0.0, largest)
        inv_temperature = tl.load(inv_temperature_ptr + row).to(tl.float32)
        tl.store(sum_ptr + at, tl.sum(tl.exp((x - reference) * inv_temperature), axis=0))


@triton.jit
def _contest_kernel(
    logits_ptr, inv_temperature_ptr, seed_ptr, position_ptr, max_ptr, sum_ptr,
    score_ptr, winner_ptr, mass_ptr, VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Scores and winners are [rows, chunks, 2]: of the likely tokens, and of the others."""
    row, chunk, num_chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    inv_temperature = tl.load(inv_temperature_ptr + row).to(tl.float32)
    c = tl.arange(0, CHUNKS)
    maxima = tl.load(max_ptr + row * num_chunks + c, c < num_chunks, -float("inf"))
    sums = tl.load(sum_ptr + row * num_chunks + c, c < num_chunks, 0.0)
    top = tl.max(maxima, axis=0)
    norm = tl.sum(sums.to(tl.float64) * tl.exp(((maxima - top) * inv_temperature).to(tl.float64)), axis=0)
    norm = norm.to(tl.float32)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * VOCAB + column, column < VOCAB, -float("inf"))
    probs = tl.exp((x - top) * inv_temperature) / norm
    in_head = probs >= 1.0 / norm * _HEAD_RATIO
    seed = tl.load(seed_ptr + row).to(tl.uint64, bitcast=True)
    position = tl.load(position_ptr + row).to(tl.uint64, bitcast=True)
    head_key, tail_key = mixed_key(seed, seed * 0 + _TOKEN, position), mixed_key(seed, seed * 0 + _TAIL, position)
    noise = uniform_noise(tl.where(in_head, head_key, tail_key), column.to(tl.uint64))
    exact = probs.to(tl.float64)
    scores = tl.where(probs > 0.0, exact / -tl.log(noise), -1.0)
    head_scores, tail_scores = tl.where(in_head, scores, -1.0), tl.where(in_head, -1.0, scores)
    best, tail_best = tl.max(head_scores, axis=0), tl.max(tail_scores, axis=0)
    at = row * num_chunks + chunk
    tl.store(score_ptr + at * 2, best)
    tl.store(score_ptr + at * 2 + 1, tail_best)
    tl.store(winner_ptr + at * 2, tl.min(tl.where(head_scores == best, column, VOCAB), axis=0))
    tl.store(winner_ptr + at * 2 + 1, tl.min(tl.where(tail_scores == tail_best, column, VOCAB), axis=0))
    tl.store(mass_ptr + at, tl.sum(tl.where(in_head, exact, 0.0), axis=0))


@triton.jit
def _decide_kernel(
    max_ptr, place_ptr, is_greedy_ptr, seed_ptr, position_ptr, score_ptr, winner_ptr, mass_ptr, token_ptr, num_chunks,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    at = row * num_chunks + c
    there = c < num_chunks
    maxima = tl.load(max_ptr + at, there, -float("inf"))
    places = tl.load(place_ptr + at, there, VOCAB)
    token = tl.min(tl.where(maxima == tl.max(maxima, axis=0), places, VOCAB), axis=0)
    if SAMPLES:
        heads, tails = tl.load(score_ptr + at * 2, there, -1.0), tl.load(score_ptr + at * 2 + 1, there, -1.0)
        best, tail_best = tl.max(heads, axis=0), tl.max(tails, axis=0)
        head = tl.min(tl.where(heads == best, tl.load(winner_ptr + at * 2, there, VOCAB), VOCAB), axis=0)
        tail = tl.min(tl.where(tails == tail_best, tl.load(winner_ptr + at * 2 + 1, there, VOCAB), VOCAB), axis=0)
        tail_mass = tl.maximum(1.0 - tl.sum(tl.load(mass_ptr + at, there, 0.0), axis=0), 0.0)
        seed = tl.load(seed_ptr + row).to(tl.uint64, bitcast=True)
        position = tl.load(position_ptr + row).to(tl.uint64, bitcast=True)
        # Index -1 is the unlikely tokens' as a whole.
        noise = uniform_noise(mixed_key(seed, seed * 0 + _TOKEN, position), seed * 0 - 1)
        tail_wins = (tail_mass / -tl.log(noise) > best) & (tail_best > 0.0)
        drawn = tl.where(tail_wins, tail, head)
        token = tl.where(tl.load(is_greedy_ptr + row) != 0, token, drawn)
    tl.store(token_ptr + row, token)


def draw_whole(
    logits: Tensor, inv_temperature: Tensor, is_greedy: Tensor, seed: Tensor, position: Tensor, *, samples: bool
) -> Tensor:
    """int32 [rows]. `logits` [rows, vocab] contiguous; without `samples` every row is greedy and its noise unread."""
    num_rows, vocab_size = logits.shape
    assert logits.is_contiguous()
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    chunks = triton.next_power_of_2(num_chunks)
    maxima, sums = logits.new_empty(2, num_rows, num_chunks)
    places = logits.new_empty(num_rows, num_chunks, dtype=torch.int32)
    scores, winners, masses = maxima, places, maxima
    grid = (num_rows, num_chunks)
    _maxima_kernel[grid](logits, inv_temperature, maxima, places, sums, vocab_size, _CHUNK, samples, num_warps=4)
    if samples:
        scores = logits.new_empty(num_rows, num_chunks, 2, dtype=torch.float64)
        winners = logits.new_empty(num_rows, num_chunks, 2, dtype=torch.int32)
        masses = logits.new_empty(num_rows, num_chunks, dtype=torch.float64)
        _contest_kernel[grid](
            logits, inv_temperature, seed, position, maxima, sums, scores, winners, masses,
            vocab_size, _CHUNK, chunks, num_warps=8,
        )  # fmt: skip
    tokens = logits.new_empty(num_rows, dtype=torch.int32)
    _decide_kernel[(num_rows,)](
        maxima, places, is_greedy, seed, position, scores, winners, masses, tokens, num_chunks,
        vocab_size, chunks, samples, num_warps=1,
    )  # fmt: skip
    return tokens

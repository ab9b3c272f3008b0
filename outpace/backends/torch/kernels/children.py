"""`sampling/children.first_tokens` in two kernels: the best tokens of each chunk of the columns, then of all chunks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outpace.backends.torch.kernels.numerics import UNFUSED, exponential_noise, noise_key, powers_of_two
from outpace.decoding.randomness import Purpose

_CHUNK = 1024
_TOKEN = tl.constexpr(int(Purpose.TOKEN))


@triton.jit
def _take_best(scores, numbers, NONE: tl.constexpr):
    """The best score, the number of the first that has it, and the scores without it."""
    best = tl.max(scores, axis=0)
    number = tl.min(tl.where(scores == best, numbers, NONE), axis=0)
    return best, number, tl.where(numbers == number, -float("inf"), scores)


@triton.jit
def _chunk_kernel(
    logits_ptr, columns_ptr, tops_ptr, seed_ptr, position_ptr, sharpness_ptr, is_greedy_ptr, scores_ptr, numbers_ptr,
    level, per_request,
    NUM_COLUMNS: tl.constexpr, CHUNK: tl.constexpr, COUNT: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    node, chunk, num_chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    number = chunk * CHUNK + tl.arange(0, CHUNK)
    there = number < NUM_COLUMNS
    x = tl.load(logits_ptr + node * NUM_COLUMNS + number, there, -float("inf"))
    scores = x.to(tl.float64)
    if SAMPLES:
        request = node // per_request
        seed = tl.load(seed_ptr + request).to(tl.uint64, bitcast=True)
        position = (tl.load(position_ptr + request) + level).to(tl.uint64, bitcast=True)
        weight = powers_of_two((x - tl.load(tops_ptr + node)) * tl.load(sharpness_ptr + request).to(tl.float32))
        token = tl.load(columns_ptr + number, there, 0).to(tl.uint64)
        noise = exponential_noise(noise_key(seed, _TOKEN, position), token)
        scores = tl.where(tl.load(is_greedy_ptr + request) != 0, scores, weight.to(tl.float64) / noise)
        scores = tl.where(there, scores, -float("inf"))
    at = (node * num_chunks + chunk) * COUNT
    for i in tl.static_range(COUNT):
        best, which, scores = _take_best(scores, number, NUM_COLUMNS)
        tl.store(scores_ptr + at + i, best)
        tl.store(numbers_ptr + at + i, which)


@triton.jit
def _node_kernel(
    scores_ptr, numbers_ptr, columns_ptr, out_ptr, num_found,
    NUM_COLUMNS: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    node, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    scores = tl.load(scores_ptr + node * num_found + i, i < num_found, -float("inf"))
    numbers = tl.load(numbers_ptr + node * num_found + i, i < num_found, NUM_COLUMNS)
    for k in tl.static_range(COUNT):
        _, which, scores = _take_best(scores, numbers, NUM_COLUMNS)
        token = tl.load(columns_ptr + tl.minimum(which, NUM_COLUMNS - 1))  # the limit itself: logits were NaN
        tl.store(out_ptr + node * COUNT + k, token.to(tl.int32))


def first_tokens(logits: Tensor, columns: Tensor, words: Tensor, level: int, count: int, *, samples: bool) -> Tensor:
    """`sampling/children.first_tokens` on a GPU."""
    num_nodes, num_columns = logits.shape
    assert logits.is_contiguous() and words.is_contiguous() and count <= num_columns
    seed, position, sharpness, is_greedy = words[:4]
    num_chunks = triton.cdiv(num_columns, _CHUNK)
    scores = torch.empty((num_nodes, num_chunks, count), dtype=torch.float64, device=logits.device)
    numbers = torch.empty((num_nodes, num_chunks, count), dtype=torch.int32, device=logits.device)
    _chunk_kernel[(num_nodes, num_chunks)](
        logits, columns, logits.amax(1) if samples else logits, seed, position, sharpness.view(torch.float64),
        is_greedy, scores, numbers, level, num_nodes // words.shape[1], num_columns, _CHUNK, count, samples,
        num_warps=4, **UNFUSED,
    )  # fmt: skip
    found = torch.empty((num_nodes, count), dtype=torch.int32, device=logits.device)
    num_found = num_chunks * count
    _node_kernel[(num_nodes,)](
        scores, numbers, columns, found, num_found, num_columns, triton.next_power_of_2(num_found), count,
        num_warps=1, **UNFUSED,
    )  # fmt: skip
    return found

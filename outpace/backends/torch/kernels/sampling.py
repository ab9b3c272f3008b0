"""`device_sampling.draw` in a few kernels: what a GPU runs, with the plain torch functions as its oracle.

Op by op the torch functions launch some hundreds of small kernels, which at a batch of one cost more than reading the
logits. Here one kernel reads the logits once, for block maxima and normaliser; a few torch calls find the candidates
(about a dozen launches); and one kernel with a program per row filters them, looks up their noise and picks the token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outpace.backends.torch.device_distributions import BLOCK, Distributions, RowParams, candidates
from outpace.backends.torch.device_sampling import Sampled
from outpace.randomness import Purpose
from outpace.sampling import HEAD_RATIO

_BLOCKS_PER_CHUNK = 64  # a chunk is what one program reads

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)
_TOKEN = tl.constexpr(int(Purpose.TOKEN))
_TAIL = tl.constexpr(int(Purpose.TAIL))
_HEAD_RATIO = tl.constexpr(float(HEAD_RATIO))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit
def mixed_key(seed, purpose, position):
    k = _mix(_mix(seed + _GOLDEN) + _GOLDEN)
    k = _mix((k ^ _mix(purpose + _GOLDEN)) + _GOLDEN)
    return _mix((k ^ _mix(position + _GOLDEN)) + _GOLDEN)


@triton.jit
def uniform_noise(k, index):
    x = _mix(k + (index + 1) * _GOLDEN)
    return ((x >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def _gumbel(k, index):
    return -tl.log(-tl.log(uniform_noise(k, index)))


@triton.jit
def _statistics_kernel(
    logits_ptr, stride, inv_temperature_ptr, maxima_ptr, chunk_max_ptr, chunk_sum_ptr,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_chunks = tl.num_programs(1)
    block = chunk * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits_ptr + row * stride + column, column < VOCAB, -float("inf"))
    maxima = tl.max(x, axis=1)
    tl.store(maxima_ptr + row * (VOCAB // BLOCK) + block, maxima, block < VOCAB // BLOCK)
    largest = tl.max(maxima, axis=0)
    # A chunk of nothing but masked tokens has no weight, and no maximum to subtract.
    reference = tl.where(largest == -float("inf"), 0.0, largest)
    weights = tl.exp((x - reference) * tl.load(inv_temperature_ptr + row))
    tl.store(chunk_max_ptr + row * num_chunks + chunk, largest)
    tl.store(chunk_sum_ptr + row * num_chunks + chunk, tl.sum(tl.sum(weights, axis=1), axis=0))


@triton.jit
def _choose_kernel(
    logits_ptr, ids_ptr, floor_ptr, top_id_ptr, chunk_max_ptr, chunk_sum_ptr,
    inv_temperature_ptr, is_greedy_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr,
    token_ptr, is_exact_ptr, is_shaped_ptr, top_ptr, last_logit_ptr, last_id_ptr, norm_ptr,
    num_chunks, VOCAB: tl.constexpr, NUM: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """`device_distributions.shape` from its candidates on, and `device_sampling.choose`, line by line, for one row."""
    row = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, NUM)
    x = tl.load(logits_ptr + row * NUM + rank)
    ids = tl.load(ids_ptr + row * NUM + rank)
    floor, top = tl.load(floor_ptr + row), tl.max(x, axis=0)
    inv_temperature = tl.load(inv_temperature_ptr + row)
    is_greedy = tl.load(is_greedy_ptr + row) != 0
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)

    chunk = tl.arange(0, CHUNKS)
    chunk_max = tl.load(chunk_max_ptr + row * num_chunks + chunk, chunk < num_chunks, -float("inf"))
    chunk_sum = tl.load(chunk_sum_ptr + row * num_chunks + chunk, chunk < num_chunks, 0.0)
    chunk_scale = tl.exp(((chunk_max - top) * inv_temperature).to(tl.float64))
    total = tl.sum(chunk_sum.to(tl.float64) * chunk_scale, axis=0).to(tl.float32)

    weights = tl.exp(((x - top) * inv_temperature).to(tl.float64)).to(tl.float32)
    floor_weight = tl.exp(((floor - top) * inv_temperature).to(tl.float64)).to(tl.float32)
    known = x > floor
    closed = floor_weight == 0.0

    by_k = (top_k > 0) & (top_k < VOCAB)
    kept = known & (rank < tl.where(by_k, top_k, VOCAB))
    closed = closed | (by_k & (tl.sum(known.to(tl.int32), axis=0) >= top_k))
    mass_is_exact = closed | (by_k == 0)
    kept_mass = tl.sum(tl.where(kept, weights, 0.0).to(tl.float64), axis=0).to(tl.float32)
    mass = tl.where(by_k, kept_mass, total)
    probs = tl.where(kept, weights / mass, 0.0)
    floor_prob = floor_weight / mass

    by_p = top_p < 1.0
    reached = tl.cumsum(probs.to(tl.float64), axis=0)
    num_before = tl.sum((reached < top_p).to(tl.int32), axis=0)
    cutoff = ((1.0 - top_p) / VOCAB).to(tl.float32)
    kept = kept & ((by_p == 0) | ((rank <= num_before) & (probs >= cutoff)))
    closed = closed | (by_p & ((num_before < NUM) | (floor_prob < cutoff)))

    by_min = min_p > 0.0
    smallest = 1.0 / mass * min_p
    kept = kept & (probs >= smallest)
    closed = closed | (by_min & (floor_prob < smallest))
    is_shaped = mass_is_exact & (closed | ((by_p | by_min) == 0))

    left = tl.sum(tl.where(kept, probs, 0.0).to(tl.float64), axis=0).to(tl.float32)
    norm = tl.where(by_p | by_min, mass * left, mass)
    filtered = by_k | by_p | by_min
    num_kept = tl.sum(kept.to(tl.int32), axis=0)
    is_last = rank == tl.maximum(num_kept - 1, 0)
    last_logit = tl.where(filtered, tl.sum(tl.where(is_last, x, 0.0), axis=0), -float("inf"))
    last_id = tl.where(filtered, tl.sum(tl.where(is_last, ids, 0), axis=0), VOCAB)
    one_hot = is_greedy | (filtered & (num_kept == 0))
    top_id = tl.load(top_id_ptr + row)
    norm = tl.where(one_hot, 1.0, norm)
    probs = tl.where(kept, weights / norm, 0.0)
    probs = tl.where(one_hot, (rank == 0).to(tl.float32), probs)
    ids = tl.where(one_hot, top_id, ids)
    closed = closed | one_hot
    is_shaped = is_shaped | is_greedy
    tl.store(is_shaped_ptr + row, is_shaped)
    tl.store(top_ptr + row, top)
    tl.store(last_logit_ptr + row, tl.where(one_hot, top, last_logit))
    tl.store(last_id_ptr + row, tl.where(one_hot, top_id, last_id))
    tl.store(norm_ptr + row, norm)

    cut = 1.0 / norm * _HEAD_RATIO
    in_head = probs >= cut
    exact_probs = probs.to(tl.float64)
    tail_mass = tl.maximum(1.0 - tl.sum(tl.where(in_head, exact_probs, 0.0), axis=0), 0.0)
    seed = tl.load(seed_ptr + row).to(tl.uint64, bitcast=True)
    position = tl.load(position_ptr + row).to(tl.uint64, bitcast=True)
    head_key, tail_key = mixed_key(seed, seed * 0 + _TOKEN, position), mixed_key(seed, seed * 0 + _TAIL, position)
    noise = _gumbel(tl.where(in_head, head_key, tail_key), ids.to(tl.uint64, bitcast=True))
    scores = tl.where(probs > 0.0, tl.log(tl.where(probs > 0.0, exact_probs, 1.0)) + noise, -float("inf"))
    head_scores = tl.where(in_head, scores, -float("inf"))
    tail_scores = tl.where(in_head, -float("inf"), scores)
    # Index -1 is the tail's as a whole; plus one, it is no step at all.
    tail_score = tl.log(tl.where(tail_mass > 0.0, tail_mass, 1.0)) + _gumbel(head_key, seed * 0 - 1)
    tail_wins = (tail_mass > 0.0) & (tail_score > tl.max(head_scores, axis=0))
    from_tail = tail_wins & (tl.max(tail_scores, axis=0) > -float("inf"))
    place = tl.argmax(tl.where(from_tail, tail_scores, head_scores), axis=0)
    is_exact = is_shaped & (closed | (floor_weight / norm < cut)) & (closed | (tail_wins == 0))
    tl.store(token_ptr + row, tl.sum(tl.where(rank == place, ids, 0), axis=0))
    tl.store(is_exact_ptr + row, is_exact)


def can_draw(vocab_size: int, num_candidates: int) -> bool:
    is_power_of_two = num_candidates & (num_candidates - 1) == 0
    return vocab_size % BLOCK == 0 and vocab_size // BLOCK > num_candidates and is_power_of_two


def draw(logits: Tensor, params: RowParams, seed: Tensor, position: Tensor, num_candidates: int) -> Sampled:
    """What `device_sampling.draw` does, where `can_draw`. Rows of `logits` may lie apart."""
    num_rows, vocab_size = logits.shape
    chunk = BLOCK * _BLOCKS_PER_CHUNK
    num_chunks = triton.cdiv(vocab_size, chunk)
    maxima = logits.new_empty(num_rows, vocab_size // BLOCK)
    chunk_max, chunk_sum = logits.new_empty(2, num_rows, num_chunks)
    _statistics_kernel[(num_rows, num_chunks)](
        logits, logits.stride(0), params.inv_temperature, maxima, chunk_max, chunk_sum,
        vocab_size, BLOCK, _BLOCKS_PER_CHUNK, num_warps=8,
    )  # fmt: skip
    found = candidates(logits, num_candidates, maxima)
    tokens, last_id = torch.empty_like(seed), torch.empty_like(seed)
    flags = torch.empty(2, num_rows, dtype=torch.bool, device=logits.device)
    top, last_logit, norm = logits.new_empty(3, num_rows)
    _choose_kernel[(num_rows,)](
        found.logits, found.ids, found.floor.contiguous(), found.top_id, chunk_max, chunk_sum,
        params.inv_temperature, params.is_greedy, params.top_k, params.top_p, params.min_p, seed, position,
        tokens, flags[0], flags[1], top, last_logit, last_id, norm,
        num_chunks, vocab_size, num_candidates, triton.next_power_of_2(num_chunks),
    )  # fmt: skip
    distributions = Distributions(logits, top, params.inv_temperature, last_logit, last_id, norm, params.has_filters)
    return Sampled(tokens, flags[0], distributions, flags[1])

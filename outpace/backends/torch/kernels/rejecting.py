"""`sampling/acceptance.verify_block` in a few kernels that read each distribution once or twice.

    weigh     each draft: how likely each of its prefixes is under the target, over how likely it is in the draft
    mass      each prefix and chunk of the vocabulary: what the target has more than the draft
    residue   each draft and chunk: the weights of the token after the accepted ones
    decide    each draft: that token

How many tokens are accepted is computed from a few numbers, so every program that needs it computes it again. Sums are
float64, in another order than in `acceptance.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outpace.backends.torch.kernels.numerics import UNFUSED
from outpace.backends.torch.sampling.acceptance import Drafts

_CHUNK = 2048


@triton.jit
def _weigh_kernel(
    tokens_ptr, lines_ptr, sources_ptr, kept_ptr, target_ptr, weights_ptr, VOCAB: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """`weights` [rows, depth + 1]: of the first 0, 1, ... draft tokens."""
    row = tl.program_id(0)
    source = tl.load(sources_ptr + row)
    weight = tl.full((), 1.0, tl.float64)
    tl.store(weights_ptr + row * (DEPTH + 1), weight)
    for i in tl.static_range(DEPTH):
        token, line = tl.load(tokens_ptr + row * DEPTH + i), tl.load(lines_ptr + row * (DEPTH + 1) + i)
        target = tl.load(target_ptr + line * VOCAB + token).to(tl.float64)
        draft = tl.load(kept_ptr + (source * DEPTH + i) * VOCAB + token).to(tl.float64)
        weight = weight * (target / draft)
        weight = tl.where(weight > 1.0, 1.0, weight)
        tl.store(weights_ptr + row * (DEPTH + 1) + i + 1, weight)


@triton.jit
def _residual(target_ptr, kept_ptr, line, source, place, weight, column, VOCAB: tl.constexpr, DEPTH: tl.constexpr):
    """What the target has more than the draft at `place`; and the target's distribution."""
    there = column < VOCAB
    target = tl.load(target_ptr + line * VOCAB + column, there, 0.0)
    draft = tl.load(kept_ptr + (source * DEPTH + place) * VOCAB + column, there, 0.0)
    return tl.maximum(weight.to(tl.float32) * target - draft, 0.0), target


@triton.jit
def _mass_kernel(
    lines_ptr, lengths_ptr, sources_ptr, kept_ptr, target_ptr, weights_ptr, masses_ptr,
    VOCAB: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`masses` [rows, depth - 1, chunks]: after the first 1, 2, ... draft tokens, while another one was drafted."""
    row, before, chunk, num_chunks = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    place = before + 1
    if place < tl.load(lengths_ptr + row):
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        residual, _ = _residual(
            target_ptr, kept_ptr, tl.load(lines_ptr + row * (DEPTH + 1) + place), tl.load(sources_ptr + row), place,
            tl.load(weights_ptr + row * (DEPTH + 1) + place), column, VOCAB, DEPTH,
        )  # fmt: skip
        at = (row * (DEPTH - 1) + before) * num_chunks + chunk
        tl.store(masses_ptr + at, tl.sum(residual.to(tl.float64), axis=0))


@triton.jit
def _num_accepted(
    row, length, accept_ptr, noise_stride, weights_ptr, masses_ptr, num_chunks,
    DEPTH: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    accepted = length * 0
    c = tl.arange(0, CHUNKS)
    for i in tl.static_range(1, DEPTH + 1):
        share = tl.load(weights_ptr + row * (DEPTH + 1) + i)
        if i < DEPTH:
            masses = masses_ptr + (row * (DEPTH - 1) + i - 1) * num_chunks + c
            mass = tl.sum(tl.load(masses, (c < num_chunks) & (i < length), 0.0), axis=0)
            part = tl.where(mass > 0.0, mass / (mass + (1.0 - share)), 0.0)
            share = tl.where(i == length, share, part)
        stands = (i <= length) & (tl.load(accept_ptr + row * noise_stride + i - 1) < share)
        accepted = tl.where(stands, i, accepted)
    return accepted


@triton.jit
def _residue_kernel(
    lines_ptr, lengths_ptr, sources_ptr, accept_ptr, noise_stride, kept_ptr, target_ptr, weights_ptr, masses_ptr,
    sums_ptr, VOCAB: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """`sums` [2, rows, chunks]: of the residual, and of the target's distribution."""
    row, chunk, num_rows, num_chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    length = tl.load(lengths_ptr + row)
    accepted = _num_accepted(
        row, length, accept_ptr, noise_stride, weights_ptr, masses_ptr, num_chunks, DEPTH, CHUNKS
    )  # fmt: skip
    residual, own = _residual(
        target_ptr, kept_ptr, tl.load(lines_ptr + row * (DEPTH + 1) + accepted), tl.load(sources_ptr + row),
        tl.minimum(accepted, DEPTH - 1), tl.load(weights_ptr + row * (DEPTH + 1) + accepted),
        chunk * CHUNK + tl.arange(0, CHUNK), VOCAB, DEPTH,
    )  # fmt: skip
    tl.store(sums_ptr + row * num_chunks + chunk, tl.sum(residual.to(tl.float64), axis=0))
    tl.store(sums_ptr + (num_rows + row) * num_chunks + chunk, tl.sum(own.to(tl.float64), axis=0))


@triton.jit
def _first_beyond(ends, aim, weights, places, SIZE: tl.constexpr):
    """The first place with a weight that ends beyond the aim; the last with a weight if rounding leaves none."""
    has_weight = weights > 0.0
    first = tl.min(tl.where(has_weight & (ends > aim), places, SIZE), axis=0)
    return tl.minimum(first, tl.max(tl.where(has_weight, places, 0), axis=0))


@triton.jit
def _decide_kernel(
    lines_ptr, lengths_ptr, sources_ptr, accept_ptr, recover_ptr, noise_stride, exact_ptr, kept_ptr, target_ptr,
    weights_ptr, masses_ptr, sums_ptr, found_ptr, num_chunks,
    VOCAB: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    length = tl.load(lengths_ptr + row)
    accepted = _num_accepted(
        row, length, accept_ptr, noise_stride, weights_ptr, masses_ptr, num_chunks, DEPTH, CHUNKS
    )  # fmt: skip
    c = tl.arange(0, CHUNKS)
    residuals = tl.load(sums_ptr + row * num_chunks + c, c < num_chunks, 0.0)
    owns = tl.load(sums_ptr + (num_rows + row) * num_chunks + c, c < num_chunks, 0.0)
    is_own = (accepted == length) | (tl.sum(residuals, axis=0) <= 0.0)  # a bonus, or nothing else is left
    sums = tl.where(is_own, owns, residuals)
    ends = tl.cumsum(sums, 0)
    aim = tl.load(recover_ptr + row * noise_stride + accepted) * tl.max(ends, axis=0)
    chunk = _first_beyond(ends, aim, sums, c, CHUNKS)
    before = tl.sum(tl.where(c < chunk, sums, 0.0), axis=0)
    i = tl.arange(0, CHUNK)
    residual, own = _residual(
        target_ptr, kept_ptr, tl.load(lines_ptr + row * (DEPTH + 1) + accepted), tl.load(sources_ptr + row),
        tl.minimum(accepted, DEPTH - 1), tl.load(weights_ptr + row * (DEPTH + 1) + accepted), chunk * CHUNK + i,
        VOCAB, DEPTH,
    )  # fmt: skip
    weights = tl.where(is_own, own, residual).to(tl.float64)
    token = chunk * CHUNK + _first_beyond(tl.cumsum(weights, 0) + before, aim, weights, i, CHUNK)
    is_exact = tl.full((), 1, tl.int64)
    for i in tl.static_range(DEPTH + 1):
        is_exact = is_exact & (tl.load(exact_ptr + tl.load(lines_ptr + row * (DEPTH + 1) + i)) != 0).to(tl.int64)
    tl.store(found_ptr + row * 3, accepted)
    tl.store(found_ptr + row * 3 + 1, token.to(tl.int64))
    tl.store(found_ptr + row * 3 + 2, is_exact)


def verify_block(
    drafts: Drafts, kept: Tensor, sources: Tensor, target_probs: Tensor, exact: Tensor, found: Tensor
) -> None:
    """Write to `found` [rows, 3] the accepted tokens, the target's own token after them, and whether both are exact.

    The distributions of draft i are `kept[sources[i]]`, of [rows, depth, vocab].
    """
    (num_rows, depth), vocab_size = drafts.tokens.shape, target_probs.shape[1]
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    chunks = triton.next_power_of_2(num_chunks)
    weights, masses, sums = (
        torch.empty(shape, dtype=torch.float64, device=kept.device)
        for shape in ((num_rows, depth + 1), (num_rows, max(depth - 1, 1), num_chunks), (2, num_rows, num_chunks))
    )
    noise_stride = drafts.accept_noise.stride(0)
    lines, lengths, accept = drafts.row_of, drafts.num_drafted, drafts.accept_noise
    _weigh_kernel[(num_rows,)](
        drafts.tokens, lines, sources, kept, target_probs, weights, vocab_size, depth, num_warps=1, **UNFUSED
    )
    if depth > 1:
        _mass_kernel[(num_rows, depth - 1, num_chunks)](
            lines, lengths, sources, kept, target_probs, weights, masses, vocab_size, depth, _CHUNK,
            num_warps=4, **UNFUSED,
        )  # fmt: skip
    _residue_kernel[(num_rows, num_chunks)](
        lines, lengths, sources, accept, noise_stride, kept, target_probs, weights, masses, sums,
        vocab_size, depth, _CHUNK, chunks, num_warps=4, **UNFUSED,
    )  # fmt: skip
    _decide_kernel[(num_rows,)](
        lines, lengths, sources, accept, drafts.recover_noise, noise_stride, exact, kept, target_probs, weights,
        masses, sums, found, num_chunks, vocab_size, depth, _CHUNK, chunks, num_warps=8, **UNFUSED,
    )  # fmt: skip

"""`sampling/filters.draw` in a few kernels: draws a token for every row from the whole vocabulary.

    maxima    each chunk of a row: its largest logit and the index of that logit
    border    each row: the border of top-k, then of top-p and min-p, among the likeliest tokens
    fold      the sums of `numerics.total`: many columns at once, then the few that are left
    contest   each chunk: the best score of its likely tokens and of its unlikely ones, with the row's noise
    decide    each row: the token with the best score

Greedy rows need only the first and the last; rows without filters have no borders. Filters keep the likeliest tokens up
to a border (see `filters.py`), so a few numbers per row describe a distribution. If a border is uncertain, the row is
marked as not exact, and `sampling/verifier.py` draws its token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from outpace.backends.torch.execution.step import Advance
from outpace.backends.torch.kernels.filters import NUM_CANDIDATES, candidates, find_borders, is_kept
from outpace.backends.torch.kernels.numerics import FEW, UNFUSED, exponential_noise, noise_key, powers_of_two
from outpace.decoding.randomness import Purpose
from outpace.decoding.sampling import HEAD_RATIO

_CHUNK = 2048
_FOLDED = 512  # most columns after the first fold
_COLUMNS = 16  # of a fold, per program
_TOKEN = tl.constexpr(int(Purpose.TOKEN))
_TAIL = tl.constexpr(int(Purpose.TAIL))
_HEAD_RATIO = tl.constexpr(float(HEAD_RATIO))


@dataclass(frozen=True, slots=True)
class Rows:
    """Inputs of each row's draw; [rows], contiguous. Filters and noise are read only if the mode needs them."""

    sharpness: Tensor  # float64 holding float32 values
    is_greedy: Tensor  # int64
    top_k: Tensor  # int64
    top_p: Tensor  # float64
    min_p: Tensor  # float64 holding float32 values
    seed: Tensor  # int64
    position: Tensor  # int64


@triton.jit
def _top(max_ptr, row, num_chunks, CHUNKS: tl.constexpr):
    c = tl.arange(0, CHUNKS)
    return tl.max(tl.load(max_ptr + row * num_chunks + c, c < num_chunks, -float("inf")), axis=0)


@triton.jit
def _columns(columns_ptr, chunk, VOCAB: tl.constexpr, CHUNK: tl.constexpr, NUM_COLUMNS: tl.constexpr):
    """Token ids of a chunk, VOCAB where there are no more. NUM_COLUMNS 0: of the whole vocabulary."""
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    if NUM_COLUMNS > 0:
        i = tl.load(columns_ptr + i, i < NUM_COLUMNS, VOCAB).to(tl.int32)
    return i


@triton.jit
def _maxima_kernel(
    logits_ptr, columns_ptr, NUM_COLUMNS: tl.constexpr, max_ptr, place_ptr, VOCAB: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    row, chunk, num_chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    column = _columns(columns_ptr, chunk, VOCAB, CHUNK, NUM_COLUMNS)
    x = tl.load(logits_ptr + row * VOCAB + column, column < VOCAB, -float("inf"))
    largest = tl.max(x, axis=0)
    tl.store(max_ptr + row * num_chunks + chunk, largest)
    tl.store(place_ptr + row * num_chunks + chunk, tl.min(tl.where(x == largest, column, VOCAB), axis=0))


@triton.jit
def _probs(
    x, ids, top, sharpness, row, border_ptr, border_id_ptr, norm_ptr, num_rows,
    HAS_FILTERS: tl.constexpr, NUM_NORMS: tl.constexpr,
):  # fmt: skip
    """The host's distribution, as far as known: weights, divided by their sum, filtered and divided again."""
    p = powers_of_two((x - top) * sharpness)
    if HAS_FILTERS:
        p = tl.where(is_kept(p, ids, tl.load(border_ptr + row), tl.load(border_id_ptr + row)), p, 0.0)
    if NUM_NORMS > 0:
        p = tl.div_rn(p, tl.load(norm_ptr + row))
    if HAS_FILTERS and NUM_NORMS > 0:
        at = num_rows + row
        p = tl.where(is_kept(p, ids, tl.load(border_ptr + at), tl.load(border_id_ptr + at)), p, 0.0)
        if NUM_NORMS > 1:
            p = tl.div_rn(p, tl.load(norm_ptr + at))
    return p


@triton.jit
def _places(columns, N: tl.constexpr, LEVELS: tl.constexpr):
    """Indexes of the numbers that LEVELS folds add up in each column, [2^LEVELS, columns], and which of them exist.

    The first fold adds the halves of the first dimension, and so on.
    """
    which = tl.arange(0, 1 << LEVELS)[:, None]
    place = columns[None, :] + which * 0
    there = place >= 0
    for i in tl.static_range(LEVELS):
        level = LEVELS - 1 - i
        half = (N + (2 << level) - 1) >> (level + 1)
        place += ((which >> i) & 1) * half
        there = there & (place < (N + (1 << level) - 1) >> level)
    return place, there


@triton.jit
def _folded(x, LEVELS: tl.constexpr, COLUMNS: tl.constexpr):
    for i in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (2, 1 << (LEVELS - 1 - i), COLUMNS)), axis=0)
    return tl.reshape(x, (COLUMNS,))


@triton.jit
def _fold_kernel(
    logits_ptr, sharpness_ptr, max_ptr, border_ptr, border_id_ptr, norm_ptr, parts_ptr, num_rows, num_chunks,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    HAS_FILTERS: tl.constexpr, NUM_NORMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place, there = _places(columns, VOCAB, LEVELS)
    x = tl.load(logits_ptr + row * VOCAB + place, there & (columns < WIDTH)[None, :], -float("inf"))
    p = _probs(
        x, place, _top(max_ptr, row, num_chunks, CHUNKS), tl.load(sharpness_ptr + row).to(tl.float32),
        row, border_ptr, border_id_ptr, norm_ptr, num_rows, HAS_FILTERS, NUM_NORMS,
    )  # fmt: skip
    tl.store(parts_ptr + row * WIDTH + columns, _folded(p, LEVELS, COLUMNS), columns < WIDTH)


@triton.jit
def _sum_kernel(
    parts_ptr, is_unfiltered_ptr, norm_ptr,
    WIDTH: tl.constexpr, LEVELS: tl.constexpr, LEFT: tl.constexpr, COLUMNS: tl.constexpr, MAY_SKIP: tl.constexpr,
):  # fmt: skip
    """The rest of `total`: fold until few numbers are left, then add those one by one."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    place, there = _places(columns, WIDTH, LEVELS)
    x = tl.load(parts_ptr + row * WIDTH + place, there & (columns < LEFT)[None, :], 0.0)
    x = _folded(x, LEVELS, COLUMNS)
    tl.debug_barrier()
    tl.store(parts_ptr + row * WIDTH + columns, x, columns < LEFT)
    tl.debug_barrier()
    sums = tl.load(parts_ptr + row * WIDTH)
    for i in tl.static_range(1, LEFT):
        sums += tl.load(parts_ptr + row * WIDTH + i)
    if MAY_SKIP:
        # A row that only top-k has cut is not divided again: its divisor is 1.
        sums = tl.where(tl.load(is_unfiltered_ptr + row) != 0, 1.0, sums)
    tl.store(norm_ptr + row, sums)


@triton.jit
def _distribution_kernel(
    logits_ptr, sharpness_ptr, max_ptr, border_ptr, border_id_ptr, norm_ptr, probs_ptr, num_rows,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, HAS_FILTERS: tl.constexpr, NUM_NORMS: tl.constexpr,
):  # fmt: skip
    row, chunk, num_chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * VOCAB + column, column < VOCAB, -float("inf"))
    p = _probs(
        x, column, _top(max_ptr, row, num_chunks, CHUNKS), tl.load(sharpness_ptr + row).to(tl.float32),
        row, border_ptr, border_id_ptr, norm_ptr, num_rows, HAS_FILTERS, NUM_NORMS,
    )  # fmt: skip
    tl.store(probs_ptr + row * VOCAB + column, p, column < VOCAB)


@triton.jit
def _contest_kernel(
    logits_ptr, columns_ptr, NUM_COLUMNS: tl.constexpr, sharpness_ptr, seed_ptr, position_ptr,
    max_ptr, border_ptr, border_id_ptr, norm_ptr, score_ptr, winner_ptr, mass_ptr, probs_ptr, probs_stride, num_rows,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, HAS_FILTERS: tl.constexpr, NUM_NORMS: tl.constexpr,
    KEEPS_PROBS: tl.constexpr,
):  # fmt: skip
    """Scores and winners are [rows, chunks, 2]: of likely tokens, and of unlikely ones."""
    row, chunk, num_chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    column = _columns(columns_ptr, chunk, VOCAB, CHUNK, NUM_COLUMNS)
    x = tl.load(logits_ptr + row * VOCAB + column, column < VOCAB, -float("inf"))
    p = _probs(
        x, column, _top(max_ptr, row, num_chunks, CHUNKS), tl.load(sharpness_ptr + row).to(tl.float32),
        row, border_ptr, border_id_ptr, norm_ptr, num_rows, HAS_FILTERS, NUM_NORMS,
    )  # fmt: skip
    if KEEPS_PROBS:
        tl.store(probs_ptr + row * probs_stride + column, p, column < VOCAB)
    # The likeliest token's weight is one.
    largest = tl.div_rn(tl.full((1,), 1.0, tl.float32), tl.load(norm_ptr + row + tl.zeros((1,), tl.int32)))
    if NUM_NORMS > 1:
        largest = tl.div_rn(largest, tl.load(norm_ptr + num_rows + row + tl.zeros((1,), tl.int32)))
    in_head = p >= largest * _HEAD_RATIO
    seed = tl.load(seed_ptr + row).to(tl.uint64, bitcast=True)
    position = tl.load(position_ptr + row).to(tl.uint64, bitcast=True)
    k = tl.where(in_head, noise_key(seed, _TOKEN, position), noise_key(seed, _TAIL, position))
    wide = p.to(tl.float64)
    scores = tl.where(p > 0.0, wide / exponential_noise(k, column.to(tl.uint64)), -1.0)
    heads, tails = tl.where(in_head, scores, -1.0), tl.where(in_head, -1.0, scores)
    best, tail_best = tl.max(heads, axis=0), tl.max(tails, axis=0)
    at = row * num_chunks + chunk
    tl.store(score_ptr + at * 2, best)
    tl.store(score_ptr + at * 2 + 1, tail_best)
    tl.store(winner_ptr + at * 2, tl.min(tl.where(heads == best, column, VOCAB), axis=0))
    tl.store(winner_ptr + at * 2 + 1, tl.min(tl.where(tails == tail_best, column, VOCAB), axis=0))
    tl.store(mass_ptr + at, tl.sum(tl.where(in_head, wide, 0.0), axis=0))


@triton.jit
def _decide_kernel(
    max_ptr, place_ptr, is_greedy_ptr, seed_ptr, position_ptr, score_ptr, winner_ptr, mass_ptr, exact_ptr, out_ptr,
    tokens_ptr, positions_ptr, contexts_ptr, lengths_ptr, left_ptr, num_rows, num_chunks,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, SAMPLES: tl.constexpr, HAS_FILTERS: tl.constexpr, ADVANCES: tl.constexpr,
    ENDS: tl.constexpr,
):  # fmt: skip
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    at = row * num_chunks + c
    there = c < num_chunks
    maxima = tl.load(max_ptr + at, there, -float("inf"))
    places = tl.load(place_ptr + at, there, VOCAB)
    token = tl.min(tl.where(maxima == tl.max(maxima, axis=0), places, VOCAB), axis=0)
    is_exact = tl.full((), 1, tl.int32)
    if SAMPLES:
        heads, tails = tl.load(score_ptr + at * 2, there, -1.0), tl.load(score_ptr + at * 2 + 1, there, -1.0)
        best, tail_best = tl.max(heads, axis=0), tl.max(tails, axis=0)
        head = tl.min(tl.where(heads == best, tl.load(winner_ptr + at * 2, there, VOCAB), VOCAB), axis=0)
        tail = tl.min(tl.where(tails == tail_best, tl.load(winner_ptr + at * 2 + 1, there, VOCAB), VOCAB), axis=0)
        tail_mass = 1.0 - tl.sum(tl.load(mass_ptr + at, there, 0.0), axis=0)
        seed = tl.load(seed_ptr + row).to(tl.uint64, bitcast=True)
        position = tl.load(position_ptr + row).to(tl.uint64, bitcast=True)
        # Index -1 stands for all unlikely tokens together.
        noise = exponential_noise(noise_key(seed, _TOKEN, position), seed * 0 - 1)
        drawn = tl.where((tail_mass / noise > best) & (tail_best > 0.0), tail, head)
        is_greedy = tl.load(is_greedy_ptr + row) != 0
        token = tl.where(is_greedy, token, drawn)
        if HAS_FILTERS:
            is_exact = ((tl.load(exact_ptr + row) != 0) | is_greedy).to(tl.int32)
    tl.store(out_ptr + row, token)
    tl.store(out_ptr + num_rows + row, is_exact)
    if ADVANCES:
        length = tl.load(lengths_ptr + row)  # 1; 0 for an unused row
        next_position = tl.load(positions_ptr + row) + length
        if ENDS:
            left = tl.load(left_ptr + row) - 1
            tl.store(left_ptr + row, left)
            length = length * (left > 0).to(tl.int32)
            tl.store(lengths_ptr + row, length)
            next_position = tl.where(length > 0, next_position, -1)
        tl.store(tokens_ptr + row, tl.minimum(token, VOCAB - 1) * length)  # VOCAB means no token: logits were NaN
        tl.store(positions_ptr + row, next_position)
        tl.store(contexts_ptr + row, tl.load(contexts_ptr + row) + length)
        tl.store(position_ptr + row, tl.load(position_ptr + row) + 1)


@cache
def _folds(vocab_size: int) -> tuple[int, int, int, int]:
    """(first folds, columns after them, second folds, columns left to add one by one)."""
    levels, width = 0, vocab_size
    while width > _FOLDED:
        levels, width = levels + 1, (width + 1) // 2
    more, left = 0, width
    while left > FEW:
        more, left = more + 1, (left + 1) // 2
    return levels, width, more, left


@dataclass(frozen=True, slots=True)
class _Shapes:
    """What turns logits into probabilities, for each row."""

    maxima: Tensor  # [rows, chunks]: largest logits
    places: Tensor  # [rows, chunks]: their indexes
    borders: Tensor  # [2, rows]: of top-k, then of top-p and min-p
    border_ids: Tensor
    norms: Tensor  # [2, rows]: sums before and after filters
    exact: Tensor  # [rows]: whether the borders are certain


def _maxima(logits: Tensor, columns: Tensor | None = None) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size if columns is None else len(columns), _CHUNK)
    maxima = logits.new_empty(num_rows, num_chunks)
    places = logits.new_empty(num_rows, num_chunks, dtype=torch.int32)
    _maxima_kernel[(num_rows, num_chunks)](
        logits, *_given(columns, places), maxima, places, vocab_size, _CHUNK, num_warps=4
    )
    return maxima, places


def _given(columns: Tensor | None, other: Tensor) -> tuple[Tensor, int]:
    """The columns that a kernel considers, and how many; 0 for all."""
    return (other, 0) if columns is None else (columns, len(columns))


def _shapes(logits: Tensor, rows: Rows, *, has_filters: bool, columns: Tensor | None = None) -> _Shapes:
    num_rows, vocab_size = logits.shape
    maxima, places = _maxima(logits, columns)
    num_chunks = maxima.shape[1]
    chunks = triton.next_power_of_2(num_chunks)
    borders, norms = logits.new_empty(2, num_rows), logits.new_empty(2, num_rows)
    border_ids = places.new_empty(2, num_rows)
    exact, unfiltered = places.new_empty(2, num_rows)
    levels, width, more, left = _folds(vocab_size)
    parts = logits.new_empty(num_rows, width)

    def add_up(num_norms: int) -> None:
        _fold_kernel[(num_rows, triton.cdiv(width, _COLUMNS))](
            logits, rows.sharpness, maxima, borders, border_ids, norms, parts, num_rows, num_chunks,
            vocab_size, chunks, levels, width, _COLUMNS, has_filters, num_norms, num_warps=4, **UNFUSED,
        )  # fmt: skip
        _sum_kernel[(num_rows,)](
            parts, unfiltered, norms[num_norms], width, more, left, triton.next_power_of_2(left), num_norms > 0,
            num_warps=1, **UNFUSED,
        )  # fmt: skip

    if has_filters:
        values, ids = candidates(logits, min(NUM_CANDIDATES, vocab_size))
        params = (rows.sharpness, rows.top_k, rows.top_p, rows.min_p)
        for by_mass in (False, True):
            find_borders(
                values, ids, vocab_size, params, borders, border_ids, norms, exact, unfiltered, by_mass=by_mass
            )
            add_up(int(by_mass))
    else:
        add_up(0)
    return _Shapes(maxima, places, borders, border_ids, norms, exact)


def distributions(logits: Tensor, rows: Rows, *, has_filters: bool, out: Tensor) -> Tensor:
    """Write to `out` [rows, vocab] what `draw` draws the tokens of sampled rows from; without the noise, which takes
    most of the time of a draw. Returns whether each row is exact, [rows]."""
    num_rows, vocab_size = logits.shape
    assert logits.is_contiguous() and out.is_contiguous()
    shapes = _shapes(logits, rows, has_filters=has_filters)
    num_chunks = shapes.maxima.shape[1]
    _distribution_kernel[(num_rows, num_chunks)](
        logits, rows.sharpness, shapes.maxima, shapes.borders, shapes.border_ids, shapes.norms, out, num_rows,
        vocab_size, _CHUNK, triton.next_power_of_2(num_chunks), has_filters, 2 if has_filters else 1,
        num_warps=4, **UNFUSED,
    )  # fmt: skip
    return shapes.exact if has_filters else torch.ones_like(shapes.exact)


def draw(
    logits: Tensor,
    rows: Rows,
    *,
    samples: bool,
    has_filters: bool,
    advance: Advance | None = None,
    out: Tensor | None = None,
    probs: Tensor | None = None,
    columns: Tensor | None = None,
) -> Tensor:
    """int32 [2, rows]: tokens, and whether each is exact. `logits` [rows, vocab], contiguous.

    Without `samples` every row is greedy; without `has_filters` no row has top-k, top-p or min-p. `probs` [rows, vocab]
    receives what the tokens of sampled rows are drawn from. `columns`, int64: the only tokens that can be drawn; the
    logits of all others are -inf, and `probs` holds zeros there.
    """
    num_rows, vocab_size = logits.shape
    assert logits.is_contiguous()
    if samples:
        shapes = _shapes(logits, rows, has_filters=has_filters, columns=columns)
        maxima, places, exact = shapes.maxima, shapes.places, shapes.exact
    else:
        maxima, places = _maxima(logits, columns)
        exact = maxima
    num_chunks = maxima.shape[1]
    chunks = triton.next_power_of_2(num_chunks)
    scores = winners = masses = maxima
    if samples:
        scores = logits.new_empty(num_rows, num_chunks, 2, dtype=torch.float64)
        winners = logits.new_empty(num_rows, num_chunks, 2, dtype=torch.int32)
        masses = logits.new_empty(num_rows, num_chunks, dtype=torch.float64)
        kept = probs if probs is not None else logits  # written only with `probs`
        _contest_kernel[(num_rows, num_chunks)](
            logits, *_given(columns, places), rows.sharpness, rows.seed, rows.position, maxima, shapes.borders,
            shapes.border_ids, shapes.norms, scores, winners, masses, kept, kept.stride(0), num_rows, vocab_size,
            _CHUNK, chunks, has_filters, 2 if has_filters else 1, probs is not None,
            num_warps=8, **UNFUSED,
        )  # fmt: skip
    found = out if out is not None else places.new_empty(2, num_rows)
    fed, ends = (places,) * 5, advance is not None and advance.left is not None
    if advance is not None:
        step, left_to_draw = advance.step, advance.left if advance.left is not None else places
        fed = (step.tokens, step.positions, step.contexts, step.lengths, left_to_draw)
    _decide_kernel[(num_rows,)](
        maxima, places, rows.is_greedy, rows.seed, rows.position, scores, winners, masses, exact, found, *fed,
        num_rows, num_chunks, vocab_size, chunks, samples, has_filters, advance is not None, ends,
        num_warps=1, **UNFUSED,
    )  # fmt: skip
    return found

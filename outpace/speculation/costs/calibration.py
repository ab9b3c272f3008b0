"""Measures costs at start, in about two seconds.

Every round times all sizes in turn, so that noise affects all of them; the fastest time of each size counts. Sequences
already hold a token when steps are timed, because starting a sequence takes extra time only once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from time import perf_counter

import numpy as np

from outpace.backends.base import Head, HeadTask, Runner
from outpace.config import SamplingParams
from outpace.core import Request, Row, StepPlan
from outpace.decoding.tree import Tree
from outpace.decoding.verification import executor_of
from outpace.speculation.costs.curves import SIZES as SIZES
from outpace.speculation.costs.curves import Costs, DraftCosts, StepCosts
from outpace.speculation.proposers.base import Proposer

_log = logging.getLogger("outpace.costs")

_ROUNDS = 3
_TURNS = 5  # measurements of two steps that are compared
_TURNS_SHARE = 0.1  # of a budget, for those
TARGET_BUDGET = 1.4  # seconds
_DRAFT_BUDGET = 0.6  # seconds; less, because a draft model is smaller
_CATCH_UP_BUDGET = 0.4  # seconds
CATCH_UP_SIZES = (16, 64, 128, 256, 512, 1024)
_CONTEXT_BUDGET = 0.4  # share of a budget, for measuring the cost of context
_MAX_CONTEXT = 1024
_MIN_CONTEXT = 48  # the cost of a shorter one is lost in noise
_MANY_ROWS = (3, 32)  # least and most rows, for measuring context in many rows
_MANY_CONTEXT = (128, 256)  # least and most tokens of each row: shorter ones cost less per token than real ones
_PARALLEL_ROWS = (8, 0.4)  # rows count as parallel from 8 on, if they cost less than 0.4 of separate rows
_SEVERAL = 8  # tokens of one row, for measuring the cost per token

_HEAD_ROWS = (1, 4, 16, 64)  # a draft head is timed with: its cost lies between, because its weights are few
_TREE_ROWS = (1, 8)  # its trees: more requests verify too many tokens for them to pay
_HEAD_CONTEXT, _HEAD_DEPTH = 32, 4  # tokens per row (a page) and depth
_HEAD_EMITTED = 3  # tokens that a step with a draft of that depth usually emits; the next draft begins with them
_HEAD_CATCH_UP = 0.1  # seconds: when the prompts that are caught up with took longer, no larger one is measured

_Observation = tuple[int, int, int, float]  # rows, tokens, context, and the seconds that the context added


def measure(target: Runner, proposers: Iterable[Proposer], scratch: Request) -> Costs:
    """Measure all costs. Call only while nothing runs: it uses the runner's sequences and leaves them empty."""
    costs = Costs(target=measure_steps(target, TARGET_BUDGET))
    for proposer in proposers:
        costs.drafts[proposer.name] = proposer.measure_costs(scratch)
    return costs


def measure_draft_model(runner: Runner, patience: float = 1.0) -> DraftCosts:
    """The costs of a model that drafts one token per pass. `patience` multiplies the time that is spent on it."""
    passes = measure_steps(runner, patience * _DRAFT_BUDGET)
    return DraftCosts(passes, _measure_catch_up(runner, passes.seconds(1, 1), patience * _CATCH_UP_BUDGET))


def measure_head(runner: Runner, head: Head, scratch: Request, tree: Tree | None = None) -> DraftCosts:
    """The costs of a draft head. All passes of a draft are one call, so the first is timed by drafts of one token, and
    the others by drafts of usual depth. With `tree`, those are this tree, and each of its levels is a pass."""
    room = runner.capacity
    if tree is not None and min(room.max_context, room.cache_tokens) < len(tree) + _HEAD_EMITTED + 1:
        tree = None  # it will hardly ever have room
    usual, most = (_HEAD_DEPTH, _HEAD_DEPTH) if tree is None else (tree.depth, len(tree))
    rows = [size for size in (_HEAD_ROWS if tree is None else _TREE_ROWS) if size <= _most_rows(runner)]
    if tree is not None:
        rows = [size for size in rows if room.cache_tokens // size > most + _HEAD_EMITTED]
    length = min(_HEAD_CONTEXT, room.max_context - most - 1, room.cache_tokens // rows[-1] - most)
    timed = _TimedDrafts(runner, head, scratch)
    first, points = dict[int, float](), dict[int, float]()
    with _holding(runner, rows[-1], 0):
        _prefill(runner, 0, 0, length, room.max_step_tokens)
        for seq in range(1, rows[-1]):
            runner.fork(0, seq, timed.last(length))  # the first step gives each row a page of its own
        for size in rows:
            first[size], whole = (
                min([timed(range(size), length, *draft) for _ in range(1 + _ROUNDS)])
                for draft in ((1, None), (usual, tree))
            )  # the first of them also catches up
            points[size] = max(whole - first[size], whole / usual / 2) / (usual - 1)
    catch_up, done, spent = {1: first[1]}, 0, 0.0
    with _holding(runner, 2, 0):
        for size in CATCH_UP_SIZES:
            if size > min(room.max_context - 2, room.cache_tokens // 2) or spent > _HEAD_CATCH_UP:
                break
            begin, num_prepared = perf_counter(), _num_prepared(runner)
            _prefill(runner, 0, done, size, room.max_step_tokens)
            done = size
            if _num_prepared(runner) == num_prepared:
                spent += perf_counter() - begin
            seconds = list[float]()
            for _ in range(2):  # the first may include one-time work, such as a capture
                runner.fork(0, 1, timed.last(size))
                seconds.append(timed([1], size, 1))
                runner.free(1)
            catch_up[size] = min(seconds)
            spent += 2 * catch_up[size]
    return DraftCosts(StepCosts(points), StepCosts(catch_up) if len(catch_up) > 1 else None, first=StepCosts(first))


def _num_prepared(runner: Runner) -> int:
    """How often one-time work, such as a capture, made a step slow."""
    count = runner.capabilities.num_prepared
    return count() if count is not None else 0


class _GoesOn:
    """A rule that ends no draft. With one, a head computes its confidence, as it does for `auto`."""

    is_over = False

    def __call__(self, confidence: float) -> bool:
        return True


class _TimedDrafts:
    """Times drafts of a head after a step like those before them."""

    def __init__(self, runner: Runner, head: Head, scratch: Request) -> None:
        self._runner, self._head = runner, head
        self._scratch = replace(scratch, params=SamplingParams(temperature=0.0))

    def last(self, length: int) -> int:
        """Where the last step of a sequence of `length` tokens began."""
        return max(1, length - _HEAD_EMITTED + 1)

    def __call__(self, seqs: Sequence[int], length: int, depth: int, tree: Tree | None = None) -> float:
        """Seconds of one draft for these sequences, which hold `length` tokens or all but the last step's."""
        tokens, last = _some_tokens(self._runner, length + 1), self.last(length)
        requests = [replace(self._scratch, tokens=tokens, seq=seq, num_computed=length) for seq in seqs]
        for seq in seqs:
            self._runner.truncate(seq, last)
        # The head leaves the CPU cache.
        _run(self._runner, StepPlan([Row(seq, last, tokens[last:length], 1) for seq in seqs]))
        begin = perf_counter()
        self._head.draft([HeadTask(request, depth, _GoesOn(), tree) for request in requests])
        return perf_counter() - begin


def warm_up(runner: Runner) -> None:
    """Run one pass when costs are known already: the first touches all weights and can be many times slower.

    Otherwise a draft model's first pass would be booked as a loss of speculation and restrict later drafts.
    """
    _timed(runner, _plan(runner, [1], 0))


def warm_up_head(runner: Runner, head: Head, scratch: Request) -> None:
    """The same for a head, which drafts from what the target has computed: a first draft reads the head's file."""
    request = replace(scratch, params=SamplingParams(temperature=0.0), tokens=_some_tokens(runner, 2), seq=0,
                      num_computed=1)  # fmt: skip
    try:
        _prefill(runner, 0, 0, 1, runner.capacity.max_step_tokens)
        head.draft([HeadTask(request, 1)])
    finally:
        runner.free(0)


def measure_steps(runner: Runner, budget: float) -> StepCosts:
    start, room = _start(runner), runner.capacity
    largest = min(room.max_step_tokens, room.max_context - 1, room.cache_tokens - start * room.max_sequences)
    sizes = [size for size in SIZES if size <= min(largest, 16 * room.max_sequences)] or [1]
    plans = {size: _plan(runner, _row_lengths(runner, size), start) for size in sizes}
    points, begin = dict[int, float](), perf_counter()
    with _holding(runner, max(len(plan.rows) for plan in plans.values()), start):
        # The first pass touches memory; if steps are captured, the first pass of each size includes the capture.
        for size in sizes if runner.capabilities.captured is not None else sizes[:1]:
            _timed(runner, plans[size])
        spent_here = 0.0
        for size in sizes:  # the first round finds which sizes fit the budget
            points[size] = _timed(runner, plans[size])
            spent_here += points[size]
            if spent_here * _ROUNDS > budget * (1 - _CONTEXT_BUDGET):
                break
        for _ in range(_ROUNDS - 1):
            for size in points:
                points[size] = min(points[size], _timed(runner, plans[size]))
    costs = _with_rows(runner, points, budget)
    extras = _measure_context(runner, costs, budget)
    costs.context_seconds, costs.row_context_seconds, costs.token_context_seconds = extras
    _log.debug("measured %d sizes in %.2f s", len(points), perf_counter() - begin)
    return costs


def _measure_catch_up(runner: Runner, step_seconds: float, budget: float) -> StepCosts | None:
    """Time passes over one sequence with only the last logits, the better of two, within the budget."""
    room = runner.capacity
    largest = min(room.max_step_tokens, room.max_context - 1, room.cache_tokens)
    points, left = {1: step_seconds}, budget
    for size in CATCH_UP_SIZES:
        last = max(points)
        if size > largest or (last > 1 and 2 * points[last] * size / last > left):
            break
        with _holding(runner, 1, 0):
            points[size] = min(_timed(runner, _plan(runner, [size], 0, num_logits=1)) for _ in range(2))
        left -= 2 * points[size]
    return StepCosts(points) if len(points) > 1 else None


def _row_lengths(runner: Runner, size: int) -> list[int]:
    """A step of `size` tokens: one row, or several if captured steps limit the row length."""
    longest = runner.capabilities.captured[1] if runner.capabilities.captured is not None else size
    whole, rest = divmod(size, longest)
    return [longest] * whole + [rest] * (rest > 0)


def _with_rows(runner: Runner, points: Mapping[int, float], budget: float) -> StepCosts:
    """The curve over tokens in one row, and the cost of each further row, measured on the largest batch."""
    rows, start = min(_most_rows(runner), max(points)), _start(runner)
    if rows == 1:
        return StepCosts(points)
    in_fewer = _row_lengths(runner, rows)
    with _holding(runner, rows, start):
        added = _added(runner, _plan(runner, in_fewer, start), _plan(runner, [1] * rows, start), budget)
    row_seconds = added * StepCosts(points).seconds(1, rows) / (rows - len(in_fewer))
    further = {size: len(_row_lengths(runner, size)) - 1 for size in points}
    alone = {size: max(seconds - further[size] * row_seconds, seconds / 2) for size, seconds in points.items()}
    return StepCosts(alone, row_seconds=row_seconds)


def _most_rows(runner: Runner) -> int:
    """The largest number of rows in a decoding step."""
    captured, most = runner.capabilities.captured, runner.capacity.max_sequences
    return most if captured is None else min(most, captured[0])


def _measure_context(runner: Runner, costs: StepCosts, budget: float) -> tuple[float, float, float]:
    """The cost of a token of context: per step, per row, and per new token.

    Measured on a long context in one row and, if the budget allows, on shorter ones in many rows: with parallel
    attention, as on a GPU, many rows cost far less than the same rows one by one.
    """
    chunk, several = max(costs.points), max(size for size in costs.points if size <= _SEVERAL)
    affordable = int(_CONTEXT_BUDGET * budget * chunk / costs.seconds(1, chunk))
    alone, rows, shared = _contexts(runner, affordable)
    start = _start(runner)
    if alone < _MIN_CONTEXT or several == 1 or not start:
        return 0.0, 0.0, 0.0
    seen = list[_Observation]()

    def see(row_lengths: list[int], context: int) -> None:
        num_rows, num_tokens = len(row_lengths), sum(row_lengths)
        short = _plan(runner, row_lengths, start, first=rows)
        added = _added(runner, short, _plan(runner, row_lengths, context), budget)
        seen.append((num_rows, num_tokens, context - start, added * costs.seconds(num_rows, num_tokens)))

    with _holding(runner, 2 * rows, start):  # the first half get a context, the others stay short
        _prefill(runner, 0, start, alone, chunk)
        see([1], alone)
        see([several], alone)
        if rows > 1:
            runner.truncate(0, shared)
            for seq in range(1, rows):
                _prefill(runner, seq, start, shared, chunk)
            see([1] * rows, shared)
    return _fitted(seen)


def _contexts(runner: Runner, affordable: int) -> tuple[int, int, int]:
    """The context length of a single row, the number of rows measured together, and their context length.

    At most half of the affordable tokens go to the single row, or all if many rows would get too few. As many rows
    again have no context, for comparison.
    """
    room = runner.capacity
    if room.max_sequences == 1:
        return 0, 0, 0
    affordable = min(affordable, room.cache_tokens - 2 * room.max_sequences - _SEVERAL)
    longest = min(_MAX_CONTEXT, room.max_context - _SEVERAL)
    alone = min(longest, affordable // 2)
    left = affordable - alone
    fitting = min(_most_rows(runner), room.max_step_tokens) // 2
    rows = min(fitting, _MANY_ROWS[1], 1 + left // _MANY_CONTEXT[0])
    if rows < _MANY_ROWS[0] or alone < _MANY_CONTEXT[0]:
        return min(longest, affordable), 1, 0
    return alone, rows, min(alone, _MANY_CONTEXT[1], left // (rows - 1))


def _fitted(seen: Sequence[_Observation]) -> tuple[float, float, float]:
    """The three costs of context. The cost per step is fitted only if many rows clearly cost less than separate rows;
    otherwise it would be noise, and only the costs per row and per token are fitted."""
    rows, tokens, context, seconds = seen[-1]
    _, row_seconds, token_seconds = _least_squares([each for each in seen if each[0] == 1], (1, 2))
    expected = context * (rows * row_seconds + tokens * token_seconds)
    is_parallel = rows >= _PARALLEL_ROWS[0] and seconds < _PARALLEL_ROWS[1] * expected
    return _least_squares(seen, (0, 1, 2) if is_parallel else (1, 2))


def _least_squares(seen: Sequence[_Observation], columns: Sequence[int]) -> tuple[float, float, float]:
    """Seconds per token of context, by step, row and new token: the best non-negative fit of these columns."""
    rows, tokens, context, seconds = np.array(seen).T
    table = np.array([context, context * rows, context * tokens]).T
    best, least = np.zeros(3), float(seconds @ seconds)
    for used in (used for count in range(1, 4) for used in map(list, combinations(columns, count))):
        found = np.linalg.lstsq(table[:, used], seconds, rcond=None)[0]
        error = float(np.sum((table[:, used] @ found - seconds) ** 2))
        if found.min() >= 0 and error < least:
            best, least = np.zeros(3), error
            best[used] = found
    return float(best[0]), float(best[1]), float(best[2])


def _prefill(runner: Runner, seq: int, start: int, end: int, chunk: int) -> None:
    for at in range(start, end, chunk):
        _run(runner, StepPlan([Row(seq, at, _some_tokens(runner, min(chunk, end - at)), 0)]))


def _start(runner: Runner) -> int:
    """Tokens that a sequence holds before a step is timed: starting a sequence takes extra time."""
    room = runner.capacity
    has_room = room.max_context > 1 and room.cache_tokens >= 2 * room.max_sequences
    return 1 if runner.capabilities.can_rewind and has_room else 0


@contextmanager
def _holding(runner: Runner, rows: int, tokens: int) -> Iterator[None]:
    """The first `rows` sequences hold `tokens` tokens each; they are freed at the end, also after an error."""
    try:
        if tokens:
            _run(runner, StepPlan([Row(seq, 0, _some_tokens(runner, tokens), 0) for seq in range(rows)]))
        yield
    finally:
        for seq in range(rows):
            runner.free(seq)


def _plan(
    runner: Runner, row_lengths: Sequence[int], start: int, *, first: int = 0, num_logits: int | None = None
) -> StepPlan:
    """Rows of sequences that hold `start` tokens, with all logits or the last `num_logits` of each row."""
    rows = [Row(first + i, start, _some_tokens(runner, n), num_logits or n) for i, n in enumerate(row_lengths)]
    return StepPlan(rows)


def _timed(runner: Runner, plan: StepPlan) -> float:
    """Run and time a step, then restore its sequences."""
    begin = perf_counter()
    _run(runner, plan)
    seconds = perf_counter() - begin
    for row in plan.rows:
        if row.start:
            runner.truncate(row.seq, row.start)
        else:
            runner.free(row.seq)
    return seconds


def _added(runner: Runner, plan: StepPlan, larger: StepPlan, budget: float) -> float:
    """The extra time of `larger`, relative to `plan`. They take turns, because the machine's speed varies."""
    if runner.capabilities.captured is not None:
        _timed(runner, plan)
        _timed(runner, larger)
    seconds, begin = list[tuple[float, float]](), perf_counter()
    while not seconds or (len(seconds) < _TURNS and perf_counter() - begin < _TURNS_SHARE * budget):
        seconds.append((_timed(runner, plan), _timed(runner, larger)))
    smaller_seconds, larger_seconds = map(min, zip(*seconds, strict=True))
    return max(0.0, float(larger_seconds / smaller_seconds) - 1.0)


def _run(runner: Runner, plan: StepPlan) -> None:
    """Run a step as requests do: logits are copied to the host only if the backend does so for requests."""
    executor_of(runner)(plan, [])


def _some_tokens(runner: Runner, count: int) -> list[int]:
    return [(i * 131 + 7) % runner.vocab_size for i in range(count)]

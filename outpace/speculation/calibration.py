"""Measuring costs at start, in about two seconds, and keeping them on disk for the next start.

Sizes take turns within every round, so that a noisy moment hits all of them, and the fastest of each counts. The file
says which machine, model and build it was measured on; one that does not fit, or cannot be read, is measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import outpace
from outpace.backends.base import Runner
from outpace.config import ResolvedConfig, usable_cores
from outpace.core import Draft, Request, Row, StepPlan
from outpace.speculation.base import DraftAsk, Proposer
from outpace.speculation.costs import Costs, StepCosts
from outpace.verification import judge_of

_log = logging.getLogger("outpace.costs")

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_FORMAT = 5
_ROUNDS = 3
_TARGET_BUDGET = 1.4  # seconds; the draft gets less, because it is smaller
_DRAFT_BUDGET = 0.6
_READING_BUDGET = 0.4
_READING_SIZES = (16, 64, 128, 256, 512, 1024)
_CONTEXT_BUDGET = 0.25  # of the above, for reading a context in to see what it adds
_MAX_CONTEXT = 1024
_MIN_CONTEXT = 48  # a shorter one adds too little to be told from noise
_GUESS_TEXT = 256  # tokens a proposer is timed on
_GUESS_REPEATS = 8


def measure(target: Runner, draft: Runner | None, guessers: Sequence[Proposer], scratch: Request) -> Costs:
    """Time everything once. Only while nothing runs: all sequences are borrowed and given back empty."""
    costs = Costs(target=measure_steps(target, _TARGET_BUDGET))
    if draft is not None:
        costs.draft = measure_steps(draft, _DRAFT_BUDGET)
        costs.reading = _measure_reading(draft, costs.draft.seconds(1, 1))
    for proposer in guessers:
        costs.guess_seconds[proposer.name] = _measure_guesses(proposer, scratch)
    return costs


def measure_steps(runner: Runner, budget: float) -> StepCosts:
    room = runner.capacity
    largest = min(room.max_step_tokens, room.max_context - 1, room.cache_tokens)
    sizes = [size for size in SIZES if size <= min(largest, 16 * room.max_sequences)] or [1]
    # The first pass pays for touching memory; where steps are captured, that of every size for its capture.
    for size in sizes if runner.capabilities.captured is not None else sizes[:1]:
        _timed(runner, _row_lengths(runner, size))
    points, begin = dict[int, float](), perf_counter()
    spent_here = 0.0
    for size in sizes:  # the first round finds out how far the budget reaches
        points[size] = _timed(runner, _row_lengths(runner, size))
        spent_here += points[size]
        if spent_here * _ROUNDS > budget * (1 - _CONTEXT_BUDGET):
            break
    for _ in range(_ROUNDS - 1):
        for size in points:
            points[size] = min(points[size], _timed(runner, _row_lengths(runner, size)))
    costs = _with_rows(runner, points)
    costs.row_context_seconds, costs.token_context_seconds = _measure_context(runner, points, budget * _CONTEXT_BUDGET)
    _log.debug("measured %d sizes in %.2f s", len(points), perf_counter() - begin)
    return costs


def _measure_reading(runner: Runner, step_seconds: float) -> StepCosts | None:
    """Texts in one pass each, of which only the last logits are wanted; the better of two, while time allows."""
    room = runner.capacity
    largest = min(room.max_step_tokens, room.max_context - 1, room.cache_tokens)
    points, left = {1: step_seconds}, _READING_BUDGET
    for size in _READING_SIZES:
        last = max(points)
        if size > largest or (last > 1 and 2 * points[last] * size / last > left):
            break
        points[size] = min(_timed(runner, [size], num_logits=1) for _ in range(2))
        left -= 2 * points[size]
    return StepCosts(points) if len(points) > 1 else None


def _row_lengths(runner: Runner, size: int) -> list[int]:
    """A step of so many tokens: one row, or as many as it takes to be a step of the kind that requests make."""
    longest = runner.capabilities.captured[1] if runner.capabilities.captured is not None else size
    whole, rest = divmod(size, longest)
    return [longest] * whole + [rest] * (rest > 0)


def _with_rows(runner: Runner, points: Mapping[int, float]) -> StepCosts:
    """The curve over tokens in one row, and what each further row adds: measured on as many rows as there can be."""
    most = runner.capabilities.captured[0] if runner.capabilities.captured is not None else max(points)
    rows = min(runner.capacity.max_sequences, max(points), most)
    if rows == 1:
        return StepCosts(points)
    further = {size: len(_row_lengths(runner, size)) - 1 for size in points}
    together = min(_timed(runner, [1] * rows) for _ in range(_ROUNDS))
    in_fewer = StepCosts(points).seconds(1, rows)
    row_seconds = max(0.0, together - in_fewer) / (rows - len(_row_lengths(runner, rows)))
    alone = {size: max(seconds - further[size] * row_seconds, seconds / 2) for size, seconds in points.items()}
    return StepCosts(alone, row_seconds=row_seconds)


def _measure_context(runner: Runner, points: Mapping[int, float], budget: float) -> tuple[float, float]:
    """What a token of context adds to a step: for its row, and for each new token of the row."""
    room = runner.capacity
    chunk = max(points)
    affordable = int(budget / points[chunk]) * chunk
    context = min(_MAX_CONTEXT, affordable, room.max_context - 16, room.cache_tokens - 16)
    few, several = 1, max(size for size in points if size <= 8)
    if context < _MIN_CONTEXT or several == few or not runner.capabilities.can_rewind:
        return 0.0, 0.0
    seq = room.max_sequences - 1
    seconds = {few: float("inf"), several: float("inf")}
    try:
        for start in range(0, context, chunk):
            _run(runner, StepPlan([Row(seq, start, _some_tokens(runner, min(chunk, context - start)), 0)]))
        for _ in range(_ROUNDS):
            for size in seconds:
                begin = perf_counter()
                _run(runner, StepPlan([Row(seq, context, _some_tokens(runner, size), size)]))
                seconds[size] = min(seconds[size], perf_counter() - begin)
                runner.truncate(seq, context)
    finally:
        runner.free(seq)
    added = {size: max(0.0, seconds[size] - points[size]) / context for size in seconds}
    for_token = max(0.0, (added[several] - added[few]) / (several - few))
    return max(0.0, added[few] - few * for_token), for_token


def _timed(runner: Runner, row_lengths: Sequence[int], num_logits: int | None = None) -> float:
    """Every token's logits are wanted, or of each row those of the last so many."""
    plan = StepPlan([Row(seq, 0, _some_tokens(runner, n), num_logits or n) for seq, n in enumerate(row_lengths)])
    try:
        begin = perf_counter()
        _run(runner, plan)
        return perf_counter() - begin
    finally:
        for row in plan.rows:
            runner.free(row.seq)


def _run(runner: Runner, plan: StepPlan) -> None:
    """A step as requests will pay for it: logits are brought to the host only where that is what happens."""
    judge_of(runner)(plan, [])


def _some_tokens(runner: Runner, count: int) -> list[int]:
    return [(i * 131 + 7) % runner.vocab_size for i in range(count)]


def _measure_guesses(proposer: Proposer, scratch: Request) -> float:
    """A guess in a text that repeats itself, after it was read: as costly as guesses come."""
    scratch.tokens = [i % 37 for i in range(_GUESS_TEXT)]
    try:
        proposer.propose([DraftAsk(scratch, 8)])
        begin = perf_counter()
        for i in range(_GUESS_REPEATS):
            scratch.tokens.append(i)
            drafts: list[Draft] = proposer.propose([DraftAsk(scratch, 8)])
            assert len(drafts) == 1
        return (perf_counter() - begin) / _GUESS_REPEATS
    finally:
        scratch.tokens = list(scratch.prompt)  # what was said in it is no text to learn from
        proposer.release(scratch)


@dataclass(frozen=True, slots=True)
class CostFile:
    """Where the costs of one setting on this machine are kept."""

    path: Path
    fingerprint: Mapping[str, Any]

    @classmethod
    def for_config(cls, config: ResolvedConfig, folder: Path) -> CostFile:
        """One file per model, draft, backend and number of threads; the fingerprint says the rest."""
        setting = [config.model, config.draft, config.backend, config.threads, config.max_sequences]
        name = hashlib.sha256(json.dumps(setting).encode()).hexdigest()[:16]
        fingerprint = {
            "format": _FORMAT,
            "outpace": outpace.__version__,
            "machine": [platform.machine(), _processor(), usable_cores()],
            "setting": setting,
            "model": _stamp(config.model),
            "draft": _stamp(config.draft) if config.draft else None,
        }
        return cls(folder / "costs" / f"{name}.json", fingerprint)

    def load(self) -> Costs | None:
        """What was measured last time; None, with a line in the log, where that cannot be used."""
        try:
            saved = json.loads(self.path.read_text(encoding="utf-8"))
            wrong = [name for name, value in self.fingerprint.items() if saved["fingerprint"].get(name) != value]
            if wrong:
                _log.info("costs were measured with another %s; measuring again", " and ".join(wrong))
                return None
            return Costs.from_dict(saved["costs"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            _log.warning("the file of measured costs cannot be used (%s: %s); measuring again", self.path, error)
            return None

    def save(self, costs: Costs) -> None:
        """Written beside and moved into place: a reader never sees half a file."""
        text = json.dumps({"fingerprint": self.fingerprint, "costs": costs.as_dict()}, indent=1)
        partial = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            partial.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            _log.warning("measured costs could not be kept (%s); they will be measured again next time", error)


def _stamp(path: str) -> list[int]:
    """A file that was replaced is another model."""
    found = Path(path)
    if not found.exists():
        return []
    status = found.stat()
    return [status.st_size, status.st_mtime_ns]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()

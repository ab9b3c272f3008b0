"""Measures how long forward passes of different sizes take, for several runners.

Runners alternate within every round, so that noise affects all of them equally. Callers take medians of the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter, sleep

from outpace.backends.base import Runner
from outpace.core import Row, StepPlan

CURVE_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
_CONTEXT = 64  # tokens already in the cache
_STEPS = 4  # consecutive forward passes, as in decoding
REST = 0.05  # seconds: a backend's threads spin for some milliseconds after a step and would slow the next backend


def measure_curves(
    runners: Mapping[str, Runner], sizes: Sequence[int], rounds: int
) -> dict[str, dict[int, list[float]]]:
    """Seconds of single forward passes over one row of each size, with logits for all its tokens."""
    seconds: dict[str, dict[int, list[float]]] = {name: {size: [] for size in sizes} for name in runners}
    for runner in runners.values():
        context = [token % runner.vocab_size for token in range(_CONTEXT)]
        runner.forward(StepPlan([Row(_last_sequence(runner), 0, context, 0)]))
        _run(runner, max(sizes))  # the first pass is slow: it touches new memory
    for _ in range(rounds):
        for size in sizes:
            for name, runner in runners.items():
                sleep(REST)
                seconds[name][size] += _run(runner, size)
    for runner in runners.values():
        runner.free(_last_sequence(runner))
    return seconds


def _last_sequence(runner: Runner) -> int:
    return runner.capacity.max_sequences - 1


def _run(runner: Runner, size: int) -> list[float]:
    seq = _last_sequence(runner)
    taken = []
    for step in range(1 + _STEPS):
        tokens = [(step * 977 + i * 131) % runner.vocab_size for i in range(size)]
        begin = perf_counter()
        runner.forward(StepPlan([Row(seq, _CONTEXT, tokens, size)]))
        taken.append(perf_counter() - begin)
        runner.truncate(seq, _CONTEXT)
    return taken[1:]  # the first one wakes the threads

"""What somebody sees who looks at a running engine: load, speed, drafts, and the latest decisions.

Nothing is kept while nobody looks. `begin`, `look` and `end` run in the engine's thread, between steps. Numbers that
grow are totals, so that each reader can form rates over a time of its own; what drafts did by position is a total since
`begin`. A snapshot has counts and times only, never text.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

from outpace.core import Request
from outpace.engine.engine import Engine
from outpace.metrics import EngineMetrics
from outpace.speculation.policy.trace import StepTrace

# Tracing a request in a step takes half a microsecond, and reading it about as much.
_KEPT_STEPS, _MAX_ROWS = 64, 16
_SHOWN_STEPS = 12
_SHOWN_REQUESTS = 24
_LOSING = 0.98  # times plain decoding: below this, speculation does not pay for a request

Counts = list[list[int]]  # by position: drafted, accepted


class Watch:
    def __init__(self, engine: Engine, metrics: EngineMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._positions: dict[str, Counts] = {}  # by proposer
        self._last_step = 0  # the latest that is counted there

    def begin(self) -> None:
        self._positions = {}
        self._engine.policy.keep_trace(_KEPT_STEPS, _MAX_ROWS)

    def end(self) -> None:
        self._engine.policy.keep_trace(0)

    def look(self) -> dict[str, Any]:
        engine, m = self._engine, self._metrics
        m.look_at(engine)
        # The latest step's outcome may not be known yet: the engine learns while the next step runs.
        steps = [step for step in engine.policy.trace if step.seconds is not None]
        self._count_positions(steps)
        return {
            "clock": perf_counter(),
            "running": m.num_running,
            "waiting": m.num_waiting,
            "cache": m.cache_usage,
            "generated": m.num_generated_tokens,
            "prompted": m.num_prompt_tokens,
            "finished": sum(m.finished.values()),
            "faults": m.num_faults,
            "preemptions": m.num_preemptions,
            "steps": m.num_steps,
            "seconds": {part: round(seconds, 6) for part, seconds in m.step_seconds.items()},
            "plain_step": engine.policy.plain_step_seconds,
            "floor": engine.floor_seconds,
            "spent": m.spent_seconds,
            "plain": m.plain_seconds,
            "balance": engine.budget.balance,
            "methods": {name: [n.num_drafts, n.num_drafted, n.num_accepted] for name, n in m.by_method.items()},
            "depths": m.depth.nonzero(),
            "positions": self._positions,
            "requests": self._requests(),
            "trace": [_as_dict(step) for step in steps[-_SHOWN_STEPS:]],
        }

    def _count_positions(self, steps: list[StepTrace]) -> None:
        for step in steps:
            if step.step <= self._last_step:
                continue
            self._last_step = step.step
            for row in step.rows:
                if row.num_drafted:
                    counts = self._positions.setdefault(row.method, [])
                    counts += [[0, 0] for _ in range(row.num_drafted - len(counts))]
                    for position in range(row.num_drafted):
                        counts[position][0] += 1
                        counts[position][1] += position < row.num_accepted

    def _requests(self) -> dict[str, Any]:
        """Of the running requests those that gain least from speculation, and for how many it does not pay."""
        speeds = [(request.spec.estimated_speedup, request) for request in self._engine.scheduler.running]
        known = [speed for speed, _ in speeds if speed is not None]
        speeds.sort(key=lambda each: (each[0] is None, each[0] or 0.0))
        return {
            "known": len(known),
            "losing": sum(speed < _LOSING for speed in known),
            "shown": list(self._rows(speeds[:_SHOWN_REQUESTS])),
        }

    def _rows(self, speeds: list[tuple[float | None, Request]]) -> Iterator[dict[str, Any]]:
        now, usual = perf_counter(), self._engine.config.speculation
        for speed, request in speeds:
            spec = request.spec
            yield {
                "id": request.id,
                "mode": request.params.speculation.mode or usual,
                "seconds": round(now - request.submitted_at, 3),
                "prompt": len(request.prompt),
                "tokens": request.num_output,
                "drafted": spec.num_drafted,
                "accepted": spec.num_accepted,
                "proposers": sorted(spec.proposers),
                "speedup": None if speed is None else round(speed, 3),
            }


def _as_dict(step: StepTrace) -> dict[str, Any]:
    drafts = [row for row in step.rows if row.depth]
    return {
        "step": step.step,
        "reason": step.reason,
        "seconds": step.seconds,
        "plain": step.plain_seconds,
        "rows": len(step.rows),
        "emitted": sum(row.num_emitted for row in step.rows),
        "expected": round(sum(row.expected_tokens for row in step.rows), 2),
        "drafts": [[row.method, row.num_drafted, row.num_accepted] for row in drafts],
    }

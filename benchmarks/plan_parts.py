"""The parts of real steps beside what a plan says of each: drafting a token, verifying, the host, reading the prompt.

A predicted speedup can be right because two errors cancel; its parts show that. `StepParts` watches an engine while a
benchmark runs one request at a time; `predicted_parts` takes the same parts from the costs that the plan uses. For a
saved result of `plan_check`,

    python -m benchmarks.plan_parts RESULT.json

puts the measured parts into the plan's formula. Where that gives the measured speedup and the calibrated costs do not,
the formula is complete and the machine's speed changed between calibrations and runs.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from outpace.core import Delta
from outpace.engine.engine import Engine
from outpace.plan.speed import Drafting

Cell = tuple[float, str]  # temperature and setting


@dataclass(slots=True)
class Step:
    """One decoding step: its seconds, whole and in parts."""

    depth: int
    seconds: float
    parts: dict[str, float]

    def fastest(self, other: Step) -> Step:
        assert self.depth == other.depth and self.parts.keys() == other.parts.keys(), "not the same step"
        parts = {part: min(seconds, other.parts[part]) for part, seconds in self.parts.items()}
        return Step(self.depth, min(self.seconds, other.seconds), parts)


@dataclass(slots=True)
class StepParts:
    """Decoding steps of runs with one request each. The runs of a prompt, temperature and setting are repeated; their
    steps do the same work, so the fastest time of each step counts: other programs only make a step slower."""

    runs: dict[tuple[int, Cell], list[Step]] = field(default_factory=dict)  # by number of the prompt
    _steps: list[Step] = field(default_factory=list)  # of the present run
    _is_first: bool = False  # the next step is the first one after a prefill, in which a draft begins by reading

    @contextmanager
    def watching(self, engine: Engine) -> Iterator[None]:
        step = engine.step

        def watched() -> list[Delta]:
            begin = perf_counter()
            deltas = step()
            self._add(engine, perf_counter() - begin)
            return deltas

        _replace_step(engine, watched)
        try:
            yield
        finally:
            _replace_step(engine, step)

    def _add(self, engine: Engine, seconds: float) -> None:
        stats, is_first = engine.stats, self._is_first
        self._is_first = stats.num_prefill_tokens > 0
        if not stats.num_decode_rows or self._is_first:
            return
        depth = max(stats.depths, default=0)
        found = {"verify": stats.forward_seconds}
        found["host"] = stats.schedule_seconds + stats.policy_seconds + stats.verify_seconds
        if depth:
            found["first_draft" if is_first else "draft_token"] = stats.draft_seconds / (1 if is_first else depth)
        self._steps.append(Step(depth, seconds, found))

    def end_run(self, number: int, temperature: float, setting: str) -> None:
        """The run that has just ended."""
        key, steps = (number, (temperature, setting)), self._steps
        self._steps = []
        known = self.runs.get(key)
        self.runs[key] = steps if known is None else [a.fastest(b) for a, b in zip(known, steps, strict=True)]

    def seconds(self, cell: Cell) -> list[float]:
        """Decode time by prompt."""
        return [sum(step.seconds for step in steps) for (_, of), steps in sorted(self.runs.items()) if of == cell]

    def medians(self, cell: Cell, depth: int) -> dict[str, float]:
        """Of steps with a draft of this depth. Reading is what the first draft of an answer takes more than others."""
        seen: dict[str, list[float]] = {}
        for (_, of), steps in self.runs.items():
            for step in steps if of == cell else ():
                for part, seconds in step.parts.items() if step.depth == depth else ():
                    seen.setdefault(part, []).append(seconds)
        found = {part: statistics.median(seconds) for part, seconds in seen.items()}
        if depth:
            found["reading"] = found.pop("first_draft") - depth * found["draft_token"]
        return found


def predicted_parts(drafting: Drafting, depth: int, context: float) -> dict[str, float]:
    costs = drafting.costs
    found = {
        "verify": costs.target.seconds(1, 1 + depth, context),
        "host": costs.schedule_seconds + costs.token_seconds * (drafting.expected(depth) if depth else 1.0),
    }
    if depth:
        found["draft_token"] = costs.drafts[drafting.name].seconds(1, depth, context) / depth
        found["reading"] = drafting.reading_seconds
    return found


def _replace_step(engine: Engine, step: Callable[[], list[Delta]]) -> None:
    engine.step = step  # type: ignore[method-assign]


def composed(row: dict[str, Any]) -> float:
    """The speedup by the plan's formula from measured parts. A plain step's host time counts as that of other steps."""
    parts, tokens = row["measured"]["parts"], row["measured"]["tokens_per_step"]
    depth, num_decoded = int(row["setting"].partition(":")[2]), row["predicted"]["decoded_tokens"]
    step = depth * parts["draft_token"] + parts["verify"] + parts["host"] + tokens * parts["reading"] / num_decoded
    return float(tokens * (parts["plain"] + parts["host"]) / step)


def main() -> None:
    for row in json.loads(Path(sys.argv[1]).read_text())["speed"]:
        measured, calibrated, by_parts = row["measured"]["decode_ratio"], row["predicted"]["speedup"], composed(row)
        print(
            f"temperature {row['temperature']:g}, {row['setting']}, {row['measured']['num_prompts']} prompts: measured "
            f"{measured['value']:.3f} ({measured['low']:.2f} to {measured['high']:.2f}); by calibrated costs "
            f"{calibrated:.3f}: {calibrated / measured['value'] - 1:+.1%}; by measured parts {by_parts:.3f}: "
            f"{by_parts / measured['value'] - 1:+.1%}; by calibrated costs without reading "
            f"{row['predicted']['without_reading']:.3f}"
        )


if __name__ == "__main__":
    main()

"""Runs the same requests under every setting, block by block in random order, in one process on one engine.

A noisy or throttled machine then affects all settings alike, so the ratio of two settings is meaningful. Caches (kept
prefixes, the suffix proposer's store) are emptied between runs, so no setting profits from another's answers to the
same prompts. Costs are calibrated before the first measurement.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from outpace.bench.loads import Load
from outpace.bench.settings import PLAIN, Setting
from outpace.bench.statistics import Estimate, ratio_of_rates
from outpace.bench.targets import Target
from outpace.bench.trials import Job, Run, Trial
from outpace.core import estimated_speedup

Pair = tuple[Trial, Trial]
SpeedRow = tuple[float, float, float, float]


@dataclass(slots=True)
class Paired:
    """Runs by setting; the i-th run of each setting has the same requests, one block."""

    settings: Sequence[Setting]
    runs: dict[str, list[Run]] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        return min((len(runs) for runs in self.runs.values()), default=0)

    def blocks(self, setting: str) -> list[Run]:
        """Only the blocks that every setting has finished; an interrupt may leave others."""
        return self.runs.get(setting, [])[: self.num_blocks]

    def trials(self, setting: str) -> list[Trial]:
        return [trial for run in self.blocks(setting) for trial in run.trials]

    def decode_ratio(self, setting: str, base: str = PLAIN.name) -> Estimate:
        """Tokens per second over the engine's steps without prefill."""
        return _run_ratio(self.blocks(setting), self.blocks(base), "decode_tokens", "decode_seconds")

    def throughput_ratio(self, setting: str, base: str = PLAIN.name) -> Estimate:
        """Tokens per second from the start of the first request to the end of the last, prefill included."""
        return _run_ratio(self.blocks(setting), self.blocks(base), "num_tokens", "seconds")

    def speedup(self, setting: str, base: str = PLAIN.name, category: str | None = None) -> Estimate:
        """Ratio of decode speeds as a client sees them, for one class of requests or for all."""
        return speed_ratio([self.speed_rows(setting, base, category)])

    def pairs(self, setting: str, base: str = PLAIN.name, category: str | None = None) -> list[list[Pair]]:
        """Block by block, the same request under both settings."""
        return [
            [
                (ours, theirs)
                for ours, theirs in zip(mine.trials, other.trials, strict=True)
                if category in (None, ours.category)
            ]
            for mine, other in zip(self.blocks(setting), self.blocks(base), strict=True)
        ]

    def speed_rows(self, setting: str, base: str = PLAIN.name, category: str | None = None) -> list[SpeedRow]:
        """Per block: tokens after the first and the seconds they took, of the setting and of the base.

        The block is the unit, because its requests ran under the same machine conditions. A request that failed on
        either side is left out; failures are counted elsewhere.
        """
        rows = []
        for block in self.pairs(setting, base, category):
            whole = [(ours, theirs) for ours, theirs in block if not ours.error and not theirs.error]
            row = (
                float(sum(ours.num_later for ours, _ in whole)),
                sum(ours.decode_seconds for ours, _ in whole),
                float(sum(theirs.num_later for _, theirs in whole)),
                sum(theirs.decode_seconds for _, theirs in whole),
            )
            if all(row):
                rows.append(row)
        return rows

    def estimated_speedup(self, setting: str) -> float | None:
        """The engine's own estimate over all requests."""
        return estimated_speedup([trial.counts for trial in self.trials(setting)])

    def num_unequal(self, setting: str, base: str = PLAIN.name) -> int:
        """Requests whose answer differs from the base with the same prompt and seed."""
        return sum(not ours.same_answer(theirs) for block in self.pairs(setting, base) for ours, theirs in block)


def speed_ratio(cells: Sequence[Sequence[SpeedRow]]) -> Estimate:
    """Ratio over several cells. Each is scaled to its own baseline, so that a slow cell does not weigh more."""
    scaled = []
    for rows in cells:
        sums = [sum(column) for column in zip(*rows, strict=True)]
        for tokens, seconds, base_tokens, base_seconds in rows:
            scaled.append((tokens / sums[2], seconds / sums[3], base_tokens / sums[2], base_seconds / sums[3]))
    if not scaled:
        return Estimate(float("nan"))
    return ratio_of_rates(*zip(*scaled, strict=True))


def _run_ratio(ours: Sequence[Run], theirs: Sequence[Run], amount: str, seconds: str) -> Estimate:
    columns = [[float(getattr(run, name)) for run in runs] for runs in (ours, theirs) for name in (amount, seconds)]
    return ratio_of_rates(*columns)


def interleaved(
    target: Target, block: Sequence[Job], settings: Sequence[Setting], load: Load, seed: int = 0
) -> Iterator[tuple[Setting, Run]]:
    """Run one block under every setting in shuffled order; yield each run when it is done."""
    order = list(settings)
    random.Random(seed).shuffle(order)
    for setting in order:
        yield setting, target.run(block, setting, load, seed)


def measure(target: Target, jobs: Sequence[Job], settings: Sequence[Setting], load: Load) -> Paired:
    """Run all jobs, block by block; if interrupted, return what was measured so far."""
    paired = Paired(settings, {setting.name: [] for setting in settings})
    target.warm_up(jobs[0], settings)
    try:
        for number, begin in enumerate(range(0, len(jobs), load.block_size)):
            for setting, run in interleaved(target, jobs[begin : begin + load.block_size], settings, load, number):
                paired.runs[setting.name].append(run)
    except KeyboardInterrupt:
        if not paired.num_blocks:
            raise
    return paired

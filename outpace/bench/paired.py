"""The same requests under every setting, block by block in random order, in one process on one engine.

A noisy or throttled machine then hits all settings alike, and a ratio of two of them is worth something. Nothing a
setting's run leaves behind (kept prefixes, the suffix proposer's store) is there when the next one begins: no setting
profits from another's answers to the same prompts. Costs are known before the first measurement.
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

Pair = tuple[Trial, Trial]
SpeedRow = tuple[float, float, float, float]


@dataclass(slots=True)
class Paired:
    """Runs by setting; the i-th of each are the same requests, one block."""

    settings: Sequence[Setting]
    runs: dict[str, list[Run]] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        return min((len(runs) for runs in self.runs.values()), default=0)

    def blocks(self, setting: str) -> list[Run]:
        """Of an interrupted comparison, only the blocks that every setting has finished."""
        return self.runs.get(setting, [])[: self.num_blocks]

    def trials(self, setting: str) -> list[Trial]:
        return [trial for run in self.blocks(setting) for trial in run.trials]

    def decode_ratio(self, setting: str, base: str = PLAIN.name) -> Estimate:
        """Tokens per second over the engine's steps that read no prompt."""
        return _run_ratio(self.blocks(setting), self.blocks(base), "decode_tokens", "decode_seconds")

    def throughput_ratio(self, setting: str, base: str = PLAIN.name) -> Estimate:
        """Tokens per second from the first request's beginning to the last one's end, prompts included."""
        return _run_ratio(self.blocks(setting), self.blocks(base), "num_tokens", "seconds")

    def speedup(self, setting: str, base: str = PLAIN.name, category: str | None = None) -> Estimate:
        """How much faster tokens follow each other, as a client sees it; of one class of requests, or of all."""
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
        """Per block: tokens after the first and the time after the first, ours and theirs.

        The block is the unit, for its requests shared the machine's moods. A request that failed on either side says
        nothing about speed; failures are counted elsewhere.
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
        """What the engine itself says it gained, over all requests; None where it did not draft."""
        counts = [trial.counts for trial in self.trials(setting)]
        plain, spent = sum(each.plain_seconds for each in counts), sum(each.decode_seconds for each in counts)
        return plain / spent if spent > 0 and any(each.num_drafted for each in counts) else None

    def num_unequal(self, setting: str, base: str = PLAIN.name) -> int:
        """Requests whose answer is not the baseline's, though prompt and seed are."""
        return sum(not ours.same_answer(theirs) for block in self.pairs(setting, base) for ours, theirs in block)


def speed_ratio(cells: Sequence[Sequence[SpeedRow]]) -> Estimate:
    """Over several cells every one counts alike, however slow its load made it: each is scaled to its own baseline."""
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
    """One block under every setting, in an order of its own, each as soon as it is done."""
    order = list(settings)
    random.Random(seed).shuffle(order)
    for setting in order:
        yield setting, target.run(block, setting, load, seed)


def measure(target: Target, jobs: Sequence[Job], settings: Sequence[Setting], load: Load) -> Paired:
    """All jobs, block by block; if interrupted, what was measured so far."""
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

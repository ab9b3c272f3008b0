"""Runs a plan: first the blocks that a verdict needs, then those of all cells in turn, so that a run that is cut short
has data for each cell.

Ctrl-C and the time budget end the measuring, not the report: all finished measurements are kept. A run without enough
blocks for a verdict may take longer than its budget, if it was expected to have enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from outpace.bench.forecast import EXTRA_TIME, Forecast, Turn, forecast
from outpace.bench.loads import Closed
from outpace.bench.mix import draw
from outpace.bench.paired import Paired, interleaved
from outpace.bench.plan import CellPlan, Plan
from outpace.bench.settings import PLAIN
from outpace.bench.targets import Target
from outpace.bench.trials import Job, Run
from outpace.bench.verdict import MIN_UNITS
from outpace.bench.workloads import Prompt


@dataclass(slots=True)
class Cell:
    """A cell of the plan and its measurements."""

    plan: CellPlan
    jobs: list[Job]
    paired: Paired


@dataclass(slots=True)
class Session:
    target: Target
    plan: Plan
    sources: Mapping[str, Sequence[Prompt]]
    on_run: Callable[[CellPlan, Run], None] = lambda cell, run: None
    on_note: Callable[[str], None] = lambda note: None  # gets what the user should know before the measuring
    cells: list[Cell] = field(default_factory=list)
    was_interrupted: bool = False
    ran_out_of_time: bool = False
    _end: float = 0.0
    _extra: float = 0.0

    def measure(self) -> None:
        """Measure all cells of the plan."""
        self._end = perf_counter() + self.plan.time_budget
        self.cells = [self._cell(each) for each in self.plan.cells]
        try:
            every = {setting.name: setting for cell in self.plan.cells for setting in cell.settings}
            self.target.warm_up(self.cells[0].jobs[0], list(every.values()))
            expected = self._forecast()
            self._extra = EXTRA_TIME * self.plan.time_budget if expected.is_feasible else 0.0
            self._run(self.cells, expected.first)
        except KeyboardInterrupt:
            self.was_interrupted = True
            if not any(cell.paired.num_blocks for cell in self.cells):
                raise
        self.cells = [cell for cell in self.cells if cell.paired.num_blocks]

    def confirm(self, suspects: Iterable[CellPlan], seconds: float) -> None:
        """Measure more cells, for at most `seconds`; the last block may run over."""
        if self.was_interrupted:
            return
        cells = [self._cell(each) for each in suspects]
        self._end, self._extra = perf_counter() + seconds, 0.0
        try:
            self._run(cells)
        except KeyboardInterrupt:
            self.was_interrupted = True
        self.cells += [cell for cell in cells if cell.paired.num_blocks]

    def _forecast(self) -> Forecast:
        """Time one plain request, and see how many blocks fit."""
        begin = perf_counter()
        self.target.run(self.cells[0].jobs[:1], PLAIN, Closed(1))
        end = perf_counter()
        expected = forecast(self.plan, end - begin, self._end - end)
        if expected.note is not None:
            self.on_note(expected.note)
        return expected

    def _run(self, cells: Sequence[Cell], first: Sequence[Turn] = ()) -> None:
        turns = [(i, block) for i, cell in enumerate(cells) for block in range(cell.plan.num_blocks)]
        turns.sort(key=lambda turn: (turn not in first, turn[1] / cells[turn[0]].plan.num_blocks, turn[0]))
        for i, block in turns:
            if self._is_time_up(cells):
                self.ran_out_of_time = True
                return
            self._run_block(cells[i], block)

    def _is_time_up(self, cells: Sequence[Cell]) -> bool:
        late = perf_counter() - self._end
        return late >= self._extra or (late >= 0 and _num_units(cells) >= MIN_UNITS)

    def _run_block(self, cell: Cell, block: int) -> None:
        size = cell.plan.load.block_size
        jobs = cell.jobs[block * size : (block + 1) * size]
        for setting, run in interleaved(self.target, jobs, cell.plan.settings, cell.plan.load, self.plan.seed + block):
            cell.paired.runs[setting.name].append(run)
            self.on_run(cell.plan, run)

    def _cell(self, plan: CellPlan) -> Cell:
        weights = self.plan.weights
        sources = self.sources
        if plan.only_class is not None:
            sources = {
                name: [prompt for prompt in prompts if prompt.category == plan.only_class]
                for name, prompts in sources.items()
            }
            sources = {name: prompts for name, prompts in sources.items() if prompts}
        prompts = draw(sources, {name: weights[name] for name in sources}, plan.num_requests, self.plan.seed)
        jobs = self.target.jobs(prompts, temperature=plan.temperature, base_seed=self.plan.seed)
        paired = Paired(plan.settings, {setting.name: [] for setting in plan.settings})
        return Cell(plan, jobs, paired)


def _num_units(cells: Sequence[Cell]) -> int:
    """Paired blocks that count for the verdict; one whose answers have a single token has no speed."""
    found = 0
    for cell in cells:
        if cell.plan.purpose == "grid":
            names = [setting.name for setting in cell.plan.settings if setting.name != PLAIN.name]
            found += min((len(cell.paired.speed_rows(name)) for name in names), default=0)
    return found

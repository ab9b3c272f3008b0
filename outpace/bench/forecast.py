"""Says before measuring whether the time budget is enough for a verdict, and which blocks to run first for it.

A verdict needs MIN_UNITS paired blocks of the grid. A block's time is estimated from one plain request, as if a batch
cost no more than one request. A run that is expected to have a verdict may take EXTRA_TIME longer to get it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outpace.bench.loads import Closed
from outpace.bench.plan import CellPlan, Plan
from outpace.bench.verdict import MIN_UNITS

EXTRA_TIME = 0.5  # of the time budget
_MARGIN = 1.5  # of a suggested time budget over the estimate, which is for batches without any cost

Turn = tuple[int, int]  # the index of a cell and of a block in it


@dataclass(frozen=True, slots=True)
class Forecast:
    first: tuple[Turn, ...]  # the blocks that the verdict needs
    note: str | None = None  # for the user, before the measuring begins
    is_feasible: bool = True


def forecast(plan: Plan, seconds_per_request: float, seconds_left: float) -> Forecast:
    grid = [(i, cell) for i, cell in enumerate(plan.cells) if cell.purpose == "grid" and len(cell.settings) > 1]
    if not grid:
        note = "only plain decoding is measured, so there will be no verdict; add a setting such as auto to --settings"
        return Forecast((), note, is_feasible=False)
    turns = [(i, block) for i, cell in grid for block in range(cell.num_blocks)]

    def seconds(chosen: Sequence[Turn]) -> float:
        return sum(seconds_of_block(plan.cells[i], seconds_per_request) for i, _ in chosen)

    evenly = tuple(sorted(turns, key=lambda turn: (turn[1], turn[0]))[:MIN_UNITS])
    if len(evenly) < MIN_UNITS:
        note = (
            f"there will be no verdict: {len(evenly)} paired blocks of requests are planned and it needs {MIN_UNITS}; "
            f"--requests {_requests_needed([cell for _, cell in grid])} or more gives one"
        )
        return Forecast(evenly, note, is_feasible=False)
    if seconds(evenly) <= seconds_left:
        return Forecast(evenly)
    cheapest = tuple(sorted(turns, key=lambda turn: (seconds([turn]), turn[1], turn[0]))[:MIN_UNITS])
    if seconds(cheapest) <= seconds_left + EXTRA_TIME * plan.time_budget:
        names = "; ".join(dict.fromkeys(plan.cells[i].name for i, _ in cheapest))
        note = f"the time budget of {plan.time_budget:g} s is short, so these cells come first: {names}"
        return Forecast(cheapest, note)
    needed = math.ceil(_MARGIN * seconds(cheapest))
    note = (
        f"there will be no verdict: it needs {MIN_UNITS} paired blocks of requests, which take about "
        f"{seconds(cheapest):.0f} s here, and {max(0.0, seconds_left):.0f} s of the time budget are left; "
        f"--time-budget {needed} or a smaller --max-tokens gives one"
    )
    return Forecast(cheapest, note, is_feasible=False)


def seconds_of_block(cell: CellPlan, seconds_per_request: float) -> float:
    """An estimate for all settings of the cell."""
    load = cell.load
    if isinstance(load, Closed):
        once = seconds_per_request * math.ceil(load.block_size / load.concurrency)
    else:
        once = max(seconds_per_request, load.block_size / load.rate)
    return once * len(cell.settings)


def _requests_needed(cells: Sequence[CellPlan]) -> int:
    """The value of --requests, which counts per cell, with which there are enough blocks."""
    blocks = math.ceil(MIN_UNITS / len(cells))
    return max(blocks * cell.load.block_size for cell in cells)

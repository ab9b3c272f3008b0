"""The plan of a run: cells, each with a temperature, a load and the settings to compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outpace.bench.loads import Closed, Load
from outpace.bench.settings import Setting

Purpose = Literal["grid", "sweep", "confirm"]


@dataclass(frozen=True, slots=True)
class CellPlan:
    """`grid` cells cover every temperature and load; a `sweep` cell compares more settings at one of them; a `confirm`
    cell runs a single class, to check whether it causes a slow tail."""

    temperature: float
    load: Load
    settings: tuple[Setting, ...]
    num_blocks: int
    purpose: Purpose = "grid"
    only_class: str | None = None

    @property
    def name(self) -> str:
        suffix = {"grid": "", "sweep": ", sweep", "confirm": f", {self.only_class} alone"}[self.purpose]
        return f"temperature {self.temperature:g}, {self.load.name}{suffix}"

    @property
    def num_requests(self) -> int:
        """Per setting."""
        return self.num_blocks * self.load.block_size

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "purpose": self.purpose,
            "temperature": self.temperature,
            "load": self.load.as_dict() | {"name": self.load.name},
            "only_class": self.only_class,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """Cells, the mix of prompts in each, and the time budget for all of them in seconds."""

    cells: tuple[CellPlan, ...]
    weights: dict[str, float]
    time_budget: float
    seed: int = 0
    confirm_blocks: int = 4


def grid(
    temperatures: Sequence[float],
    loads: Sequence[Load],
    settings: Sequence[Setting],
    num_blocks: Callable[[Load], int],
) -> list[CellPlan]:
    """Every temperature with every load."""
    return [
        CellPlan(temperature, load, tuple(settings), num_blocks(load), "grid")
        for temperature in temperatures
        for load in loads
    ]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much a run measures by default."""

    temperatures: tuple[float, ...]
    concurrencies: tuple[int, ...]
    requests_alone: int  # per cell, at concurrency 1
    blocks_together: int  # per cell, at higher concurrency
    sweep_requests: int  # per fixed setting
    confirm_blocks: int
    max_tokens: int | None
    time_budget: float  # seconds, not counting loading and `confirm` cells

    def num_blocks(self, load: Load) -> int:
        return self.requests_alone if load == Closed(1) else self.blocks_together


QUICK = Scale((0.0, 1.0), (1, 4), 12, 3, 6, 2, 64, 40.0)
FULL = Scale((0.0, 0.7, 1.0), (1, 4, 16), 36, 5, 12, 4, None, 460.0)

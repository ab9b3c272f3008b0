"""Results of invented runs with known speedups and acceptance, by setting and class."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from outpace.bench.figures import Objective, cell_figures, pooled_speedups
from outpace.bench.loads import Closed
from outpace.bench.paired import Paired
from outpace.bench.plan import CellPlan
from outpace.bench.settings import parse_setting
from outpace.bench.trials import Run, Trial
from outpace.bench.verdict import verdict
from outpace.core import SpeculationCounts

PLAIN_SECONDS = 0.02  # per token
Speeds = Mapping[str, Mapping[str, float]]  # setting -> class -> speedup over plain decoding


def counts(drafted: int, rate: float, depth: int = 4) -> SpeculationCounts:
    accepted = round(drafted * rate)
    per_position = [accepted * share // 10 for share in (4, 3, 2, 1)][:depth]
    return SpeculationCounts(
        num_generated=50,
        steps=30,
        num_drafted=drafted,
        num_accepted=accepted,
        drafted_per_position=[drafted // depth] * depth,
        accepted_per_position=per_position,
        plain_seconds=1.0,
        decode_seconds=1.0,
    )


def made_paired(
    speeds: Speeds,
    classes: Sequence[str],
    *,
    num_blocks: int = 12,
    block_size: int = 1,
    noise: float = 0.02,
    acceptance: Mapping[str, float] | None = None,
    draft_share: float = 0.1,
    seed: int = 0,
) -> Paired:
    rng = random.Random(seed)
    settings = [parse_setting(name) for name in speeds]
    paired = Paired(settings, {name: [] for name in speeds})
    for block in range(num_blocks):
        slowdown = rng.lognormvariate(0, 0.3)  # of the machine, the same for all settings
        for name, by_class in speeds.items():
            run = Run()
            for i in range(block_size):
                category = classes[(block * block_size + i) % len(classes)]
                later = 49 * PLAIN_SECONDS / by_class[category] * slowdown * rng.lognormvariate(0, noise)
                rate = (acceptance or {}).get(name, 0.6)
                spec = counts(80, rate) if name != "off" else SpeculationCounts(steps=49)
                trial = Trial(i, category, 30, 50, "text", "length", 0.1, 0.1 + later, token_ids=[1, 2], counts=spec)
                run.trials.append(trial)
            run.seconds = sum(trial.end_to_end for trial in run.trials)
            run.decode_seconds = sum(trial.decode_seconds for trial in run.trials)
            run.decode_tokens = 49 * block_size
            run.draft_seconds = draft_share * run.decode_seconds if name != "off" else 0.0
            paired.runs[name].append(run)
    return paired


def made_results(cells: Sequence[tuple[CellPlan, Paired]], **target: Any) -> dict[str, Any]:
    grid = [paired for plan, paired in cells if plan.purpose == "grid"]
    names = dict.fromkeys(setting.name for paired in grid for setting in paired.settings)
    results: dict[str, Any] = {
        "format": "outpace-bench-1",
        "provenance": {"cpu": "a CPU", "cores": 2, "outpace": "0", "models": {"m.gguf": "00"}, "seed": 0},
        "target": {
            "target": "in process",
            "model": "made up",
            "config": {"model": "m.gguf", "draft": None},
        }
        | target,
        "plan": {
            "mix": {},
            "time_budget": 1.0,
            "objective": Objective().as_dict(),
            "was_interrupted": False,
            "ran_out_of_time": False,
        },
        "memory": {"peak_bytes": 1_000_000},
        "cells": [plan.as_dict() | cell_figures(paired, Objective()) for plan, paired in cells],
        "overall": {name: pooled_speedups(grid, name) for name in names} if "off" in names else {},
    }
    results["verdict"] = verdict(results)
    return results


def cell(speeds: Speeds, classes: Sequence[str], *, temperature: float = 0.0, concurrency: int = 1,
         purpose: Any = "grid", only_class: str | None = None, **options: Any) -> tuple[CellPlan, Paired]:  # fmt: skip
    load = Closed(concurrency)
    plan = CellPlan(
        temperature, load, tuple(parse_setting(name) for name in speeds), options.get("num_blocks", 12), purpose,
        only_class,
    )  # fmt: skip
    return plan, made_paired(speeds, classes, block_size=load.block_size, **options)


def flat(classes: Sequence[str], **speeds: float) -> Speeds:
    """The same speedup for every class; `off` is plain decoding."""
    return {name.replace("_", ":"): dict.fromkeys(classes, value) for name, value in {"off": 1.0, **speeds}.items()}

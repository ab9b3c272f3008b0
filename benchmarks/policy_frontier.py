"""What would stricter or laxer rules about what a request may lose change? Every scenario of the simulator, under each.

    python -m benchmarks.policy_frontier [--factors 0.25 0.5 1 2] [--only TEXT] [--jobs N] [--json FILE]

The policy promises two things that pull apart: that no request is much slower than with plain decoding (P99), and that
little of what an oracle gains is missed. Whatever is tried to find out what a draft is worth, somebody pays for, and a
request of 48 tokens is over its 5% after 2.4 plain steps. Here every bound on what a request may lose or has to bear is
multiplied by a factor, 1 being the policy as it is. Of each factor the table shows in how many scenarios each promise
is missed, and what is gained on the whole. The oracle is bound by the same rules, so it is run again as well.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.report import provenance, write_json
from outpace.bench.simulate import PLAIN, compared, missed, policy_named, summarise
from outpace.bench.simulation.records import ORACLE, OURS
from outpace.bench.simulation.runner import Simulation
from outpace.bench.simulation.scenarios import all_scenarios
from outpace.bench.simulation.world import Result

# What one request may lose: to the gain of others, while it waits for texts to be read, and by guesses of its own.
BOUNDS = (
    ("fairness", "_REQUEST_LOSS"),
    ("fairness", "_REQUEST_STEPS"),
    ("fairness", "_BEAR_STEPS"),
    ("fairness", "_MOST_OF_GAIN"),
    ("reading", "_READING_SHARE"),
    ("reading", "_READING_STEPS"),
    ("reading", "_STAKE_STEPS"),
    ("weighing", "_GUESS_STAKE"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--factors", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0], help="(default: 0.25 0.5 1 2)"
    )
    parser.add_argument("--only", metavar="TEXT", help="only scenarios whose name contains TEXT")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()

    chosen = [i for i, each in enumerate(all_scenarios()) if options.only is None or options.only in each.name]
    if not chosen:
        sys.exit(f"no scenario's name contains {options.only!r}; `outpace bench simulate --json FILE` lists them")
    plain = run([(PLAIN, i) for i in chosen], 1.0, options.jobs)
    rows: list[dict[str, Any]] = []
    print(f"{len(chosen)} scenarios, ratios to plain decoding\n")
    print(f"{'factor':>7} {'geometric mean':>15} {'oracle':>8} {'lowest':>8} {'highest P99':>12} {'missed: P99':>12} "
          f"{'oracle':>8} {'either':>8}")  # fmt: skip
    for factor in options.factors:
        found = plain | run([(name, i) for i in chosen for name in (OURS, ORACLE)], factor, options.jobs)
        rows.append(figures(factor, chosen, found))
        print(line(rows[-1]), flush=True)
    if options.json:
        bounds = [f"{module}.{name}" for module, name in BOUNDS]
        write_json(options.json, {"provenance": provenance([]), "bounds": bounds, "factors": rows})
    return 0


def run(wanted: Sequence[tuple[str, int]], factor: float, jobs: int) -> dict[tuple[str, int], Result]:
    with (
        multiprocessing.Pool(jobs, _begin, (factor,)) as pool,
        tqdm(total=len(wanted), desc=f"factor {factor:g}", unit="simulation", disable=not sys.stderr.isatty()) as bar,
    ):
        found: dict[tuple[str, int], Result] = {}
        for name, i, result in pool.imap_unordered(_simulate, wanted):
            found[name, i] = result
            bar.update()
        return found


def _begin(factor: float) -> None:
    """A process in which every bound is another."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module_name, name in BOUNDS:
        module = importlib.import_module(f"outpace.speculation.{module_name}")
        setattr(module, name, factor * getattr(module, name))


def _simulate(wanted: tuple[str, int]) -> tuple[str, int, Result]:
    name, i = wanted
    return name, i, Simulation(all_scenarios()[i], policy_named(name)).run()


def figures(factor: float, chosen: Sequence[int], found: dict[tuple[str, int], Result]) -> dict[str, Any]:
    scenarios = all_scenarios()
    rows = [compared(scenarios[i], {name: found[name, i] for name in (PLAIN, OURS, ORACLE)}) for i in chosen]
    report = summarise(rows)
    broken = [missed(row) for row in rows]
    return {
        "factor": factor,
        "geometric_mean": report["geometric_mean"],
        "worst": report["worst"],
        "num_scenarios": len(rows),
        "num_missed": {kind: sum(kind in each for each in broken) for kind in ("plain", "p99", "oracle")},
        "num_either": sum(map(bool, broken)),
        "missed": {row["name"]: sorted(each) for row, each in zip(rows, broken, strict=True) if each},
    }


def line(row: dict[str, Any]) -> str:
    mean, worst, num_missed = row["geometric_mean"], row["worst"], row["num_missed"]
    return (
        f"{row['factor']:7g} {mean[OURS]:15.3f} {mean[ORACLE]:8.3f} {worst['ratio_to_plain']:8.3f} "
        f"{worst['p99_tpot_ratio']:12.3f} {num_missed['p99']:12} {num_missed['oracle']:8} {row['num_either']:8}"
    )


if __name__ == "__main__":
    sys.exit(main())

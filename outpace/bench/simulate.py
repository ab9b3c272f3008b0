"""`outpace bench simulate`: policies side by side in a world where costs and acceptance are known.

For every scenario each policy meets the same requests. Reported: tokens per second and the P99 of time per output
token, both as ratios to plain decoding, and tokens per second as a ratio to the oracle, which is our policy with true
rates and costs instead of learned ones. Where ours is below what is promised, the scenario is listed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from time import perf_counter
from typing import Any

from outpace.bench.simulation.rivals import Fixed, Rival, all_rivals
from outpace.bench.simulation.runner import Simulation
from outpace.bench.simulation.scenarios import all_scenarios, quick_scenarios
from outpace.bench.simulation.world import Result, Scenario

OURS, ORACLE, PLAIN = "ours", "oracle", "plain"
LEAST_OF_PLAIN = 0.98
MOST_P99 = 1.05
LEAST_OF_ORACLE = 0.95
LEAST_OF_ORACLE_DRIFTING = 0.90

_DESCRIPTION = """\
Compare speculation policies in a simulated world: machines from measured cost curves, drafts of known quality, closed
and open loads up to 256 running requests. No model is loaded.

examples:
  outpace bench simulate --quick
  outpace bench simulate --json simulation.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument("--quick", action="store_true", help="a small sample of scenarios, in under 30 seconds")
    parser.add_argument("--json", metavar="FILE", help="write every figure to FILE")
    parser.add_argument("--only", metavar="TEXT", help="only scenarios whose name contains TEXT")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N",
                        help="scenarios simulated at once (default: %(default)s)")  # fmt: skip


def execute(options: argparse.Namespace) -> int:
    scenarios = quick_scenarios() if options.quick else all_scenarios()
    if options.only:
        scenarios = [scenario for scenario in scenarios if options.only in scenario.name]
    done: list[dict[str, Any]] = []
    begin = perf_counter()
    try:
        for row in _progress(_run_all([scenario.name for scenario in scenarios], options), len(scenarios)):
            done.append(row)
    except KeyboardInterrupt:
        print(f"interrupted: {len(done)} of {len(scenarios)} scenarios are reported", file=sys.stderr)
    report = summarise(done)
    report["seconds"] = perf_counter() - begin
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    print(as_text(report))
    return 0 if done else 1


def simulate(scenario: Scenario) -> dict[str, Any]:
    """One scenario under every policy."""
    policies_here: list[str | Rival] = [Fixed(0), OURS, ORACLE, *all_rivals()]
    results = [Simulation(scenario, policy).run() for policy in policies_here]
    by_name = {result.policy: result for result in results}
    plain, oracle = by_name[PLAIN], by_name[ORACLE]
    policies = {name: _ratios(result, plain, oracle) for name, result in by_name.items() if name != PLAIN}
    ours = by_name[OURS]
    policies[OURS]["estimated_speedup"] = ours.estimated_speedup
    policies[OURS]["policy_ms_per_step"] = 1e3 * statistics.median(ours.policy_seconds)
    return {
        "name": scenario.name,
        "concurrency": scenario.load.concurrency,
        "drifts": scenario.drifts,
        "adversarial": scenario.adversarial,
        "open_loop": scenario.load.intensity is not None,
        "policies": policies,
    }


def _ratios(result: Result, plain: Result, oracle: Result) -> dict[str, Any]:
    return {
        "ratio_to_plain": result.tokens_per_second / plain.tokens_per_second,
        "p99_tpot_ratio": result.p99_tpot / plain.p99_tpot,
        "ratio_to_oracle": result.tokens_per_second / oracle.tokens_per_second,
    }


def _run_all(names: list[str], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    named = partial(_simulate_named, options.quick)
    if options.jobs <= 1:
        yield from map(named, names)
        return
    with ProcessPoolExecutor(options.jobs) as pool:
        try:
            yield from pool.map(named, names)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _simulate_named(quick: bool, name: str) -> dict[str, Any]:
    """Scenarios hold functions, which do not travel between processes; their names do."""
    scenarios = quick_scenarios() if quick else all_scenarios()
    return simulate(next(scenario for scenario in scenarios if scenario.name == name))


def _progress(rows: Iterable[dict[str, Any]], total: int) -> Iterable[dict[str, Any]]:
    from tqdm import tqdm

    bar: Iterable[dict[str, Any]] = tqdm(
        rows, total=total, unit="scenario", dynamic_ncols=True, disable=not sys.stderr.isatty()
    )
    return bar


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    policies = list(rows[0]["policies"]) if rows else []
    return {
        "scenarios": rows,
        "worst": _worst(rows),
        "geometric_mean": {
            name: _geometric_mean(r["policies"][name]["ratio_to_plain"] for r in rows) for name in policies
        },
        "lowest": {name: min(r["policies"][name]["ratio_to_plain"] for r in rows) for name in policies},
        "below_promise": [row["name"] + ": " + "; ".join(broken) for row in rows if (broken := _broken(row))],
    }


def _worst(rows: list[dict[str, Any]]) -> dict[str, Any]:
    if not rows:
        return {}
    closed = [row for row in rows if not row["open_loop"] and not row["adversarial"]] or rows
    return {
        "ratio_to_plain": min(row["policies"][OURS]["ratio_to_plain"] for row in rows),
        "p99_tpot_ratio": max(row["policies"][OURS]["p99_tpot_ratio"] for row in rows),
        "ratio_to_oracle_stationary": min(
            (row["policies"][OURS]["ratio_to_oracle"] for row in closed if not row["drifts"]), default=None
        ),
        "ratio_to_oracle_drifting": min(
            (row["policies"][OURS]["ratio_to_oracle"] for row in closed if row["drifts"]), default=None
        ),
        "policy_ms_per_step": max(row["policies"][OURS]["policy_ms_per_step"] for row in rows),
    }


def _broken(row: dict[str, Any]) -> list[str]:
    """What was promised of ours and does not hold in this scenario."""
    ours, broken = row["policies"][OURS], []
    if ours["ratio_to_plain"] < LEAST_OF_PLAIN:
        broken.append(f"{ours['ratio_to_plain']:.3f} of plain")
    if ours["p99_tpot_ratio"] > MOST_P99:
        broken.append(f"P99 {ours['p99_tpot_ratio']:.3f} of plain")
    least = LEAST_OF_ORACLE_DRIFTING if row["drifts"] else LEAST_OF_ORACLE
    if not row["adversarial"] and ours["ratio_to_oracle"] < least:
        broken.append(f"{ours['ratio_to_oracle']:.3f} of the oracle")
    return broken


def _geometric_mean(ratios: Iterable[float]) -> float:
    values = list(ratios)
    return math.exp(sum(map(math.log, values)) / len(values))


def as_text(report: dict[str, Any]) -> str:
    rows = report["scenarios"]
    lines = [f"{len(rows)} scenarios, ratios to plain decoding", ""]
    lines.append(f"{'policy':20} {'geometric mean':>14} {'lowest':>8} {'highest P99':>12}")
    for name in sorted(report["geometric_mean"], key=lambda name: -report["geometric_mean"][name]):
        p99 = max(row["policies"][name]["p99_tpot_ratio"] for row in rows)
        lines.append(f"{name:20} {report['geometric_mean'][name]:14.3f} {report['lowest'][name]:8.3f} {p99:12.3f}")
    lines.append("")
    below = report["below_promise"]
    lines.append(f"ours below what is promised: {len(below)} of {len(rows)} scenarios")
    lines += [f"  {line}" for line in below]
    return "\n".join(lines)

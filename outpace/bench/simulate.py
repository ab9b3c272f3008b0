"""`outpace bench simulate`: policies side by side in a world where costs and acceptance are known.

For every scenario each policy meets the same requests. Reported: tokens per second and the P99 of time per output
token, both as ratios to plain decoding, and tokens per second as a ratio to the oracle, which is our policy with true
rates and costs instead of learned ones. Where ours is below what is promised, the scenario is listed; whether that is
only because a run is short, `--again` with `--longer` tells.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from tqdm import tqdm

from outpace.bench.simulation.records import ORACLE, OURS, Record, RecordFile, code_of
from outpace.bench.simulation.rivals import Fixed, Rival, all_rivals
from outpace.bench.simulation.runner import Simulation
from outpace.bench.simulation.scenarios import all_scenarios, quick_scenarios
from outpace.bench.simulation.world import Result, Scenario
from outpace.errors import UsageError

PLAIN = "plain"
LEAST_OF_PLAIN = 0.98
MOST_P99 = 1.05
LEAST_OF_ORACLE = 0.95
LEAST_OF_ORACLE_DRIFTING = 0.90

_DESCRIPTION = """\
Compare speculation policies in a simulated world: machines from measured cost curves, drafts of known quality, closed
and open loads up to 256 running requests. No model is loaded.

examples:
  outpace bench simulate --quick
  outpace bench simulate --json simulation.json --resume simulation.jsonl
  outpace bench simulate --again simulation.json --longer 8   # is it only because a run is short?
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument("--quick", action="store_true", help="a small sample of scenarios, in under 30 seconds")
    parser.add_argument("--json", metavar="FILE", help="write every figure to FILE")
    parser.add_argument(
        "--resume", metavar="FILE", help="keep every simulation in FILE as it ends; those on file are not run again"
    )
    parser.add_argument("--only", metavar="TEXT", help="only scenarios whose name contains TEXT")
    parser.add_argument(
        "--again",
        metavar="FILE",
        help="only scenarios that FILE, an earlier --json, lists as below what is promised; without the rivals",
    )
    parser.add_argument(
        "--longer", type=int, default=1, metavar="N", help="N times as many requests in every scenario (default: 1)"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N",
                        help="simulations at once (default: %(default)s)")  # fmt: skip


def execute(options: argparse.Namespace) -> int:
    if options.longer < 1:
        raise UsageError(f"--longer {options.longer}: give how many times as many requests, 1 or more.")
    records = RecordFile(Path(options.resume) if options.resume else None)
    scenarios = [each for each in _scenarios(options.quick) if options.only is None or options.only in each.name]
    if options.again is not None:
        names = _missed_before(Path(options.again))
        scenarios = [each for each in scenarios if each.name in names]
    scenarios = [_longer(each, options.longer) for each in scenarios]
    begin = perf_counter()
    try:
        _run_all(scenarios, records, options)
    except KeyboardInterrupt:
        again = f"; `--resume {options.resume}` goes on from here" if options.resume else ""
        print(f"interrupted: only what has ended is reported{again}", file=sys.stderr)
    report = summarise([row for each in scenarios if (row := _row(each, options.quick, records)) is not None])
    report["seconds"] = perf_counter() - begin
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    print(as_text(report))
    return 0 if report["scenarios"] else 1


def _missed_before(path: Path) -> set[str]:
    """The scenarios that a report lists as below what is promised."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        return {row["name"] for row in report["scenarios"] if missed(row)}
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a report of `outpace bench simulate --json`.") from error


def _longer(scenario: Scenario, times: int) -> Scenario:
    """The same with so many times as many requests, under a name of its own: records are kept by name."""
    if times == 1:
        return scenario
    load = replace(scenario.load, num_requests=times * scenario.load.num_requests)
    return replace(scenario, name=f"{scenario.name}, {times} times as long", load=load)


def simulate(scenario: Scenario) -> dict[str, Any]:
    """One scenario under every policy."""
    return compared(scenario, {name: Simulation(scenario, policy_named(name)).run() for name in policy_names()})


_NEEDED = [PLAIN, OURS, ORACLE]


def policy_names() -> list[str]:
    return [PLAIN, OURS, ORACLE, *(rival.name for rival in all_rivals())]


def policy_named(name: str) -> str | Rival:
    """A rival remembers what it has seen: every simulation has its own."""
    return next((rival for rival in (Fixed(0), *all_rivals()) if rival.name == name), name)


def _row(scenario: Scenario, quick: bool, records: RecordFile) -> dict[str, Any] | None:
    """What a scenario came to; None where it has not ended plainly, with our policy and with the oracle."""
    results = {name: records.get(scenario.name, quick, name) for name in policy_names()}
    ended = {name: result for name, result in results.items() if result is not None}
    return compared(scenario, ended) if all(name in ended for name in _NEEDED) else None


def compared(scenario: Scenario, results: dict[str, Result]) -> dict[str, Any]:
    plain, oracle, ours = results[PLAIN], results[ORACLE], results[OURS]
    policies = {name: _ratios(result, plain, oracle) for name, result in results.items() if name != PLAIN}
    policies[OURS]["estimated_speedup"] = ours.estimated_speedup
    policies[OURS]["policy_ms_per_step"] = ours.policy_ms
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


def _run_all(scenarios: list[Scenario], records: RecordFile, options: argparse.Namespace) -> None:
    """Every policy in every scenario, as far as that is not on file."""
    rivals = [name for name in policy_names() if name not in _NEEDED] if options.again is None else []
    wanted = [
        (options.quick, options.longer, scenario.name, name)
        for group in (_NEEDED, rivals)  # first what is promised
        for scenario in scenarios
        for name in group
        if records.get(scenario.name, options.quick, name) is None
    ]
    jobs = min(options.jobs, len(wanted))
    with (
        tqdm(total=len(wanted), unit="simulation", dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar,
        ExitStack() as stack,
    ):
        if jobs > 1:
            pool = stack.enter_context(multiprocessing.Pool(jobs, signal.signal, (signal.SIGINT, signal.SIG_IGN)))
            ended: Iterable[Record] = pool.imap_unordered(_simulate_named, wanted)
        else:
            ended = map(_simulate_named, wanted)
        for record in ended:
            records.add(record)
            bar.update()


def _simulate_named(wanted: tuple[bool, int, str, str]) -> Record:
    """Scenarios hold functions, which do not travel between processes; their names do."""
    quick, times, scenario, policy = wanted
    world = next(each for each in (_longer(each, times) for each in _scenarios(quick)) if each.name == scenario)
    return Record(scenario, quick, code_of(policy), Simulation(world, policy_named(policy)).run())


def _scenarios(quick: bool) -> list[Scenario]:
    return quick_scenarios() if quick else all_scenarios()


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Policies are compared where all have ended; what is promised of ours is looked at in every scenario."""
    names = [name for name in policy_names() if any(name in row["policies"] for row in rows)]
    whole = [row for row in rows if all(name in row["policies"] for name in names)]
    ratios = {name: [row["policies"][name]["ratio_to_plain"] for row in whole] for name in names}
    return {
        "scenarios": rows,
        "worst": _worst(rows),
        "num_compared": len(whole),
        "geometric_mean": {name: _geometric_mean(values) for name, values in ratios.items() if values},
        "lowest": {name: min(values) for name, values in ratios.items() if values},
        "below_promise": [row["name"] + ": " + "; ".join(broken.values()) for row in rows if (broken := missed(row))],
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


def missed(row: dict[str, Any]) -> dict[str, str]:
    """What was promised of ours and does not hold in this scenario: which promise, and a sentence."""
    ours, found = row["policies"][OURS], dict[str, str]()
    if ours["ratio_to_plain"] < LEAST_OF_PLAIN:
        found["plain"] = f"{ours['ratio_to_plain']:.3f} of plain"
    if ours["p99_tpot_ratio"] > MOST_P99:
        oracle = row["policies"][ORACLE]["p99_tpot_ratio"]
        found["p99"] = f"P99 {ours['p99_tpot_ratio']:.3f} of plain, the oracle's {oracle:.3f}"
    least = LEAST_OF_ORACLE_DRIFTING if row["drifts"] else LEAST_OF_ORACLE
    if not row["adversarial"] and ours["ratio_to_oracle"] < least:
        found["oracle"] = f"{ours['ratio_to_oracle']:.3f} of the oracle"
    return found


def _geometric_mean(ratios: Iterable[float]) -> float:
    values = list(ratios)
    return math.exp(sum(map(math.log, values)) / len(values))


def as_text(report: dict[str, Any]) -> str:
    rows = report["scenarios"]
    whole = [row for row in rows if all(name in row["policies"] for name in report["geometric_mean"])]
    compared = "" if len(whole) == len(rows) else f"; policies are compared in {len(whole)} of them"
    lines = [f"{len(rows)} scenarios, ratios to plain decoding{compared}", ""]
    lines.append(f"{'policy':20} {'geometric mean':>14} {'lowest':>8} {'highest P99':>12}")
    for name in sorted(report["geometric_mean"], key=lambda name: -report["geometric_mean"][name]):
        p99 = max(row["policies"][name]["p99_tpot_ratio"] for row in whole)
        lines.append(f"{name:20} {report['geometric_mean'][name]:14.3f} {report['lowest'][name]:8.3f} {p99:12.3f}")
    lines.append("")
    below = report["below_promise"]
    lines.append(f"ours below what is promised: {len(below)} of {len(rows)} scenarios")
    lines += [f"  {line}" for line in below]
    return "\n".join(lines)

"""`outpace bench simulate`: compares policies in a simulated world with known costs and acceptance.

For every scenario and seed, each policy gets the same requests. The report has tokens per second and the P99 of time
per output token, both as ratios to plain decoding, and tokens per second as a ratio to the oracle, which knows all
rates and has none of our limits. Seeds come from the commit hash, so that a policy cannot be tuned on them;
`--seeds-from` takes another text, to compare two commits on the same seeds. Scenarios where ours misses a promise are
listed.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from tqdm import tqdm

import outpace
from outpace.bench.provenance import commit_name
from outpace.bench.simulation.records import Record, RecordFile, code_of
from outpace.bench.simulation.rivals import Fixed, Rival, all_rivals
from outpace.bench.simulation.runner import BUDGET, ORACLE, OURS, Simulation
from outpace.bench.simulation.scenarios import all_scenarios, quick_scenarios, seeded
from outpace.bench.simulation.world import Result, Scenario
from outpace.errors import UsageError

PLAIN = "plain"
MIN_RATIO_TO_PLAIN = 0.98  # promised for every run
LONG = 256  # output tokens; a request with at least this many is long
MAX_P99_RATIO = {"long": 1.05, "short": 1.15}  # promised for every scenario

_DESCRIPTION = """\
Compare speculation policies in a simulated world: machines from measured cost curves, drafts of known quality, closed
and open loads up to 256 running requests. No model is loaded.

examples:
  outpace bench simulate --quick
  outpace bench simulate --json simulation.json --resume simulation.jsonl
  outpace bench simulate --policies ours oracle --only h200   # some policies and scenarios
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument("--quick", action="store_true", help="a small sample of scenarios, in under a minute")
    parser.add_argument("--json", metavar="FILE", help="write every figure to FILE")
    parser.add_argument(
        "--resume", metavar="FILE", help="save each finished simulation to FILE; skip those that are in it"
    )
    parser.add_argument("--only", metavar="TEXT", help="only scenarios whose name contains TEXT")
    parser.add_argument("--max-concurrency", type=int, metavar="N",
                        help="only scenarios with at most N running requests: 128 and 256 take longest")  # fmt: skip
    parser.add_argument("--policies", nargs="+", metavar="NAME", choices=policy_names(), default=policy_names(),
                        help=f"policies beside plain decoding: {', '.join(policy_names())} (default: all)")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="seeds per scenario (default: %(default)s)")
    parser.add_argument("--seeds-from", metavar="TEXT", help="derive the seeds from TEXT (default: the commit hash)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N",
                        help="simulations in parallel (default: %(default)s)")  # fmt: skip


def execute(options: argparse.Namespace) -> int:
    if options.seeds < 1:
        raise UsageError(f"--seeds {options.seeds}: each scenario needs a seed; give 1 or more.")
    source = options.seeds_from or commit_name() or outpace.__version__
    records = RecordFile(Path(options.resume) if options.resume else None)
    most = options.max_concurrency or math.inf
    scenarios = [
        each for each in _scenarios(options.quick)
        if (options.only is None or options.only in each.name) and each.load.concurrency <= most
    ]  # fmt: skip
    policies = [PLAIN, *(name for name in options.policies if name != PLAIN)]
    begin = perf_counter()
    runs = Runs(scenarios, policies, source, options.seeds, options.quick, records)
    try:
        runs.run(options.jobs)
    except KeyboardInterrupt:
        again = f"; to continue: --resume {options.resume} --seeds-from {source}" if options.resume else ""
        print(f"interrupted: only finished scenarios are reported{again}", file=sys.stderr)
    report = summarise(runs.rows(), policies)
    report |= {"seeds_from": source, "seeds": options.seeds, "seconds": perf_counter() - begin}
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    print(as_text(report))
    return 0 if report["scenarios"] else 1


def policy_names() -> list[str]:
    return [OURS, ORACLE, BUDGET, *(rival.name for rival in all_rivals())]


def policy_named(name: str) -> str | Rival:
    """Each simulation gets its own rival, because rivals have state."""
    return next((rival for rival in (Fixed(0), *all_rivals()) if rival.name == name), name)


@dataclass
class Runs:
    """Every policy in every scenario with every seed; those on file are not run again."""

    scenarios: list[Scenario]
    policies: list[str]
    source: str  # of the seeds
    num_seeds: int
    quick: bool
    records: RecordFile

    def run(self, jobs: int) -> None:
        wanted = [
            (self.quick, seeded.name, seeded.seed, policy)
            for policy in self.policies
            for scenario in self.scenarios
            for seeded in self._seeded(scenario)
            if self.records.get(seeded.name, self.quick, seeded.seed, policy) is None
        ]
        with (
            tqdm(total=len(wanted), unit="simulation", dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar,
            ExitStack() as stack,
        ):
            if jobs > 1:
                pool = stack.enter_context(multiprocessing.Pool(jobs, signal.signal, (signal.SIGINT, signal.SIG_IGN)))
                ended: Iterable[Record] = pool.imap_unordered(_simulate_named, wanted, chunksize=4)
            else:
                ended = map(_simulate_named, wanted)
            for record in ended:
                self.records.add(record)
                bar.update()

    def rows(self) -> list[dict[str, Any]]:
        """One row per scenario that has finished with every policy and seed."""
        found = []
        for scenario in self.scenarios:
            seeds = [seeded.seed for seeded in self._seeded(scenario)]
            results = {
                policy: [self.records.get(scenario.name, self.quick, seed, policy) for seed in seeds]
                for policy in self.policies
            }
            ended = {policy: [each for each in of_policy if each is not None] for policy, of_policy in results.items()}
            if all(len(of_policy) == len(seeds) for of_policy in ended.values()):
                found.append(compared(scenario, ended))
        return found

    def _seeded(self, scenario: Scenario) -> list[Scenario]:
        return [seeded(scenario, self.source, index) for index in range(self.num_seeds)]


def _simulate_named(wanted: tuple[bool, str, int, str]) -> Record:
    """Takes the scenario's name: scenarios hold functions, which cannot be sent to another process."""
    quick, name, seed, policy = wanted
    world = next(each for each in _scenarios(quick) if each.name == name)
    return Record(name, quick, seed, code_of(policy), Simulation(replace(world, seed=seed), policy_named(policy)).run())


def _scenarios(quick: bool) -> list[Scenario]:
    return quick_scenarios() if quick else all_scenarios()


def compared(scenario: Scenario, results: Mapping[str, Sequence[Result]]) -> dict[str, Any]:
    """A scenario's figures by policy. Each policy has one result per seed, in the same order."""
    plain = results[PLAIN]
    policies: dict[str, dict[str, Any]] = {}
    for name, of_policy in results.items():
        if name == PLAIN:
            continue
        ratios = _ratios(of_policy, plain)
        found: dict[str, Any] = {"ratio_to_plain": geometric_mean(ratios), "lowest": min(ratios)}
        for kind in MAX_P99_RATIO:
            found[f"p99_{kind}"] = _p99_ratio(of_policy, plain, kind)
        if ORACLE in results:
            found["ratio_to_oracle"] = geometric_mean(_ratios(of_policy, results[ORACLE]))
        if of_policy[0].estimated_speedup is not None:
            found["estimated_speedup"] = geometric_mean([each.estimated_speedup or 1.0 for each in of_policy])
        policies[name] = found
    return {
        "name": scenario.name,
        "concurrency": scenario.load.concurrency,
        "drifts": scenario.drifts,
        "adversarial": scenario.adversarial,
        "open_loop": scenario.load.intensity is not None,
        "policies": policies,
    }


def _ratios(ours: Sequence[Result], theirs: Sequence[Result]) -> list[float]:
    return [one.tokens_per_second / other.tokens_per_second for one, other in zip(ours, theirs, strict=True)]


def _p99_ratio(ours: Sequence[Result], theirs: Sequence[Result], kind: str) -> float | None:
    """Over the requests of all seeds; None if there are none of this kind."""

    def p99(results: Sequence[Result]) -> float | None:
        times = [seconds for each in results for length, seconds in each.tpots if (length >= LONG) == (kind == "long")]
        return float(np.percentile(times, 99)) if times else None

    one, other = p99(ours), p99(theirs)
    return one / other if one is not None and other is not None else None


def summarise(rows: list[dict[str, Any]], policies: Sequence[str]) -> dict[str, Any]:
    by_policy = {
        name: _summary(
            [row["policies"][name] for row in rows], [not row["drifts"] and not row["adversarial"] for row in rows]
        )
        for name in policies
        if name != PLAIN and rows
    }
    below = [f"{row['name']}: {'; '.join(broken)}" for row in rows if (broken := missed(row))]
    return {"scenarios": rows, "policies": by_policy, "below_promise": below}


def _summary(figures: list[dict[str, Any]], stationary: list[bool]) -> dict[str, Any]:
    of_oracle = [
        each["ratio_to_oracle"] for each, is_stationary in zip(figures, stationary, strict=True)
        if is_stationary and "ratio_to_oracle" in each
    ]  # fmt: skip
    return {
        "geometric_mean": geometric_mean([each["ratio_to_plain"] for each in figures]),
        "lowest": min(each["lowest"] for each in figures),
        "of_oracle_stationary": geometric_mean(of_oracle) if of_oracle else None,
        **{
            f"p99_{kind}": max((p99 for each in figures if (p99 := each[f"p99_{kind}"]) is not None), default=None)
            for kind in MAX_P99_RATIO
        },
    }


def missed(row: dict[str, Any]) -> list[str]:
    """The promises for ours that this scenario breaks."""
    ours, found = row["policies"].get(OURS), list[str]()
    if ours is None:
        return found
    if ours["lowest"] < MIN_RATIO_TO_PLAIN:
        found.append(f"{ours['lowest']:.3f} of plain")
    for kind, most in MAX_P99_RATIO.items():
        p99 = ours[f"p99_{kind}"]
        if p99 is not None and p99 > most:
            found.append(f"P99 of {kind} requests {p99:.3f} of plain")
    return found


def geometric_mean(ratios: Iterable[float]) -> float:
    values = list(ratios)
    return math.exp(sum(map(math.log, values)) / len(values))


def as_text(report: dict[str, Any]) -> str:
    rows, policies = report["scenarios"], report["policies"]
    seeds = f", {report['seeds']} seeds each, from {report['seeds_from']}" if "seeds" in report else ""
    lines = [f"{len(rows)} scenarios{seeds}; ratios to plain decoding", ""]
    titles = ("geometric mean", "lowest run", "of the oracle", "P99 long", "P99 short")
    columns = ("geometric_mean", "lowest", "of_oracle_stationary", "p99_long", "p99_short")
    lines.append(f"{'policy':20} " + " ".join(f"{title:>14}" for title in titles))

    def shown(value: float | None) -> str:
        return f"{value:14.3f}" if value is not None else f"{'-':>14}"

    for name, each in sorted(policies.items(), key=lambda item: -item[1]["geometric_mean"]):
        lines.append(f"{name:20} " + " ".join(shown(each[column]) for column in columns))
    lines += ["", "of the oracle: geometric mean over stationary scenarios; P99: worst scenario"]
    if OURS in policies:
        below = report["below_promise"]
        lines.append(
            f"promised for ours: every run at least {MIN_RATIO_TO_PLAIN}; P99 at most {MAX_P99_RATIO['long']} for "
            f"requests of {LONG} tokens or more, at most {MAX_P99_RATIO['short']} for shorter ones; "
            f"missed in {len(below)} of {len(rows)} scenarios"
        )
        lines += [f"  {line}" for line in below]
    return "\n".join(lines)

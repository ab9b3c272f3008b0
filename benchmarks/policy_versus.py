"""Compares `auto` of this tree with `auto` of another version, and both with plain decoding, on this machine.

    python -m benchmarks.policy_versus --other OTHER_VENV/bin/python [--model FILE] [--draft FILE] [--cells PATTERNS]
    python -m benchmarks.policy_versus --table FILE      # print a results file, run nothing

`--other` is the Python of a virtual environment in which the other version is installed, for example from a second
checkout: `git worktree add FOLDER COMMIT`, then `OTHER_VENV/bin/pip install -e FOLDER`. `new` is the package of this
tree, `old` is the other one. Each version has its own process, and only one of the two computes at a time. In every
block of every cell (workload/temperature/concurrency) the same requests run three times: with plain decoding and with
`auto` in this tree's process, and with `auto` in the other one, in all orders in turn. Each process prefills a prompt
before its runs are timed. Each process calibrates its costs when it starts: no version uses the other's cost file.

Ratios are of decode tokens per second, over the steps without prefill. A cell's ratio is the geometric mean over its
blocks, with a 95% interval by Student's distribution on the logarithms. A group is all cells of one concurrency: the
geometric mean over its cells, with equal weights. All three runs of a block must give the same tokens. If the backend
guarantees that (native), a difference ends the measurement.

The results file is written after every block. The same command continues a run that was stopped by Ctrl-C or by its
time budget, if the settings and the sources of both versions are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any, get_args

import outpace
from outpace import LLM
from outpace.bench.loads import Closed
from outpace.bench.settings import AUTO, PLAIN
from outpace.bench.targets import EngineTarget, limited
from outpace.bench.workloads import built_in

# A worker imports the package of its own environment and nothing from this folder, which belongs to the new version.
if __name__ != "__main__" or sys.argv[1:2] != ["worker"]:
    from benchmarks.policy_cells import CONCURRENCIES, chosen_cells, pending, save
    from benchmarks.report import provenance
    from outpace.bench.provenance import shortened
    from outpace.bench.statistics import MIN_UNITS, Estimate, student_t_quantile
    from outpace.config import BackendName
    from outpace.models.resolve import resolve_model

RATIOS = (("new", "old"), ("new", "plain"), ("old", "plain"))
ORDERS = list(permutations(("plain", "old", "new")))  # so each run follows each other run equally often
LLM_OPTIONS = {"max_context": 2048, "cache_tokens": 16384, "max_sequences": 32}  # as in benchmarks.policy_cells

Sums = Mapping[str, Any]
Block = Mapping[str, Sums]  # by the name of the run: plain, old, new


def main() -> int:
    if sys.argv[1:2] == ["worker"]:
        return work()
    options = parse()
    if options.table:
        print_table(json.loads(options.table.read_text()))
        return 0
    end = perf_counter() + options.time_budget if options.time_budget else float("inf")
    here = Path(outpace.__file__).resolve().parents[1]
    with (
        TemporaryDirectory() as caches,
        Worker("new", sys.executable, Path(caches, "new"), package_from=here) as new,
        Worker("old", options.other, Path(caches, "old")) as old,
    ):
        check_apart(new.folder, old.folder)
        models = [resolve_model(options.model), *([resolve_model(options.draft)] if options.draft else [])]
        path = options.json or default_path(models, options)
        # One after the other: each calibrates while it loads, and the other must be idle then.
        versions = {worker.name: worker.load(models, options.backend) for worker in (new, old)}
        results = load_results(path, versions, models, options)
        try:
            run(new, old, options, results, path, end)
        except KeyboardInterrupt:
            print(f"\nstopped; run the same command to continue {path.name}", file=sys.stderr)
    print_table(results)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", metavar="PYTHON", help="Python of the environment that has the other version")
    parser.add_argument("--model", help="a GGUF file (default: the embedded SmolLM2)")
    parser.add_argument("--draft", help="a GGUF file with the same vocabulary; adds the proposer `draft`")
    parser.add_argument("--backend", choices=get_args(BackendName), default="native", help="(default: %(default)s)")
    parser.add_argument("--concurrency", type=int, nargs="+", choices=CONCURRENCIES, default=list(CONCURRENCIES),
                        metavar="N", help=f"(default: {' '.join(map(str, CONCURRENCIES))})")  # fmt: skip
    parser.add_argument("--cells", default="*", metavar="PATTERNS",
                        help="workload/temperature/concurrency, as 'code_edit/*/1,*/0/8' (default: all)")  # fmt: skip
    parser.add_argument("--blocks", type=int, default=12, help="blocks per cell (default: %(default)s)")
    parser.add_argument("--block-size", type=int, metavar="N", help="requests per block (default: the concurrency)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="limit of each request (default: the workload's)")
    parser.add_argument("--time-budget", type=float, metavar="SECONDS", help="start no block after this time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="(default: benchmarks/results/policy_versus_*.json)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the results in FILE and stop")
    parser.add_argument("--fresh", action="store_true", help="discard existing results")
    options = parser.parse_args()
    if not options.table and not options.other:
        parser.error("name the other version's Python with --other PYTHON, or a results file with --table FILE")
    for name in ("blocks", "block_size", "max_tokens"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1; got {value}")
    # Cell names are valid patterns, so `options.cells` can hold the names of the chosen cells.
    cells = [cell.name for cell in chosen_cells(options.cells) if cell.concurrency in options.concurrency]
    if not cells:
        parser.error(f"no cell matches {options.cells!r} at concurrency {' '.join(map(str, options.concurrency))}")
    options.cells = ",".join(cells)
    return options


class Worker:
    """A child process that runs one version of the package. It computes only while it handles a command.

    It has its own process group, so Ctrl-C does not reach it. It ends with this object, or with the parent process.
    """

    def __init__(self, name: str, python: str, cache: Path, *, package_from: Path | None = None) -> None:
        self.name = name
        self._python = python
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment["OUTPACE_CACHE_DIR"] = str(cache)
        if package_from is not None:
            environment["PYTHONPATH"] = str(package_from)
        # -P keeps the folder of this script off the path.
        command = [python, "-P", __file__, "worker"]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, process_group=0
            )
        except OSError as error:
            sys.exit(f"{python} cannot be run ({error.strerror}); name the other environment's bin/python")
        self._origin: dict[str, Any] = {}
        self.backend = ""

    def __enter__(self) -> Worker:
        try:
            self._origin = self._answer()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def folder(self) -> Path:
        """Folder of the package that the process imported."""
        return Path(self._origin["folder"])

    def load(self, models: Sequence[Path], backend: str) -> dict[str, Any]:
        """Load the model. Return the version and the resolved options for the results file, with paths shortened."""
        commit = commit_of(self.folder)
        print(f"{self.name}: {self._origin['version']}, commit {commit}, from {self.folder}", file=sys.stderr)
        draft = str(models[1].resolve()) if len(models) > 1 else None
        begin = perf_counter()
        loaded = self.ask(model=str(models[0].resolve()), draft=draft, backend=backend, **LLM_OPTIONS)
        self.backend = loaded["config"]["backend"]
        print(f"{self.name}: loaded in {perf_counter() - begin:.1f} s, backend {self.backend}", file=sys.stderr)
        config = loaded["config"].items()
        return {
            "version": self._origin["version"],
            "commit": commit,
            "python": self._origin["python"],
            "source": loaded["source"],
            "config": {key: shortened(value) if isinstance(value, str) else value for key, value in config},
        }

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # _answer() reports the missing answer
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"the process of the {self.name} version ({self._python}) ended; its error message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> None:
        """Stop the process at any time: it holds no results."""
        self._process.terminate()
        self._process.communicate()


def check_apart(new: Path, old: Path) -> None:
    if new.resolve() == old.resolve():
        sys.exit(
            f"both versions are the same folder, {new}; "
            "install the other version in the environment that --other names, from a checkout of its own"
        )


def run(new: Worker, old: Worker, options: argparse.Namespace, results: dict[str, Any], path: Path, end: float) -> None:
    if new.backend != old.backend:
        sys.exit(f"the new version runs the model on {new.backend}, the old one on {old.backend}; choose a --backend")
    for cell, index in pending(options, results["cells"]):
        if perf_counter() >= end:
            print("the time budget is used up; run the same command to continue", file=sys.stderr)
            return
        block: dict[str, dict[str, Any]] = {}
        for name in ORDERS[index % len(ORDERS)]:
            block[name] = (old if name == "old" else new).ask(
                cell=asdict(cell),
                index=index,
                block_size=options.block_size or cell.concurrency,
                max_tokens=options.max_tokens,
                setting=PLAIN.name if name == "plain" else AUTO.name,
            )
        check_block(block, f"{cell.name} block {index + 1}", is_exact=new.backend == "native")
        record = results["cells"].setdefault(cell.name, {"blocks": []})
        record["blocks"].append(block)
        record["figures"] = figures(record["blocks"])
        results["groups"] = groups(results["cells"])
        save(path, results)
        ratios = record["figures"]["ratios"]
        shown = ", ".join(f"{name} {ratios[name]['value']:.3f}" for name in ("new/old", "new/plain"))
        print(f"{cell.name} block {index + 1} of {options.blocks}: {shown}", file=sys.stderr)


def check_block(block: Block, where: str, *, is_exact: bool) -> None:
    for name, sums in block.items():
        if sums["error"]:
            sys.exit(f"{where}: a request of the run {name!r} failed: {sums['error']}")
        if is_exact and sums["sha256"] != block["plain"]["sha256"]:
            sys.exit(f"{where}: the run {name!r} gave other tokens than plain decoding, for the same prompts and seeds")


def load_results(
    path: Path, versions: Mapping[str, Any], models: Sequence[Path], options: argparse.Namespace
) -> dict[str, Any]:
    """The existing results if they have the same settings and sources, or new ones. Others are an error."""
    same = {
        "backend": options.backend,
        "models": [each.name for each in models],
        "block_size": options.block_size,
        "max_tokens": options.max_tokens,
        "sources": {name: version["source"] for name, version in versions.items()},
    }
    if versions["new"]["source"] == versions["old"]["source"]:
        print("warning: both versions have the same source, so only noise is measured", file=sys.stderr)
    if path.exists() and not options.fresh:
        found: dict[str, Any] = json.loads(path.read_text())
        if found["measured"] != same:
            sys.exit(
                f"{path.name} was measured with other settings or versions; "
                "give another --json FILE, or --fresh to replace it"
            )
        return found
    return {
        "measured": same,
        "versions": dict(versions),
        "provenance": provenance(models),
        "cells": {},
        "groups": {},
    }


def default_path(models: Sequence[Path], options: argparse.Namespace) -> Path:
    name = f"policy_versus_{models[0].stem}{'_draft' if options.draft else ''}_{options.backend}.json"
    return Path(__file__).parent / "results" / name.lower()


def commit_of(package: Path) -> str | None:
    """Commit of the package's checkout, with `+changes` if the package differs from it; None without a checkout."""
    if shutil.which("git") is None or not (package.parent / ".git").exists():
        return None
    asked = (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", "."])
    commit, changes = (
        subprocess.run(["git", *each], cwd=package, capture_output=True, text=True, check=False).stdout.strip()
        for each in asked
    )
    return commit + ("+changes" if changes else "") if commit else None


# Figures


@dataclass(frozen=True)
class LogMean:
    """A mean of logarithms with its standard error, which is None if there are too few blocks."""

    value: float
    error: float | None
    degrees: int
    num_blocks: int

    def ratio(self) -> Estimate:
        value = math.exp(self.value)
        if self.error is None:
            return Estimate(value, num_units=self.num_blocks)
        factor = math.exp(student_t_quantile(0.975, self.degrees) * self.error)
        return Estimate(value, value / factor, value * factor, self.num_blocks)


def cell_mean(blocks: Sequence[Block], name: str, base: str) -> LogMean | None:
    """None if no answer has more than one token: the first token comes from prefill."""
    both = [(block[name], block[base]) for block in blocks]
    logs = [math.log(_rate([ours]) / _rate([theirs])) for ours, theirs in both if _decodes(ours) and _decodes(theirs)]
    if not logs:
        return None
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) >= MIN_UNITS else None
    return LogMean(statistics.fmean(logs), error, len(logs) - 1, len(logs))


def group_mean(cells: Sequence[LogMean]) -> LogMean:
    """Cells have equal weights. Degrees of freedom follow Welch and Satterthwaite, because cells differ in variance."""
    value = statistics.fmean(cell.value for cell in cells)
    num_blocks = sum(cell.num_blocks for cell in cells)
    variances = [(cell.error**2, cell.degrees) for cell in cells if cell.error is not None]
    if len(variances) < len(cells):
        return LogMean(value, None, 0, num_blocks)
    total = sum(variance for variance, _ in variances)
    uncertainty = sum(variance**2 / degrees for variance, degrees in variances)
    degrees = total**2 / uncertainty if uncertainty else sum(degrees for _, degrees in variances)
    return LogMean(value, math.sqrt(total) / len(cells), int(degrees + 1e-9), num_blocks)


def figures(blocks: Sequence[Block]) -> dict[str, Any]:
    means = {f"{name}/{base}": cell_mean(blocks, name, base) for name, base in RATIOS}
    runs = {name: [block[name] for block in blocks] for name in blocks[0]}
    return {
        "num_blocks": len(blocks),
        "num_unequal": sum(len({sums["sha256"] for sums in block.values()}) > 1 for block in blocks),
        "decode_tokens_per_second": {name: _rate(each) for name, each in runs.items()},
        "num_drafted": {name: sum(sums["num_drafted"] for sums in each) for name, each in runs.items()},
        "num_accepted": {name: sum(sums["num_accepted"] for sums in each) for name, each in runs.items()},
        "most_idle_cpu_seconds": max(sums["idle_cpu_seconds"] for each in runs.values() for sums in each),
        "ratios": {name: _as_dict(mean) for name, mean in means.items()},
    }


def groups(cells: Mapping[str, Any]) -> dict[str, Any]:
    """Ratios by concurrency, which is the last part of a cell's name."""
    found: dict[str, Any] = {}
    for concurrency in sorted({int(name.rpartition("/")[2]) for name in cells}):
        chosen = [cell["blocks"] for name, cell in cells.items() if int(name.rpartition("/")[2]) == concurrency]
        found[str(concurrency)] = {"num_cells": len(chosen), "ratios": {}}
        for name, base in RATIOS:
            means = [mean for blocks in chosen if (mean := cell_mean(blocks, name, base))]
            whole = group_mean(means) if means else None
            found[str(concurrency)]["ratios"][f"{name}/{base}"] = _as_dict(whole)
    return found


def _as_dict(mean: LogMean | None) -> dict[str, Any]:
    return (mean.ratio() if mean else Estimate(math.nan)).as_dict()


def _decodes(sums: Sums) -> bool:
    return bool(sums["decode_tokens"] and sums["decode_seconds"])


def _rate(runs: Sequence[Sums]) -> float:
    seconds = sum(sums["decode_seconds"] for sums in runs)
    return float(sum(sums["decode_tokens"] for sums in runs) / seconds) if seconds else math.nan


def print_table(results: Mapping[str, Any]) -> None:
    cells, names = results["cells"], [f"{name}/{base}" for name, base in RATIOS]
    for name, version in results["versions"].items():
        print(f"{name}: {version['version']}, commit {version['commit']}, Python {version['python']}")
    machine, measured = results["provenance"], results["measured"]
    print(f"{machine['cpu']}, {machine['cores']} cores; {' + '.join(measured['models'])}, {measured['backend']}; "
          f"requests in a block: {measured['block_size'] or 'the concurrency'}; "
          f"tokens: {measured['max_tokens'] or 'the limit of the workload'}\n")  # fmt: skip
    if not cells:
        print("no block is done")
        return
    head = "".join(f"{name:>26}" for name in names)
    print(f"{'decode tokens per second':26}{'blocks':>7}{'plain':>9}{'old':>9}{'new':>9}{head}{'unequal':>9}")
    for name, cell in cells.items():
        found = cell["figures"]
        speeds = "".join(f"{found['decode_tokens_per_second'][run]:9.1f}" for run in ("plain", "old", "new"))
        print(f"{name:26}{found['num_blocks']:7}{speeds}{_shown(found, names)}{found['num_unequal']:9}")
    for concurrency, group in results["groups"].items():
        label = f"{group['num_cells']} {'cell' if group['num_cells'] == 1 else 'cells'} at {concurrency}"
        count = sum(cell["figures"]["num_blocks"] for name, cell in cells.items() if name.endswith(f"/{concurrency}"))
        print(f"{label:26}{count:7}{'':27}{_shown(group, names)}")
    print("\nlower bounds (95% intervals)")
    for concurrency, group in results["groups"].items():
        bounds = [f"{name} {_bound(group['ratios'][name]['low'])}" for name in names]
        print(f"  all cells at {concurrency}: {', '.join(bounds)}")
    for name in names:
        lows = {cell: found["figures"]["ratios"][name]["low"] for cell, found in cells.items()}
        known = {cell: low for cell, low in lows.items() if low is not None}
        lowest = min(known, key=lambda cell: known[cell]) if known else None
        print(f"  lowest of a cell, {name}: {f'{_bound(known[lowest])} in {lowest}' if lowest else '-'}")
    most = max(cell["figures"]["most_idle_cpu_seconds"] for cell in cells.values())
    print(f"an idle process used at most {1000 * most:.1f} ms of CPU time")


def _shown(found: Mapping[str, Any], names: Sequence[str]) -> str:
    ratios = [found["ratios"][name] for name in names]
    return "".join(f"{Estimate(ratio['value'], ratio['low'], ratio['high'])!s:>26}" for ratio in ratios)


def _bound(low: float | None) -> str:
    return "-" if low is None else f"{low:.3f}"


# The worker: JSON lines in, JSON lines out. It may use only what both versions of the package have.


def work() -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers

    def answer(value: Mapping[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    folder = Path(outpace.__file__).resolve().parent
    answer({"folder": str(folder), "version": outpace.__version__, "python": platform.python_version()})
    first = sys.stdin.readline()
    if not first:
        return 0
    with LLM(**json.loads(first)) as llm:
        target = EngineTarget(llm, keeps_prompts=True)
        target.warm_up(target.jobs(built_in("chat", 1), temperature=0.0)[0], [PLAIN, AUTO])
        answer({"config": llm.config.as_dict(), "source": source_digest(folder)})
        idle_since = process_time()
        for line in sys.stdin:
            idle = process_time() - idle_since
            answer({**run_block(target, json.loads(line)), "idle_cpu_seconds": idle})
            idle_since = process_time()
    return 0


def source_digest(package: Path) -> str:
    """Hash of the imported modules, the kernels and the prompts: the files that decide speed and output.

    A commit is not enough: it does not include later changes, and most commits change none of these files.
    """
    modules = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "outpace"]
    paths = {Path(file).resolve() for file in modules if file}
    paths |= {path for suffix in ("cpp", "h", "txt") for path in package.rglob(f"*.{suffix}")}
    digest = hashlib.sha256()
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def run_block(target: EngineTarget, command: Mapping[str, Any]) -> dict[str, Any]:
    """Run a block. Requests are numbered over all blocks of a cell; a prompt that is used again has another seed."""
    cell, size, most = command["cell"], command["block_size"], command["max_tokens"]
    begin = command["index"] * size
    prompts = built_in(cell["workload"])
    chosen = [prompts[i % len(prompts)] for i in range(begin, begin + size)]
    jobs = target.jobs(chosen, temperature=cell["temperature"], base_seed=begin)
    jobs = [limited(job, most) for job in jobs] if most else jobs
    load = Closed(cell["concurrency"])
    # Prefills the prompts that are not cached from the last run, and fills the CPU's caches for this process.
    target.run([limited(job, 1) for job in jobs], PLAIN, load)
    run = target.run(jobs, AUTO if command["setting"] == AUTO.name else PLAIN, load)
    counts = [trial.counts for trial in run.trials]
    tokens = json.dumps([list(trial.token_ids) for trial in run.trials])
    return {
        "seconds": run.seconds,
        "num_tokens": run.num_tokens,
        "decode_seconds": run.decode_seconds,
        "decode_tokens": run.decode_tokens,
        "num_steps": run.num_steps,
        "num_drafted": sum(each.num_drafted for each in counts),
        "num_accepted": sum(each.num_accepted for each in counts),
        "sha256": hashlib.sha256(tokens.encode()).hexdigest(),
        "error": next((trial.error for trial in run.trials if trial.error), None),
    }


if __name__ == "__main__":
    sys.exit(main())

"""Compares `auto` with plain decoding and fixed settings, by workload, temperature and concurrency.

    python -m benchmarks.policy_cells [--model FILE] [--draft FILE] [--backend NAME] [--time-budget SECONDS]
    python -m benchmarks.policy_cells --table            # print the results file, run nothing

In every cell the same requests run with plain decoding, with `auto`, and with every proposer at fixed depths,
interleaved block by block in one process. The results file is written after every block. The same command continues a
run that was stopped by Ctrl-C or by its time budget. The first block of every cell runs before any second block, so a
short run has results of every cell.

Ratios are tokens per second over those of plain decoding, with 95% intervals over blocks: `decode` over the steps
without prefill, `total` over all steps. `estimated` is the engine's own estimate. `best fixed` is the best fixed
setting of that cell, chosen after the measurement, so noise makes it look better than it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, get_args

from benchmarks.cell_figures import figures, print_table
from benchmarks.report import provenance, write_json
from outpace import LLM
from outpace.bench.loads import Closed
from outpace.bench.paired import interleaved
from outpace.bench.provenance import shortened
from outpace.bench.settings import AUTO, PLAIN, Setting, fixed_settings
from outpace.bench.targets import EngineTarget, limited
from outpace.bench.trials import Job, Run
from outpace.bench.workloads import Prompt, built_in
from outpace.config import BackendName, Method
from outpace.models.resolve import resolve_model

WORKLOADS = ("code_edit", "summarise", "json", "chat", "story")
TEMPERATURES = (0.0, 0.7, 1.0)
CONCURRENCIES = (1, 4, 8)


@dataclass(frozen=True)
class Cell:
    workload: str
    temperature: float
    concurrency: int

    @property
    def name(self) -> str:
        return f"{self.workload}/{self.temperature:g}/{self.concurrency}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file (default: the embedded SmolLM2)")
    parser.add_argument("--draft", help="a GGUF file with the same vocabulary; adds the proposer `draft`")
    parser.add_argument("--backend", choices=get_args(BackendName), default="auto", help="(default: %(default)s)")
    add_cell_options(parser, default_cells="*")
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4, 8], help="fixed depths (default: 2 4 8)")
    parser.add_argument("--methods", nargs="+", choices=("ngram", "suffix", "draft"), help="(default: all available)")
    parser.add_argument("--decode-only", action="store_true",
                        help="prefill a prompt once for all settings: faster, but `total` is meaningless")  # fmt: skip
    parser.add_argument("--time-budget", type=float, metavar="SECONDS", help="start no block after this time")
    parser.add_argument("--threads", type=int, help="(default: all usable cores)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="(default: benchmarks/results/policy_cells_*.json)")
    parser.add_argument("--table", action="store_true", help="print the existing results and stop")
    parser.add_argument("--fresh", action="store_true", help="discard existing results")
    options = parser.parse_args()

    model = resolve_model(options.model)
    path = options.json or default_path(model, options)
    if options.table:
        print_table(json.loads(path.read_text())["cells"])
        return 0
    end = perf_counter() + options.time_budget if options.time_budget else float("inf")
    llm_options: dict[str, Any] = {"max_context": 2048, "cache_tokens": 16384, "max_sequences": 4 * max(CONCURRENCIES)}
    with LLM(str(model), draft=options.draft, threads=options.threads, backend=options.backend, **llm_options) as llm:
        methods: list[Method] = options.methods or ["ngram", "suffix", *(["draft"] if options.draft else [])]
        settings = [PLAIN, AUTO, *fixed_settings(methods, options.depths)]
        models = [model, *([Path(options.draft)] if options.draft else [])]
        results = load_results(path, llm, settings, models, options)
        try:
            run(EngineTarget(llm, keeps_prompts=options.decode_only), settings, options, results, path, end)
        except KeyboardInterrupt:
            print(f"\nstopped; run the same command to continue {path.name}", file=sys.stderr)
    print_table(results["cells"])
    return 0


def add_cell_options(parser: argparse.ArgumentParser, *, default_cells: str) -> None:
    example = "workload/temperature/concurrency, as 'code_edit/*/1,*/0/8' (default: %(default)s)"
    parser.add_argument("--cells", default=default_cells, metavar="PATTERNS", help=example)
    parser.add_argument("--blocks", type=int, help="blocks per cell (default: 12 at concurrency 1, else 4)")
    parser.add_argument("--block-size", type=int, help="requests (default: 1 at concurrency 1, else 2 x concurrency)")
    parser.add_argument("--max-tokens", type=int, help="limit per request, for slow models (default: the workload's)")


def run(
    target: EngineTarget,
    settings: list[Setting],
    options: argparse.Namespace,
    results: dict[str, Any],
    path: Path,
    end: float,
) -> None:
    jobs: dict[Cell, list[Job]] = {}
    for cell, index in pending(options, results["cells"]):
        if perf_counter() >= end:
            print("the time budget is used up; run the same command to continue", file=sys.stderr)
            return
        if cell not in jobs:
            jobs[cell] = cell_jobs(target, cell, options)
            if len(jobs) == 1:
                target.warm_up(jobs[cell][0], settings)
        size = block_size(cell, options)
        block = jobs[cell][index * size : (index + 1) * size]
        if options.decode_only:
            target.run([limited(job, 1) for job in block], PLAIN, Closed(cell.concurrency))
        runs = {
            setting.name: each
            for setting, each in interleaved(target, block, settings, Closed(cell.concurrency), index)
        }
        record = results["cells"].setdefault(cell.name, {"blocks": []})
        record["blocks"].append({name: summary(each, runs[PLAIN.name]) for name, each in runs.items()})
        record["figures"] = figures(record["blocks"])
        save(path, results)
        decode = record["figures"]["settings"][AUTO.name]["decode_ratio"]
        shown = f"{decode['value']:.3f}"
        print(f"{cell.name} block {index + 1} of {num_blocks(cell, options)}: auto/plain {shown}", file=sys.stderr)


def pending(options: argparse.Namespace, done: dict[str, Any]) -> Iterator[tuple[Cell, int]]:
    """The blocks that are not done yet: one of each cell, then the next of each."""
    cells = chosen_cells(options.cells)
    begun = {cell: len(done.get(cell.name, {"blocks": []})["blocks"]) for cell in cells}
    for index in range(max((num_blocks(cell, options) for cell in cells), default=0)):
        for cell in cells:
            if begun[cell] <= index < num_blocks(cell, options):
                yield cell, index


def chosen_cells(patterns: str) -> list[Cell]:
    cells = [Cell(*each) for each in product(WORKLOADS, TEMPERATURES, CONCURRENCIES)]
    return [cell for cell in cells if any(fnmatchcase(cell.name, each.strip()) for each in patterns.split(","))]


def num_blocks(cell: Cell, options: argparse.Namespace) -> int:
    return options.blocks or (12 if cell.concurrency == 1 else 4)


def block_size(cell: Cell, options: argparse.Namespace) -> int:
    return options.block_size or Closed(cell.concurrency).block_size


def cell_jobs(target: EngineTarget, cell: Cell, options: argparse.Namespace) -> list[Job]:
    """The requests of all blocks of a cell. A prompt that is used again has another seed."""
    count = num_blocks(cell, options) * block_size(cell, options)
    prompts = built_in(cell.workload)
    limit = options.max_tokens or max(prompt.max_tokens for prompt in prompts)
    chosen = [prompts[i % len(prompts)] for i in range(count)]
    capped = [Prompt(each.messages, each.category, min(each.max_tokens, limit)) for each in chosen]
    return target.jobs(capped, temperature=cell.temperature)


def summary(run: Run, plain: Run) -> dict[str, Any]:
    """A block in the results file: sums, from which every figure can be computed again."""
    counts = [trial.counts for trial in run.trials]
    pairs = zip(run.trials, plain.trials, strict=True)
    return {
        "seconds": run.seconds,
        "num_tokens": run.num_tokens,
        "decode_seconds": run.decode_seconds,
        "decode_tokens": run.decode_tokens,
        "num_steps": run.num_steps,
        "num_drafted": sum(each.num_drafted for each in counts),
        "num_accepted": sum(each.num_accepted for each in counts),
        "estimated_plain_seconds": sum(each.plain_seconds for each in counts),
        "estimated_decode_seconds": sum(each.decode_seconds for each in counts),
        "num_requests": len(run.trials),
        "num_unequal": sum(ours.token_ids != theirs.token_ids for ours, theirs in pairs),
        "time_per_output_token": [trial.time_per_output_token for trial in run.trials],
    }


def load_results(
    path: Path, llm: LLM, settings: list[Setting], models: list[Path], options: argparse.Namespace
) -> dict[str, Any]:
    """The existing results if they have the same settings, or new ones. Other settings are an error."""
    same = {
        "settings": [setting.name for setting in settings],
        "backend": llm.config.backend,
        "models": [each.name for each in models],
        "block_size": options.block_size,
        "decode_only": options.decode_only,
        "max_tokens": options.max_tokens,
    }
    if path.exists() and not options.fresh:
        found: dict[str, Any] = json.loads(path.read_text())
        if found["measured"] != same:
            sys.exit(
                f"{path.name} was measured with other settings; give another --json FILE, or --fresh to replace it"
            )
        return found
    config = {key: shortened(value) if isinstance(value, str) else value for key, value in llm.config.as_dict().items()}
    return {"measured": same, "provenance": provenance(models), "config": config, "cells": {}}


def save(path: Path, results: dict[str, Any]) -> None:
    """Replace the file atomically, so that an interrupt leaves a complete file."""
    partial = path.with_suffix(".partial")
    write_json(partial, results, announce=False)
    partial.replace(path)


def default_path(model: Path, options: argparse.Namespace) -> Path:
    name = f"policy_cells_{model.stem}{'_draft' if options.draft else ''}_{options.backend}.json"
    return Path(__file__).parent / "results" / name.lower()


if __name__ == "__main__":
    sys.exit(main())

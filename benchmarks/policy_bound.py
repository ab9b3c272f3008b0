"""The most that guessing from the text could gain in each cell of benchmarks.policy_cells: what a clairvoyant gets.

    python -m benchmarks.policy_bound [--model FILE] [--backend NAME] [--cells PATTERNS] [--results FILE]

Each prompt is answered plainly. Then, at every place of its answer, every proposer is asked what comes next, and the
answer says how much of that is right. One who knew this beforehand would verify exactly the right tokens, never a wrong
one, and could pass over a short guess to use a longer one behind it; the cheapest such way through the answer, by the
cost of steps measured on this machine, is the bound. No policy with these proposers and these costs is faster, and a
real one, which has to find out which guesses are right, stays below it. Beside it stands what policy_cells measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, get_args

from tqdm import tqdm

from benchmarks.policy_cells import Cell, add_cell_options, cell_jobs, chosen_cells, default_path
from benchmarks.report import provenance, write_json
from outpace import LLM
from outpace.bench.loads import Closed
from outpace.bench.settings import AUTO, PLAIN
from outpace.bench.targets import EngineTarget
from outpace.bench.trials import Job
from outpace.config import MAX_DEPTH, BackendName
from outpace.models.resolve import resolve_model
from outpace.speculation.costs.curves import Costs
from outpace.speculation.proposers.base import DraftAsk, Proposer
from outpace.speculation.proposers.ngram import NgramProposer
from outpace.speculation.proposers.suffix import SuffixProposer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file (default: the embedded SmolLM2)")
    parser.add_argument("--backend", choices=get_args(BackendName), default="auto", help="(default: %(default)s)")
    add_cell_options(parser, default_cells="*/*/1")
    parser.add_argument("--results", type=Path, metavar="FILE", help="of policy_cells (default: where it writes them)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.set_defaults(draft=None)
    options = parser.parse_args()

    model = resolve_model(options.model)
    results = options.results or default_path(model, options)
    measured = json.loads(results.read_text())["cells"] if results.exists() else {}
    rows = []
    with LLM(str(model), backend=options.backend, max_context=2048, cache_tokens=8192) as llm:
        llm.engine.calibrate(again=True)
        target = EngineTarget(llm)
        cells = [cell for cell in chosen_cells(options.cells) if cell.concurrency == 1]
        for cell in tqdm(cells, unit="cell", dynamic_ncols=True):
            bounds = [bound(llm, target, job) for job in cell_jobs(target, cell, options)]
            rows.append(row(cell, [each for each in bounds if each], measured.get(cell.name)))
        costs = llm.engine.costs
        assert costs is not None
        curve = {tokens: costs.target.seconds(1, tokens) / costs.target.seconds(1, 1) for tokens in (2, 3, 4, 6, 8)}
    print_rows(rows)
    print("a step beside one of one token: " + ", ".join(f"{n} tokens {ratio:.2f}x" for n, ratio in curve.items()))
    if options.json:
        write_json(options.json, {"provenance": provenance([model]), "step_ratios": curve, "cells": rows})
    return 0


def bound(llm: LLM, target: EngineTarget, job: Job) -> tuple[float, int, int] | None:
    """Plain over clairvoyant seconds, the clairvoyant's steps and the tokens they said; None for an empty answer."""
    answer = target.run([job], PLAIN, Closed(1)).trials[0].token_ids
    costs = llm.engine.costs
    if len(answer) < 2 or costs is None:
        return None
    right = right_lengths(llm, job, answer)
    plain, fastest, steps = cheapest_way(right, len(job.tokens), costs)
    return plain / fastest, steps, len(answer) - 1


def right_lengths(llm: LLM, job: Job, answer: Sequence[int]) -> list[int]:
    """For each place after the answer's first token: how many tokens the best guess there has right."""
    proposers: list[Proposer] = [
        NgramProposer(llm.config.ngram_min, llm.config.ngram_max),
        SuffixProposer(llm.config.suffix_store_tokens),
    ]
    request = llm.engine.submit(job.tokens, job.params)  # to have one; it is never run
    right = []
    try:
        for at in range(1, len(answer)):
            request.tokens.append(answer[at - 1])
            truth = answer[at : at + MAX_DEPTH]
            guesses = [proposer.propose([DraftAsk(request, MAX_DEPTH)])[0].tokens for proposer in proposers]
            right.append(max(num_right(guess, truth) for guess in guesses))
    finally:
        llm.engine.abort(request)
    return right


def num_right(guess: Sequence[int], truth: Sequence[int]) -> int:
    pairs = zip(guess, truth, strict=False)
    return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(guess), len(truth)))


def cheapest_way(right: Sequence[int], num_prompt: int, costs: Costs) -> tuple[float, float, int]:
    """Seconds of plain decoding, seconds and steps of the cheapest way, from the last token backwards."""
    length = len(right)
    plain = 0.0
    seconds, steps = [0.0] * (length + 1), [0] * (length + 1)
    for at in reversed(range(length)):
        context = num_prompt + at + 1
        by_tokens = costs.target.by_tokens(1, 1, 1 + right[at], context)
        plain += by_tokens[0] + costs.schedule_seconds + costs.judge_seconds
        ways = []
        for depth, forward in enumerate(by_tokens):
            said = min(depth + 1, length - at)
            host = costs.schedule_seconds + said * costs.judge_seconds
            ways.append((forward + host + seconds[at + said], 1 + steps[at + said]))
        seconds[at], steps[at] = min(ways)
    return plain, seconds[0], steps[0]


def row(cell: Cell, bounds: Sequence[tuple[float, int, int]], measured: dict[str, Any] | None) -> dict[str, Any]:
    figures = measured["figures"] if measured else None
    best = figures.get("best_fixed") if figures else None
    return {
        "cell": cell.name,
        "num_prompts": len(bounds),
        "median_bound": median(ratio for ratio, _, _ in bounds),
        "bound": sum(tokens for _, _, tokens in bounds) / sum(tokens / ratio for ratio, _, tokens in bounds),
        "tokens_per_step": sum(tokens for _, _, tokens in bounds) / sum(steps for _, steps, _ in bounds),
        "auto": figures["settings"][AUTO.name]["decode_ratio"]["value"] if figures else None,
        "best_fixed": best,
        "best_fixed_ratio": figures["settings"][best]["decode_ratio"]["value"] if figures and best else None,
    }


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{'cell':18}{'prompts':>8}{'bound':>8}{'median':>8}{'tokens/step':>13}{'auto':>8}{'best fixed':>20}")
    for each in rows:
        auto = f"{each['auto']:.3f}" if each["auto"] else "-"
        best = f"{each['best_fixed']} {each['best_fixed_ratio']:.3f}" if each["best_fixed"] else "-"
        print(
            f"{each['cell']:18}{each['num_prompts']:8}{each['bound']:8.3f}{each['median_bound']:8.3f}"
            f"{each['tokens_per_step']:13.2f}{auto:>8}{best:>20}"
        )


if __name__ == "__main__":
    sys.exit(main())

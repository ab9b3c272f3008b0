"""An upper bound on the gain of ngram and suffix drafts in each cell of benchmarks.policy_cells.

    python -m benchmarks.policy_bound [--model FILE] [--backend NAME] [--cells PATTERNS] [--results FILE]

Each prompt runs with plain decoding. Then every proposer drafts at every position of the answer, and the answer shows
how many drafted tokens are right. An oracle that knows this in advance verifies only right tokens, and can skip a short
draft to use a longer one later. Its cheapest sequence of steps, by the step costs of this machine, is the bound. No
policy with these proposers and costs is faster, and a real policy stays below it. The results of policy_cells are
printed beside it.
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
    parser.add_argument("--results", type=Path, metavar="FILE", help="of policy_cells (default: its default file)")
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
    print("step time over that of one token: " + ", ".join(f"{n} tokens {ratio:.2f}x" for n, ratio in curve.items()))
    if options.json:
        write_json(options.json, {"provenance": provenance([model]), "step_ratios": curve, "cells": rows})
    return 0


def bound(llm: LLM, target: EngineTarget, job: Job) -> tuple[float, int, int] | None:
    """Plain over oracle seconds, the oracle's steps, and the tokens they emit; None for an answer below 2 tokens."""
    answer = target.run([job], PLAIN, Closed(1)).trials[0].token_ids
    costs = llm.engine.costs
    if len(answer) < 2 or costs is None:
        return None
    right = right_lengths(llm, job, answer)
    plain, fastest, steps = cheapest_path(right, len(job.tokens), costs)
    return plain / fastest, steps, len(answer) - 1


def right_lengths(llm: LLM, job: Job, answer: Sequence[int]) -> list[int]:
    """For each position after the answer's first token: the number of right tokens of the best draft."""
    proposers: list[Proposer] = [
        NgramProposer(llm.config.ngram_min, llm.config.ngram_max),
        SuffixProposer(llm.config.suffix_store_tokens),
    ]
    request = llm.engine.submit(job.tokens, job.params)  # proposers need a request; it never runs
    right = []
    try:
        for at in range(1, len(answer)):
            request.tokens.append(answer[at - 1])
            truth = answer[at : at + MAX_DEPTH]
            drafts = [proposer.propose([DraftAsk(request, MAX_DEPTH)])[0].tokens for proposer in proposers]
            right.append(max(num_right(draft, truth) for draft in drafts))
    finally:
        llm.engine.abort(request)
    return right


def num_right(draft: Sequence[int], truth: Sequence[int]) -> int:
    pairs = zip(draft, truth, strict=False)
    return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(draft), len(truth)))


def cheapest_path(right: Sequence[int], num_prompt: int, costs: Costs) -> tuple[float, float, int]:
    """Seconds of plain decoding, then seconds and steps of the cheapest path (dynamic programming from the end)."""
    length = len(right)
    plain = 0.0
    seconds, steps = [0.0] * (length + 1), [0] * (length + 1)
    for at in reversed(range(length)):
        context = num_prompt + at + 1
        by_tokens = costs.target.by_tokens(1, 1, 1 + right[at], context)
        plain += by_tokens[0] + costs.schedule_seconds + costs.token_seconds
        paths = []
        for depth, forward in enumerate(by_tokens):
            num_emitted = min(depth + 1, length - at)
            host = costs.schedule_seconds + num_emitted * costs.token_seconds
            paths.append((forward + host + seconds[at + num_emitted], 1 + steps[at + num_emitted]))
        seconds[at], steps[at] = min(paths)
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

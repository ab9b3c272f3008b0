"""Trees of the head beside its chains, on one GPU: the same prompts, in turns, with real acceptance and real cost.

    python -m benchmarks.gpu_trees MODEL.gguf TOKENS.json OUT [--concurrency 1 8 32] [--blocks 3] [--auto]

The model, the head and the file of prompts are those of `benchmarks.gpu_speculation`, whose `run` this is, with other
settings: chains of 3 and 4 tokens, and trees of depth 4 with 15 nodes. A block runs all settings on the same prompts,
beginning with another one each time. Beside each cell's chain with the higher median, OUT/gpu_trees.txt has the tree's
tokens a second over that chain's: the median of the blocks, and the lowest and highest. `benchmarks.trees` says what
they could be at most. With --auto, the policy chooses among all of them, and lookups.

At temperature 1 requests have no seed: chains are verified by rejection, trees by the match rule.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu_speculation

CHAINS, TREE = ("head:3", "head:4"), "tree:4"
CONCURRENCY, BLOCKS, SECONDS = (1, 8, 32), 3, 300
BOUNDS = {1: 1.168, 8: 1.067, 32: 1.0}  # of greedy requests, by `benchmarks.trees`: results/trees_h200.txt


def compare(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each cell, trees beside the chain that is faster there; blocks in which a setting is missing are left out."""
    cells: dict[tuple[int, float], dict[str, dict[int, Mapping[str, Any]]]] = {}
    for row in rows:
        of_setting = cells.setdefault((row["concurrency"], row["temperature"]), {})
        of_setting.setdefault(row["setting"], {})[row["block"]] = row
    found = []
    for (concurrency, temperature), cell in cells.items():
        medians = {
            name: statistics.median([row["tokens_per_s"] for row in cell[name].values()])
            for name in CHAINS
            if name in cell
        }
        if not medians or TREE not in cell:
            continue
        chain = max(medians, key=medians.__getitem__)
        blocks = sorted(cell[chain].keys() & cell[TREE].keys())
        ratios = [cell[TREE][block]["tokens_per_s"] / cell[chain][block]["tokens_per_s"] for block in blocks]
        found.append({
            "concurrency": concurrency, "temperature": temperature, "chain": chain,
            "ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios), "blocks": len(blocks),
            **{
                name: {key: statistics.median([row[key] for row in cell[setting].values()])
                       for key in ("tokens_per_step_and_request", "ms_per_step", "speedup")}
                for name, setting in (("of_chain", chain), ("of_tree", TREE))
            },
        })  # fmt: skip
    return found


def as_text(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "trees of depth 4 with 15 nodes over the best chain, median of blocks (lowest-highest); of each: tokens a step "
        "and request, ms a step, over plain decoding"
    ]
    for cell in cells:
        chain, tree = (
            f"{each['tokens_per_step_and_request']:.2f} {each['ms_per_step']:6.2f} {each['speedup']:5.2f}"
            for each in (cell["of_chain"], cell["of_tree"])
        )
        bound = BOUNDS.get(cell["concurrency"]) if cell["temperature"] == 0 else None
        lines.append(
            f"  {cell['concurrency']:3} at once, temperature {cell['temperature']:.0f}: {cell['ratio']:.3f} "
            f"({cell['lowest']:.3f}-{cell['highest']:.3f}) of {cell['chain']}; chain {chain}; tree {tree}"
            + (f"; at most {bound:.2f} was expected" if bound is not None else "")
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="SmolLM2 as a GGUF file")
    parser.add_argument("tokens", type=Path, help="the file that `benchmarks.gpu_speculation prepare` wrote")
    parser.add_argument("out", type=Path, help="folder for text and JSON")
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCY))
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="start no block after this (default: %(default)s)"
    )
    parser.add_argument("--auto", action="store_true", help="also let the policy choose")
    options, others = parser.parse_known_args(arguments)
    settings = ["plain", *CHAINS, TREE, *(["auto"] if options.auto else [])]
    status = gpu_speculation.main([
        "run", str(options.model), str(options.tokens), str(options.out), "--settings", *settings,
        "--concurrency", *map(str, options.concurrency), "--temperature", *map(str, options.temperature),
        "--blocks", str(options.blocks), "--seconds", str(options.seconds), *others,
    ])  # fmt: skip
    figures = json.loads((options.out / "gpu_speculation.json").read_text())
    cells = compare(figures["rows"])
    about = [f"{key}: {figures.get(key)}" for key in ("command", "commit", "gpu")]
    lines = [*about, "", *as_text(cells), *(f"missing: {each}" for each in figures["missing"])]
    print("\n".join(lines))
    (options.out / "gpu_trees.txt").write_text("\n".join(lines) + "\n")
    (options.out / "gpu_trees.json").write_text(json.dumps({"cells": cells}, indent=1) + "\n")
    return status


if __name__ == "__main__":
    raise SystemExit(main())

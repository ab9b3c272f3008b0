"""Outpace beside the engines that `outpace bench peers` knows, for each class of Spec-Bench, with the embedded model.

    python -m benchmarks.spec_bench_peers --prompts question.jsonl [--count 4] [--seed 1] [--json FILE]

Every prompt, drawn with the seed, runs through every variant of every engine, in random order, greedily, one at a time,
on all cores. Tokens per second from request to complete answer, prompt included. `auto` is compared with the fastest
variant of each engine in that class, whichever that is: the ratio has a 95% interval over prompts.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from benchmarks.report import provenance, write_json
from benchmarks.spec_bench import load_classes
from outpace import LLM
from outpace.bench.figures import estimate_dict
from outpace.bench.peer import is_installed
from outpace.bench.peer.base import Models, open_peer
from outpace.bench.peers import CONTEXT, REFERENCE, Attempt, Variant, measure, rows
from outpace.bench.statistics import ratio_of_rates
from outpace.config import usable_cores
from outpace.models.resolve import resolve_model

ALL = 1000  # more prompts than a class has


def drawn(llm: LLM, path: Path, count: int, seed: int) -> list[tuple[str, list[int]]]:
    """`count` prompts of each class that leave room for an answer, as token ids."""
    rng, found = random.Random(seed), []
    for name, texts in load_classes(path, ALL).items():
        prompts = [llm.encode_chat([{"role": "user", "content": text}]) for text in rng.sample(texts, len(texts))]
        found += [(name, prompt) for prompt in [each for each in prompts if len(each) < CONTEXT // 2][:count]]
    return found


def by_class(attempts: dict[Variant, list[Attempt]]) -> dict[str, dict[str, Any]]:
    """By class and engine: its fastest variant, its tokens per second, and those of `auto` over them."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted({each.workload for each in attempts[REFERENCE]}):
        own = {key: [each for each in tries if each.workload == name] for key, tries in attempts.items()}
        rates = {key: _rate(tries) for key, tries in own.items() if not any(each.error for each in tries)}
        found[name] = {"outpace": {"variant": REFERENCE[1], "tokens_per_second": rates[REFERENCE]}}
        for engine in sorted({key[0] for key in rates} - {REFERENCE[0]}):
            best = max((key for key in rates if key[0] == engine), key=rates.__getitem__)
            ours, theirs = own[REFERENCE], own[best]
            ratio = ratio_of_rates(*_counts(ours), *_counts(theirs))
            each_prompt = [
                a.num_tokens / a.seconds / (b.num_tokens / b.seconds) for a, b in zip(ours, theirs, strict=True)
            ]
            found[name][engine] = {
                "variant": best[1],
                "tokens_per_second": rates[best],
                "auto_over_it": estimate_dict(ratio),
                "by_prompt": each_prompt,
            }
    return found


def _rate(tries: list[Attempt]) -> float:
    tokens, seconds = _counts(tries)
    return sum(tokens) / sum(seconds)


def _counts(tries: list[Attempt]) -> tuple[list[int], list[float]]:
    return [each.num_tokens for each in tries], [each.seconds for each in tries]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--peers", nargs="+", default=("llama.cpp", "openvino"), help="(default: llama.cpp openvino)")
    parser.add_argument("--count", type=int, default=4, help="prompts of each class (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96, help="(default: %(default)s)")
    parser.add_argument("--depth", type=int, default=4, help="draft tokens of the peers (default: %(default)s)")
    parser.add_argument("--time-budget", type=float, default=240.0, help="seconds (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    model = resolve_model(None)
    with LLM(max_context=CONTEXT) as llm:
        prompts, end_ids = drawn(llm, options.prompts, options.count, options.seed), llm.tokenizer.end_ids
    models = Models(model, None, usable_cores(), options.depth, CONTEXT, end_ids)
    missing = [name for name in options.peers if not is_installed(name)]
    peers = {name: open_peer(name, models) for name in ("outpace", *options.peers) if name not in missing}
    attempts, was_cut_short = measure(peers, prompts, options.max_tokens, options.time_budget)
    for peer in peers.values():
        peer.close()
    classes = by_class(attempts)
    for name, engines in classes.items():
        print(f"{name:16}outpace auto {engines['outpace']['tokens_per_second']:.0f}", end="")
        for engine, each in engines.items():
            if engine == "outpace":
                continue
            r, low = each["auto_over_it"], min(each["by_prompt"])
            interval = f" ({r['low']:.2f}-{r['high']:.2f})" if r.get("low") is not None else ""
            print(f"; {engine} {each['variant']} {each['tokens_per_second']:.0f}: "
                  f"{r['value']:.2f}{interval}, least of a prompt {low:.2f}", end="")  # fmt: skip
        print()
    print(f"not installed: {', '.join(missing) or 'none'}; {'cut short' if was_cut_short else 'complete'}")
    if options.json:
        facts = {name: getattr(options, name) for name in ("count", "seed", "max_tokens", "depth")}
        results = {"classes": classes, "rows": rows(attempts), "settings": facts, "was_cut_short": was_cut_short}
        write_json(options.json, {"provenance": provenance([model]), **results})


if __name__ == "__main__":
    main()

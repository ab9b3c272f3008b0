"""Where the time of a step goes: plain decoding, a head's drafts and `auto`, one request, with the embedded model.

    python -m benchmarks.step_parts --prompts question.jsonl [--temperature 0] [--count 6] [--json FILE]

First the native forward pass alone, by number of tokens and context, in random order; beside it the floor: the weights
of a step divided by the bandwidth of plain reads. Then whole steps of the engine, the settings in turns, divided into
their parts: means in microseconds over all steps that only decode, and tokens per second over plain decoding's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from benchmarks.report import provenance, write_json
from outpace import LLM, SamplingParams
from outpace.backends.native.runner import NativeRunner
from outpace.bench.settings import PLAIN, Setting, parse_setting
from outpace.bench.workloads import evenly
from outpace.core import Row, StepPlan

SIZES = (1, 2, 3, 4, 5, 6, 8)
CONTEXTS = (64, 800)
LONG = ("rag", "summarization")  # classes of Spec-Bench with prompts of some 700 tokens
PARTS = ("schedule", "policy", "lookup", "draft", "forward", "verify", "learning")  # of StepStats, in seconds


def forward_seconds(runner: NativeRunner, context: int, rounds: int) -> dict[int, float]:
    """Median seconds of a pass over 1, 2, ... tokens after `context` others."""
    rng = random.Random(context)
    chunk = runner.capacity.max_step_tokens
    for at in range(0, context, chunk):
        tokens = [rng.randrange(runner.vocab_size) for _ in range(min(chunk, context - at))]
        runner.forward(StepPlan([Row(0, at, tokens, 0)]))
    taken: dict[int, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for size in rng.sample(SIZES, len(SIZES)):
            plan = StepPlan([Row(0, context, [rng.randrange(runner.vocab_size) for _ in range(size)], size)])
            begin = perf_counter()
            runner.forward(plan)
            taken[size].append(perf_counter() - begin)
            runner.truncate(0, context)
    runner.free(0)
    return {size: statistics.median(taken[size]) for size in SIZES}


def step_parts(
    llm: LLM, prompts: Sequence[list[int]], settings: Sequence[Setting], params: SamplingParams
) -> dict[str, dict[str, float]]:
    """By setting: mean seconds of a step and of its parts, and tokens a step."""
    engine = llm.engine
    sums: dict[str, dict[str, float]] = {setting.name: defaultdict(float) for setting in settings}
    for i, prompt in enumerate(prompts):
        for setting in (*settings[i % len(settings) :], *settings[: i % len(settings)]):
            engine.submit(prompt, replace(params, speculation=setting.speculation))
            of_setting = sums[setting.name]
            while engine.has_requests:
                begin = perf_counter()
                engine.step()
                seconds, stats = perf_counter() - begin, engine.stats
                if stats.num_prefill_tokens or stats.num_finished:
                    continue
                of_setting["steps"] += 1
                of_setting["tokens"] += stats.num_emitted
                of_setting["step"] += seconds
                for part in PARTS:
                    of_setting[part] += getattr(stats, f"{part}_seconds")
            engine.forget()
    return {name: {part: total / each["steps"] for part, total in each.items()} for name, each in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--settings", nargs="+", default=("head:3", "auto"), help="(default: head:3 auto)")
    parser.add_argument("--count", type=int, default=6, help="prompts of each length (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=50, help="passes of each size (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    settings = [PLAIN, *map(parse_setting, options.settings)]
    records = [json.loads(line) for line in options.prompts.read_text(encoding="utf-8").splitlines()]
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, ignore_eos=True)
    with LLM(prefix_reuse=False, max_context=4096, cache_tokens=8192, max_sequences=8) as llm:
        runner = llm.engine._runner
        assert isinstance(runner, NativeRunner), "the parts of a step are those of the native backend"
        llm.engine.calibrate()
        num_bytes = runner.bytes_per_step
        floor = num_bytes / max(runner._lib.read_bandwidth(llm.config.threads, num_bytes) for _ in range(5))
        print(f"floor of a pass: {floor * 1e3:.2f} ms")
        passes = {context: forward_seconds(runner, context, options.rounds) for context in CONTEXTS}
        for context, by_size in passes.items():
            cells = (f"{size}: {taken * 1e3:.2f} ms ({taken / by_size[1]:.2f})" for size, taken in by_size.items())
            print(f"pass after {context}: " + "  ".join(cells))
        found = {}
        for length in ("short", "long"):
            texts = [each["turns"][0] for each in records if (each["category"] in LONG) == (length == "long")]
            chosen = evenly(texts, options.count)
            prompts = [llm.encode_chat([{"role": "user", "content": text}]) for text in chosen]
            found[length] = step_parts(llm, prompts, settings, params)
            plain = found[length][PLAIN.name]["step"]
            for name, each in found[length].items():
                ratio = each["tokens"] * plain / each["step"]
                parts = ", ".join(f"{part} {each[part] * 1e6:.0f}" for part in PARTS)
                whole = f"{each['step'] * 1e6:.0f} us, {each['tokens']:.2f} tokens, {ratio:.2f} of plain"
                print(f"{length:5} {name:7} {whole}: {parts}")
        if options.json:
            facts = {"floor_seconds": floor, "pass_seconds": passes, "temperature": options.temperature}
            write_json(options.json, {"provenance": provenance([Path(llm.config.model)]), "steps": found, **facts})


if __name__ == "__main__":
    main()

"""What drafts of the embedded head cost, over a plain step of its target: native backend, one request, greedy.

    python -m benchmarks.draft_cost --prompts question.jsonl [--depths 1 2 3] [--count 12] [--json FILE]

Every prompt is answered plainly and with drafts of each depth, in turns, by one engine. A draft's time is what the
engine waits for it, Python's part included; a plain step is a whole step of the engine. Each prompt gives one ratio,
that of its medians; printed are the median of these, in brackets the quartiles, and the largest.

The floor of a draft is what its first pass must read from memory, since the target's step has evicted it from the
caches. Later passes can read the head from a cache, and are counted as nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.report import provenance, write_json
from benchmarks.step_parts import LONG
from outpace import LLM, SamplingParams
from outpace.backends.native.head import NativeHead
from outpace.backends.native.runner import BANDWIDTH_BYTES, NativeRunner
from outpace.bench.settings import PLAIN, Setting, parse_setting
from outpace.bench.workloads import evenly


def answered(llm: LLM, prompt: list[int], setting: Setting, params: SamplingParams) -> tuple[float, float]:
    """The median seconds of a step that only decodes, and of the draft in it."""
    engine, steps = llm.engine, []
    engine.submit(prompt, replace(params, speculation=setting.speculation))
    while engine.has_requests:
        begin = perf_counter()
        engine.step()
        seconds = perf_counter() - begin
        if not engine.stats.num_prefill_tokens and not engine.stats.num_finished:
            steps.append((seconds, engine.stats.draft_seconds))
    engine.forget()
    return statistics.median(step for step, _ in steps), statistics.median(draft for _, draft in steps)


def ratios(
    llm: LLM, prompts: Sequence[list[int]], settings: Sequence[Setting], params: SamplingParams
) -> dict[str, list[tuple[float, float]]]:
    """By setting and prompt: the seconds of a draft, and of a plain step."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for i, prompt in enumerate(prompts):
        turn = [*settings[i % len(settings) :], *settings[: i % len(settings)]]
        medians = {setting.name: answered(llm, prompt, setting, params) for setting in turn}
        for name, (_, draft) in medians.items():
            found[name].append((draft, medians[PLAIN.name][0]))
    return found


def summary(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    each = [draft / plain for draft, plain in pairs]
    return {
        "plain_seconds": statistics.median(plain for _, plain in pairs),
        "draft_seconds": statistics.median(draft for draft, _ in pairs),
        "ratio": statistics.median(each),
        "quartiles": statistics.quantiles(each, n=4)[::2],
        "largest": max(each),
        "ratios": each,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--depths", type=int, nargs="+", default=(1, 2, 3), help="(default: 1 2 3)")
    parser.add_argument("--count", type=int, default=12, help="prompts of each length (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    settings = [PLAIN, *(parse_setting(f"head:{depth}") for depth in options.depths)]
    records = [json.loads(line) for line in options.prompts.read_text(encoding="utf-8").splitlines()]
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    with LLM(prefix_reuse=False, max_context=4096, cache_tokens=8192, max_sequences=8) as llm:
        runner = llm.engine._runner
        assert isinstance(runner, NativeRunner), "the costs are those of the native backend"
        head = runner.capabilities.head
        assert isinstance(head, NativeHead), "the embedded model has a head"
        llm.engine.calibrate()
        bandwidth = max(runner._lib.read_bandwidth(llm.config.threads, BANDWIDTH_BYTES) for _ in range(3))
        floor = head.size_bytes / bandwidth
        print(f"floor of a draft: {head.size_bytes / 1e6:.1f} MB at {bandwidth / 1e9:.0f} GB/s, {floor * 1e6:.0f} us")
        found: dict[str, dict[str, Any]] = {}
        for length in ("short", "long"):
            texts = [each["turns"][0] for each in records if (each["category"] in LONG) == (length == "long")]
            chosen = evenly(texts, options.count)
            prompts = [llm.encode_chat([{"role": "user", "content": text}]) for text in chosen]
            ratios(llm, prompts[:1], settings, params)  # the first runs touch new memory
            by_setting = ratios(llm, prompts, settings, params)
            found[length] = {s.name: summary(by_setting[s.name]) for s in settings if s is not PLAIN}
            for name, each in found[length].items():
                low, high = each["quartiles"]
                print(
                    f"{length:5} {name}: {each['draft_seconds'] * 1e6:.0f} us of {each['plain_seconds'] * 1e6:.0f} us, "
                    f"{each['ratio']:.3f} of a plain step ({low:.3f}-{high:.3f}, at most {each['largest']:.3f})"
                )
        if options.json:
            facts = {"head_bytes": head.size_bytes, "bandwidth": bandwidth, "max_tokens": options.max_tokens}
            write_json(options.json, {"provenance": provenance([Path(llm.config.model)]), "drafts": found, **facts})


if __name__ == "__main__":
    main()

"""A real target with a real draft: acceptance per position, and the honest speed ratio to plain decoding.

    python -m benchmarks.pair --model TARGET.gguf --draft DRAFT.gguf --prompts HumanEval.jsonl.gz [--depth K]

Every prompt is run plainly and with speculation, in changing order, in one process. Greedy output of both is compared;
where it differs the top-2 logit gap is shown (see benchmarks.equality for the audit over many prompts).
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path
from time import perf_counter

from tqdm import tqdm

from benchmarks.prompts import load_prompts
from benchmarks.report import provenance, spread, write_json
from outpace import LLM, SamplingParams, SpeculationParams
from outpace.core import CompletionOutput


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the target, a GGUF file")
    parser.add_argument("--draft", required=True, help="the draft, a GGUF file")
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench, HumanEval or JSON lines")
    parser.add_argument("--count", type=int, default=10, help="prompts (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=4, help="draft tokens a step (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96, help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="(default: %(default)s)")
    parser.add_argument("--backend", default="auto", help="what runs both (default: %(default)s)")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print the first N completions")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()

    prompts = load_prompts(options.prompts, options.count)
    modes = {
        "plain": SpeculationParams(mode="off"),
        "speculative": SpeculationParams(mode="on", max_depth=options.depth),
        "auto": SpeculationParams(mode="auto", max_depth=options.depth),
    }
    results: dict[str, list[CompletionOutput]] = {name: [] for name in modes}
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    room = {"prefix_reuse": False, "backend": options.backend}
    with LLM(options.model, draft=options.draft, speculation="on", **room) as llm:
        llm.engine.calibrate()
        for number, prompt in enumerate(tqdm(prompts, desc="prompts")):
            order = list(modes)
            random.shuffle(order)
            for name in order:
                params = SamplingParams(
                    temperature=options.temperature,
                    seed=number if options.temperature else None,
                    max_tokens=options.max_tokens,
                    speculation=modes[name],
                )
                begin = perf_counter()
                results[name].append(llm.generate(prompt, params, progress=False)[0].outputs[0])
                seconds[name].append(perf_counter() - begin)
        models = [Path(options.model), Path(options.draft)]

    for output in results["speculative"][: options.show]:
        print(f"--- {output.finish_reason}\n{output.text}")
    rates = {name: [len(o.token_ids) / s for o, s in zip(results[name], seconds[name], strict=True)] for name in modes}
    drafted, accepted = totals(results["speculative"])
    steps = sum(output.speculation.steps for output in results["speculative"])
    same = sum(a.token_ids == b.token_ids for a, b in zip(results["plain"], results["speculative"], strict=True))
    print(f"{len(prompts)} prompts, depth {options.depth}, temperature {options.temperature:g}")
    print(f"same tokens as plain: {same} of {len(prompts)} (rounding may differ; see benchmarks.equality)")
    print(f"accepted: {sum(accepted)} of {sum(drafted)} = {sum(accepted) / sum(drafted):.1%}; ", end="")
    print(f"mean accepted length {(sum(accepted) + steps) / steps:.2f}")
    print("acceptance per position:", " ".join(f"{a / d:.1%}" for a, d in zip(accepted, drafted, strict=True)))
    ratios = {}
    for name in ("speculative", "auto"):
        ratios[name] = [fast / plain for fast, plain in zip(rates[name], rates["plain"], strict=True)]
        print(
            f"tokens per second, {name} / plain: {statistics.median(ratios[name]):.3f} ({spread(ratios[name], '.3f')})"
        )
    if options.json:
        write_json(
            options.json,
            {
                "provenance": provenance(models),
                "prompts": len(prompts),
                "depth": options.depth,
                "temperature": options.temperature,
                "max_tokens": options.max_tokens,
                "same_tokens": same,
                "drafted_per_position": drafted,
                "accepted_per_position": accepted,
                "mean_accepted_length": (sum(accepted) + steps) / steps,
                "ratio_to_plain": {n: {"median": statistics.median(r), "all": r} for n, r in ratios.items()},
            },
        )


def totals(outputs: list[CompletionOutput]) -> tuple[list[int], list[int]]:
    """Drafted and accepted tokens per draft position, over all outputs."""
    depth = max(len(output.speculation.drafted_per_position) for output in outputs)
    drafted, accepted = [0] * depth, [0] * depth
    for output in outputs:
        for i, number in enumerate(output.speculation.drafted_per_position):
            drafted[i] += number
            accepted[i] += output.speculation.accepted_per_position[i]
    return drafted, accepted


if __name__ == "__main__":
    main()

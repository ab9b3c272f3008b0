"""Do two builds of the native library compute the same bits, and how fast is each?

    python -m benchmarks.builds OTHER_LIBRARY --prompts question.jsonl [--count N] [--max-tokens N] [--rounds N]

OTHER_LIBRARY is compared with the library in the source tree, for example one compiled by ziglang with one compiled by
g++. Both are loaded in one process. Each prompt is answered with both, greedy and sampled, speculation as it is by
default. Tokens are compared, and then the logits of the whole text, computed again in one pass and in steps of varied
sizes. Then steps of 1 to 16 tokens are timed in turns. The command fails if one bit differs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from benchmarks.prompts import load_prompts
from benchmarks.report import median_interval, provenance, write_json
from outpace import LLM, SamplingParams
from outpace.backends.base import Runner
from outpace.backends.curve import CURVE_SIZES, measure_curves
from outpace.backends.native import library
from outpace.core import Row, StepPlan

STEP_SIZES = (1, 2, 3, 4, 5, 8, 11, 16, 23, 32, 64)
CONTEXT = 1024


@dataclass
class Counts:
    prompts: int = 0
    tokens: int = 0
    logit_rows: int = 0
    different_answers: int = 0
    different_rows: int = 0


def load(model: str | None, path: Path, threads: int | None) -> LLM:
    """The model with the native library at `path`."""
    library.LIBRARY_PATH = path
    library.load_library.cache_clear()
    llm = LLM(model, backend="native", max_context=CONTEXT, cache_tokens=4 * CONTEXT, threads=threads)
    assert library.load_library().path == path
    return llm


def logits(runner: Runner, tokens: list[int], sizes: list[int]) -> list[bytes]:
    """The bits of each token's logits, computed in steps of these sizes."""
    found: list[bytes] = []
    seq = runner.capacity.max_sequences - 1
    for size in sizes:
        step = tokens[len(found) : len(found) + size]
        if step:
            found += [row.tobytes() for row in runner.forward(StepPlan([Row(seq, len(found), step, len(step))]))]
    runner.free(seq)
    return found


def compare(llms: list[LLM], prompts: list[str], max_tokens: int) -> Counts:
    counts, rng = Counts(), random.Random(0)
    for number, prompt in enumerate(tqdm(prompts, unit="prompt", dynamic_ncols=True)):
        tokens = llms[0].tokenizer.encode(llms[0].render_chat([{"role": "user", "content": prompt}]))
        if len(tokens) + max_tokens > CONTEXT:
            continue
        counts.prompts += 1
        for temperature in (0.0, 0.8):
            params = SamplingParams(temperature=temperature, seed=number, max_tokens=max_tokens)
            answers = [llm.generate([tokens], params, progress=False)[0].outputs[0].token_ids for llm in llms]
            counts.tokens += len(answers[0])
            counts.different_answers += answers[0] != answers[1]
        for llm in llms:
            llm.engine.scheduler.forget_kept()  # the runner's sequences are ours now
        text = [*tokens, *answers[0]]
        for sizes in ([256] * 4, rng.choices(STEP_SIZES, k=len(text))):
            rows = [logits(llm._target.runner, text, sizes) for llm in llms]
            counts.logit_rows += len(text)
            counts.different_rows += sum(a != b for a, b in zip(*rows, strict=True))
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, metavar="OTHER_LIBRARY")
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench, HumanEval or JSON lines")
    parser.add_argument("--model", help="a GGUF file (default: the embedded SmolLM2)")
    parser.add_argument("--count", type=int, default=60, help="prompts (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="of timed steps (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="(default: all usable cores)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()

    paths = [library.LIBRARY_PATH, options.other.resolve()]
    with ExitStack() as stack:
        llms = [stack.enter_context(load(options.model, path, options.threads)) for path in paths]
        counts = compare(llms, load_prompts(options.prompts, options.count), options.max_tokens)
        print(counts)
        runners = {name: llm._target.runner for name, llm in zip(("this", "other"), llms, strict=True)}
        seconds = measure_curves(runners, CURVE_SIZES, options.rounds)
        model = Path(llms[0].config.model)
    rows = []
    print(
        f"{'tokens in a step':>16} {'this, ms':>9} {'other, ms':>9} {'this / other':>13}   95% interval of the median"
    )
    for size in CURVE_SIZES:
        this, other = seconds["this"][size], seconds["other"][size]
        ratios = [a / b for a, b in zip(this, other, strict=True)]
        low, high = median_interval(ratios)
        row = [1e3 * statistics.median(this), 1e3 * statistics.median(other), statistics.median(ratios)]
        rows.append([size, *row])
        print(f"{size:16} {row[0]:9.2f} {row[1]:9.2f} {row[2]:13.3f}   {low:.3f} .. {high:.3f}")
    if options.json:
        settings = {name: str(value) for name, value in vars(options).items() if name != "json"}
        write_json(options.json, {"provenance": provenance([model]), "settings": settings,
                                  "counts": vars(counts), "step_ms": rows})  # fmt: skip
    return 1 if counts.different_answers or counts.different_rows or not counts.prompts else 0


if __name__ == "__main__":
    sys.exit(main())

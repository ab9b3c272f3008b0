"""`auto` and fixed drafts of the head beside plain decoding, for each class of Spec-Bench, with the embedded model.

    python -m benchmarks.spec_bench --prompts question.jsonl [--concurrency 1] [--temperature 0] [--json FILE]
    python -m benchmarks.spec_bench --model TARGET --draft HEAD --prompts HumanEval.jsonl.gz  # or another model

Every block of prompts runs with every setting, in changing order, in one process; no run reuses anything of an earlier
run. Figures are tokens per second of decoding over plain decoding's, all tokens over all time, with 95% intervals over
blocks; the last row is the geometric mean of the classes. Unseeded where the temperature is above 0.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.pair import elementwise_sum, ratio
from benchmarks.prompts import load_prompts
from benchmarks.report import provenance, write_json
from outpace import LLM, SamplingParams
from outpace.bench.loads import Closed
from outpace.bench.paired import interleaved
from outpace.bench.settings import PLAIN, Setting, parse_setting
from outpace.bench.targets import EngineTarget
from outpace.bench.trials import Job, Run
from outpace.bench.workloads import evenly

CLASSES = ("translation", "summarization", "qa", "math_reasoning", "rag")  # every other category is of MT-Bench
CONVERSATION = "conversation"


def load_classes(path: Path, count: int) -> dict[str, list[str]]:
    """`count` first turns of each class; a file without classes, such as HumanEval, is one."""
    if path.suffix == ".gz" or "category" not in json.loads(path.read_text(encoding="utf-8").partition("\n")[0]):
        return {path.name.partition(".")[0]: load_prompts(path, count)}
    found: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        category = record["category"]
        found[category if category in CLASSES else CONVERSATION].append(str(record["turns"][0]))
    return {name: evenly(found[name], count) for name in (CONVERSATION, *CLASSES)}


def summary(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """By setting: the ratio to plain decoding, tokens a step, and answers equal to plain decoding's."""
    plain, found = runs[PLAIN.name], {}
    for name, each in runs.items():
        counts = [trial.counts for run in each for trial in run.trials]
        steps, accepted = sum(c.steps for c in counts), sum(elementwise_sum([c.accepted_per_position for c in counts]))
        pairs = [(a, b) for x, y in zip(each, plain, strict=True) for a, b in zip(x.trials, y.trials, strict=True)]
        found[name] = {
            "decode_ratio": ratio(each, plain, "decode_tokens", "decode_seconds"),
            "tokens_per_step": (steps + accepted) / steps if steps else None,
            "same_as_plain": sum(a.token_ids == b.token_ids for a, b in pairs),
            "num_prompts": len(pairs),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench's question.jsonl, or other prompts")
    parser.add_argument("--settings", nargs="+", default=("auto", "head:3"), help="(default: auto head:3)")
    parser.add_argument("--blocks", type=int, default=6, help="of each class (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=1, help="requests at once (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--model", help="a model file or folder (default: the embedded one)")
    parser.add_argument("--draft", help="another head (default: the one that comes with the model)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    settings: list[Setting] = [PLAIN, *map(parse_setting, options.settings)]
    load = Closed(options.concurrency)
    classes: dict[str, dict[str, Any]] = {}
    llm_options: dict[str, Any] = {"prefix_reuse": False, "max_context": 4096, "cache_tokens": 4096 * load.concurrency}
    with LLM(options.model, options.draft, max_sequences=max(8, load.concurrency), **llm_options) as llm:
        target = EngineTarget(llm)
        params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
        for name, texts in load_classes(options.prompts, options.blocks * load.concurrency).items():
            jobs = [
                Job(i, name, llm.encode_chat([{"role": "user", "content": text}]), params)
                for i, text in enumerate(texts)
            ]
            runs: dict[str, list[Run]] = {setting.name: [] for setting in settings}
            for block in tqdm(range(options.blocks), desc=name, unit="block", leave=False, dynamic_ncols=True):
                part = jobs[block * load.concurrency : (block + 1) * load.concurrency]
                for setting, run in interleaved(target, part, settings, load, block):
                    runs[setting.name].append(run)
            classes[name] = summary(runs)
            print(f"{name:16}" + "".join(_cell(s.name, classes[name][s.name]) for s in settings[1:]), flush=True)
    names = [setting.name for setting in settings[1:]]
    means = {
        name: math.exp(sum(math.log(each[name]["decode_ratio"]["value"]) for each in classes.values()) / len(classes))
        for name in names
    }
    print(f"{'geometric mean':16}" + "".join(f"{name}: {mean:.2f}".rjust(44) for name, mean in means.items()))
    if options.json:
        facts = {"concurrency": load.concurrency, "temperature": options.temperature, "max_tokens": options.max_tokens}
        models = [Path(llm.config.model)]
        write_json(options.json, {"provenance": provenance(models), "classes": classes, "means": means, **facts})


def _cell(name: str, found: dict[str, Any]) -> str:
    r = found["decode_ratio"]
    same = f"{found['same_as_plain']}/{found['num_prompts']} same"
    interval = f" ({r['low']:.2f}-{r['high']:.2f})" if r.get("low") is not None else ""
    return f"{name}: {r['value']:.2f}{interval}, {found['tokens_per_step']:.2f} tokens a step, {same}".rjust(64)


if __name__ == "__main__":
    main()

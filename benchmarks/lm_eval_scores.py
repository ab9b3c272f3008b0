"""Does lm-eval give a served model the same scores with speculation on and off?

    outpace serve --port 8000 --speculation on          # then again with off
    lm_eval --model local-completions ... --output_path on --log_samples          # docs/server.md has the whole command
    python -m benchmarks.lm_eval_scores on off [--json FILE]

Reads the results and the samples that lm-eval wrote into the two folders. The command fails if a score differs in any
digit, or if the model answered a sample differently: a log-probability, or a generated text.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import provenance, write_json
from outpace.errors import UsageError
from outpace.models.resolve import resolve_model


def newest(folder: Path, pattern: str) -> Path:
    found = sorted(folder.rglob(pattern))  # a name ends with its date
    if not found:
        raise UsageError(f"{folder} has no {pattern}; run lm_eval with --output_path {folder} --log_samples")
    return found[-1]


def scores(folder: Path) -> dict[str, dict[str, float]]:
    """By task and metric, without standard errors."""
    results = json.loads(newest(folder, "results_*.json").read_text(encoding="utf-8"))["results"]
    found: dict[str, dict[str, float]] = {}
    for task, each in results.items():
        metrics = [name for name in each if name.endswith(",none") and "stderr" not in name]
        found[task] = {name.partition(",")[0]: each[name] for name in metrics}
    return found


def answers(folder: Path, task: str) -> list[Any]:
    """What the model answered to each sample, in their order."""
    lines = newest(folder, f"samples_{task}_*.jsonl").read_text(encoding="utf-8").splitlines()
    samples = sorted(map(json.loads, lines), key=lambda sample: int(sample["doc_id"]))
    return [sample["resps"] for sample in samples]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("on", type=Path, help="lm_eval's --output_path with speculation on")
    parser.add_argument("off", type=Path, help="the same with speculation off")
    parser.add_argument("--model", help="the GGUF file that was served (default: the embedded SmolLM2)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    by_mode = {name: scores(getattr(options, name)) for name in ("on", "off")}
    different = dict[str, int]()
    num_samples = dict[str, int]()
    for task, found in by_mode["off"].items():
        on, off = answers(options.on, task), answers(options.off, task)
        num_samples[task] = len(off)
        different[task] = sum(a != b for a, b in zip(on, off, strict=True))
        print(f"{task}: {found} off, {by_mode['on'].get(task)} on; {different[task]} of {len(off)} answers differ")
    if options.json:
        origin = provenance([resolve_model(options.model)])
        write_json(
            options.json, {"provenance": origin, "scores": by_mode, "samples": num_samples, "different": different}
        )
    return 1 if by_mode["on"] != by_mode["off"] or any(different.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

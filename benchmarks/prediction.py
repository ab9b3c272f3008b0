"""How much faster is a code edit if the client sends the old code as a prediction?

    python -m benchmarks.prediction [--model FILE] [--count 20] [--json FILE]

The edits are those of `edit_tasks.py`: another name, and lines that are inserted, deleted or replaced, made backwards
from the model's own answer; and a request that is made again with a change. The old code is in no prompt. Every request
runs with

    off     plain decoding
    auto    speculation as it is without a prediction
    old     auto, with the old code as the prediction
    other   auto, with the old code of another task as the prediction: what a wrong one costs

in changing order, in one process, and alone. All caches are emptied before every run. Without that, `suffix` would
have the old code from its store of earlier answers. Ratios are of decoding, all tokens over all time, with 95%
intervals over edits. `kept` is the share of the prediction's tokens that are in the new answer. The answers of all runs
must be equal on a backend that is exact to the bit, and the command fails if they are not.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.edit_tasks import KINDS, EditTask, edit_tasks, old_code
from benchmarks.report import provenance, write_json
from outpace import LLM, SamplingParams
from outpace.bench.loads import Closed
from outpace.bench.settings import AUTO, PLAIN
from outpace.bench.statistics import Estimate, ratio_of_rates
from outpace.bench.targets import EngineTarget
from outpace.bench.trials import Job, Run
from outpace.models.resolve import resolve_model

RUNS = ("off", "auto", "old", "other")


@dataclass
class Edit:
    """One edit and its runs."""

    number: int
    task: EditTask
    answer: str = ""  # to the first request
    old: str = ""
    runs: dict[str, Run] = field(default_factory=dict)

    @property
    def is_same(self) -> bool:
        """Whether all runs gave the same tokens."""
        return len({tuple(run.trials[0].token_ids) for run in self.runs.values()}) == 1

    def kept(self, name: str) -> float:
        counts = self.runs[name].trials[0].counts
        num_tokens = counts.accepted_prediction_tokens + counts.rejected_prediction_tokens
        return counts.accepted_prediction_tokens / num_tokens if num_tokens else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file (default: the embedded SmolLM2)")
    parser.add_argument("--draft", help="a GGUF file, for all runs")
    parser.add_argument("--count", type=int, default=20, help="edits (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="(default: %(default)s)")
    parser.add_argument("--backend", default="auto", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()

    edits = [Edit(number, task) for number, task in enumerate(edit_tasks(options.count))]
    with LLM(options.model, draft=options.draft, prefix_reuse=False, backend=options.backend) as llm:
        is_exact = llm.engine._runner.capabilities.exact_to_the_bit
        measure(llm, edits, SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens))
    done = [edit for edit in edits if len(edit.runs) == len(RUNS)]
    if not done:
        return 1
    results = report(done)
    if options.json:
        settings = {name: getattr(options, name) for name in ("count", "max_tokens", "temperature", "backend")}
        models = [resolve_model(options.model)] + ([Path(options.draft)] if options.draft else [])
        write_json(options.json, {"provenance": provenance(models), "settings": settings, **results})
    return 1 if is_exact and not all(edit.is_same for edit in done) else 0


def measure(llm: LLM, edits: Sequence[Edit], params: SamplingParams) -> None:
    """Answer all tasks; then make every edit in four ways. Ctrl-C keeps the edits that are complete."""
    target, rng = EngineTarget(llm), random.Random(0)

    def run(edit: Edit, text: str, name: str, prediction: str | None = None) -> Run:
        tokens = llm.encode_chat([{"role": "user", "content": text}])
        job = Job(edit.number, edit.task.kind, tokens, replace(params, seed=edit.number, prediction=prediction))
        return target.run([job], PLAIN if name == "off" else AUTO, Closed(1))

    try:
        llm.engine.calibrate()
        for edit in tqdm(edits, unit="task", dynamic_ncols=True):
            edit.answer = run(edit, edit.task.first, "auto").trials[0].text
        for edit, other in zip(edits, [*edits[1:], *edits[:1]], strict=True):
            edit.old = old_code(edit.task.kind, edit.answer, other.answer)
        for edit, other in zip(tqdm(edits, unit="edit", dynamic_ncols=True), [*edits[1:], *edits[:1]], strict=True):
            predictions = {"old": edit.old, "other": other.old}
            edit.runs = {
                name: run(edit, edit.task.second, name, predictions.get(name)) for name in rng.sample(RUNS, len(RUNS))
            }
    except KeyboardInterrupt:
        print("interrupted; the edits so far are reported", file=sys.stderr)


def report(edits: Sequence[Edit]) -> dict[str, Any]:
    print(f"\n{len(edits)} edits; the same tokens in every run: {sum(edit.is_same for edit in edits)}")
    print(
        f"{'edit':12}{'number':>7}{'tokens':>8}{'kept':>7}{'old/auto':>22}{'old/off':>9}{'auto/off':>9}{'other/auto':>22}"
    )
    groups = {name: [edit for edit in edits if edit.task.kind == name] for name in KINDS} | {"all": list(edits)}
    rows = {name: row(group) for name, group in groups.items() if group}
    for name, each in rows.items():
        ratios = each["ratios"]
        values = (spelled(ratios[key]) for key in ("old/auto", "old/off", "auto/off", "other/auto"))
        old, old_off, auto_off, other = values
        kept = f"{each['kept']:.0%}"
        print(
            f"{name:12}{each['edits']:7}{each['tokens']:8.0f}{kept:>7}{old:>22}{old_off[:5]:>9}{auto_off[:5]:>9}{other:>22}"
        )
    return {"kinds": KINDS, "rows": rows, "edits": [record(edit) for edit in edits]}


def row(edits: Sequence[Edit]) -> dict[str, Any]:
    pairs = (("old", "auto"), ("old", "off"), ("auto", "off"), ("other", "auto"))
    return {
        "edits": len(edits),
        "tokens": statistics.mean(edit.runs["off"].num_tokens for edit in edits),
        "kept": statistics.mean(edit.kept("old") for edit in edits),
        "ratios": {f"{name}/{base}": ratio(edits, name, base).as_dict() for name, base in pairs},
        "tokens_per_step": {name: tokens_per_step(edits, name) for name in RUNS},
    }


def ratio(edits: Sequence[Edit], name: str, base: str) -> Estimate:
    """The speed of decoding, over that of another way."""
    columns = [
        [getattr(edit.runs[each], what) for edit in edits]
        for each in (name, base)
        for what in ("decode_tokens", "decode_seconds")
    ]
    return ratio_of_rates(*columns)


def tokens_per_step(edits: Sequence[Edit], name: str) -> float:
    counts = [edit.runs[name].trials[0].counts for edit in edits]
    steps = sum(each.steps for each in counts)
    return (sum(each.num_accepted for each in counts) + steps) / steps if steps else 0.0


def spelled(estimate: dict[str, Any]) -> str:
    if estimate.get("low") is None:
        return f"{estimate['value']:.3f}"
    return f"{estimate['value']:.3f} ({estimate['low']:.2f}..{estimate['high']:.2f})"


def record(edit: Edit) -> dict[str, Any]:
    return {
        "kind": edit.task.kind,
        "request": edit.task.second,
        "old": edit.old,
        "new": edit.runs["off"].trials[0].text,
        "kept": edit.kept("old"),
        "is_same": edit.is_same,
        "decode_seconds": {name: run.decode_seconds for name, run in edit.runs.items()},
        "seconds": {name: run.seconds for name, run in edit.runs.items()},
        "tokens": edit.runs["off"].num_tokens,
    }


if __name__ == "__main__":
    sys.exit(main())

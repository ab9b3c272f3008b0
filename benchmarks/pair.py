"""A real target with a real draft: acceptance per position, and the speed ratio to plain decoding.

    python -m benchmarks.pair --model TARGET.gguf --draft DRAFT.gguf --prompts HumanEval.jsonl.gz [--settings ...]

Every prompt runs with plain decoding, with `auto`, and with every fixed setting, in changing order, in one process. No
run reuses anything of an earlier run. With --rounds, the fastest run of each prompt and setting counts: other programs
only make a run slower. `total` is tokens per second from submission to the last token; `decode` leaves out prefill.
Both are ratios to plain decoding, all tokens over all time, with 95% intervals over prompts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.prompts import load_prompts
from benchmarks.report import provenance, write_json
from outpace import LLM, SamplingParams
from outpace.bench.loads import Closed
from outpace.bench.paired import interleaved
from outpace.bench.settings import AUTO, PLAIN, Setting, parse_setting
from outpace.bench.statistics import ratio_of_rates
from outpace.bench.targets import EngineTarget
from outpace.bench.trials import Job, Run

DEFAULT_SETTINGS = ("draft:2", "draft:4", "draft:8", "suffix:4", "ngram:4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the target, a GGUF file")
    parser.add_argument("--draft", required=True, help="the draft, a GGUF file")
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench, HumanEval or JSON lines")
    parser.add_argument("--count", type=int, default=16, help="prompts (default: %(default)s)")
    parser.add_argument("--settings", nargs="+", default=DEFAULT_SETTINGS, metavar="METHOD:DEPTH",
                        help=f"fixed settings (default: {' '.join(DEFAULT_SETTINGS)})")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=1, help="of every run; the fastest counts (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96, help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="(default: %(default)s)")
    parser.add_argument("--chat", action="store_true", help="prompts are messages, in the target's chat template")
    parser.add_argument("--backend", default="auto", help="of both models (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()

    texts = load_prompts(options.prompts, options.count)
    settings = [PLAIN, AUTO, *map(parse_setting, options.settings)]
    runs: dict[str, list[Run]] = {setting.name: [] for setting in settings}
    llm_options: dict[str, Any] = {"prefix_reuse": False, "backend": options.backend, "max_context": 2048}
    with LLM(options.model, draft=options.draft, **llm_options) as llm:
        target = EngineTarget(llm)
        jobs = [
            Job(number, "prompt", tokens_of(llm, text, options.chat), SamplingParams(
                temperature=options.temperature, seed=number, max_tokens=options.max_tokens))
            for number, text in enumerate(texts)
        ]  # fmt: skip
        target.warm_up(jobs[0], settings)
        try:
            for number, job in enumerate(tqdm(jobs, unit="prompt", dynamic_ncols=True)):
                for name, run in fastest(target, job, settings, options.rounds, number).items():
                    runs[name].append(run)
        except KeyboardInterrupt:
            if not runs[PLAIN.name]:
                raise
            print("interrupted; whole prompts count", file=sys.stderr)
    num_prompts = len(runs[PLAIN.name])
    rows = {name: row(each, runs[PLAIN.name]) for name, each in runs.items()}
    print(f"{num_prompts} prompts, temperature {options.temperature:g}, at most {options.max_tokens} tokens")
    print_rows(rows)
    if options.json:
        found = {"prompts": num_prompts, "temperature": options.temperature, "max_tokens": options.max_tokens}
        found |= {"chat": options.chat, "rounds": options.rounds}
        models = [Path(options.model), Path(options.draft)]
        write_json(options.json, {"provenance": provenance(models), "settings": rows, **found})


def fastest(target: EngineTarget, job: Job, settings: Sequence[Setting], rounds: int, seed: int) -> dict[str, Run]:
    """The fastest run of each setting; the tokens are the same in each."""
    best = dict[str, Run]()
    for turn in range(rounds):
        for setting, run in interleaved(target, [job], settings, Closed(1), seed + turn):
            known = best.get(setting.name)
            if known is None or run.decode_seconds < known.decode_seconds:
                best[setting.name] = run
    return best


def tokens_of(llm: LLM, text: str, is_message: bool) -> list[int]:
    return llm.encode_chat([{"role": "user", "content": text}]) if is_message else llm.tokenizer.encode(text)


def row(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    counts = [run.trials[0].counts for run in runs]
    drafted = elementwise_sum([each.drafted_per_position for each in counts])
    accepted = elementwise_sum([each.accepted_per_position for each in counts])
    steps = sum(each.steps for each in counts)
    return {
        "tokens_per_second": sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs),
        "total_ratio": ratio(runs, plain, "num_tokens", "seconds"),
        "decode_ratio": ratio(runs, plain, "decode_tokens", "decode_seconds"),
        "drafted_per_position": drafted,
        "accepted_per_position": accepted,
        "tokens_per_step": (sum(accepted) + steps) / steps if steps else None,
        "same_as_plain": sum(a.trials[0].token_ids == b.trials[0].token_ids for a, b in zip(runs, plain, strict=True)),
        "num_prompts": len(runs),
    }


def elementwise_sum(lists: Sequence[Sequence[int]]) -> list[int]:
    return [sum(each) for each in zip_longest(*lists, fillvalue=0)]


def ratio(runs: Sequence[Run], plain: Sequence[Run], amount: str, seconds: str) -> dict[str, Any]:
    return ratio_of_rates(
        *([getattr(run, what) for run in each] for each in (runs, plain) for what in (amount, seconds))
    ).as_dict()


def print_rows(rows: dict[str, dict[str, Any]]) -> None:
    print(f"{'setting':10}{'tok/s':>7}{'decode/plain':>24}{'total/plain':>24}{'accepted':>10}  by position; as plain")
    for name, each in rows.items():
        drafted, accepted = each["drafted_per_position"], each["accepted_per_position"]
        share = f"{sum(accepted) / sum(drafted):.1%}" if sum(drafted) else "-"
        positions = " ".join(f"{a / d:.0%}" for a, d in zip(accepted, drafted, strict=True) if d)
        ratios = "".join(
            f"{r['value']:.3f} ({_bound(r['low'])}..{_bound(r['high'])})".rjust(24)
            for r in (each["decode_ratio"], each["total_ratio"])
        )
        same = f"{each['same_as_plain']} of {each['num_prompts']}"
        print(f"{name:10}{each['tokens_per_second']:7.1f}{ratios}{share:>10}  {positions}; {same}")


def _bound(value: float | None) -> str:
    """A single prompt has no interval."""
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()

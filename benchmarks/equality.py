"""Does speculation change the output? Compares every proposer and depth, and `auto`, with plain decoding.

    python -m benchmarks.equality --prompts question.jsonl [--model FILE] [--draft FILE] [--temperature 0.8]

At temperature 0, decoding is greedy. Above 0, every prompt has a fixed seed. The reference decodes each prompt alone,
without speculation, one token per step. llama.cpp rounds differently when several tokens or sequences share a pass, and
its 8-bit activations amplify the difference. So two tokens with almost equal probability can swap, with or without
speculation (the rows `none` show how often without). Each difference is listed with

    gap     log-probability of the reference's token minus that of the other token (plus sampling noise, if sampled)
    shift   difference of the log-odds of the two tokens between the two runs, in the same context

A shift counts as rounding if it is at most the largest shift that speculation did not cause: at positions where both
runs agree (between the best two tokens), or between two plain runs. A larger shift is a bug, and the command fails.

The method `prediction` and `auto` get a prediction: the reference's answer without every seventh word, so that drafts
are right in places only.

Without --draft, the first layers of the model are the draft (written to a temporary file); with the method `head`, the
model's own head is.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from benchmarks.gguf_edit import shallow_draft
from benchmarks.prompts import load_prompts
from benchmarks.report import provenance, write_json
from outpace import LLM, SamplingParams, SpeculationParams
from outpace.bench.workloads import evenly
from outpace.config import Method
from outpace.core import CompletionOutput, TokenLogprob
from outpace.decoding.randomness import Purpose, gumbels, key
from outpace.models.resolve import resolve_model

NUM_TOP = 100
Numbered = tuple[int, list[int]]
CellMethod = Literal[Method, "auto"]
METHODS: tuple[CellMethod, ...] = ("none", "ngram", "suffix", "prediction", "draft", "head", "auto")


@dataclass
class Difference:
    prompt: int
    position: int
    plain_token: int
    other_token: int
    gap: float
    shift: float


@dataclass
class Cell:
    """Results of one method, depth and batch size over all prompts."""

    method: CellMethod
    depth: int
    batch: int
    compared: int = 0
    identical: int = 0
    unaudited: int = 0  # differences where one run's token is not among the top tokens of the other
    num_drafted: int = 0
    num_accepted: int = 0
    differences: list[Difference] = field(default_factory=list)
    shifts: list[float] = field(default_factory=list)  # where both runs agree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench, HumanEval or JSON lines")
    parser.add_argument("--model", help="a GGUF file (default: the embedded SmolLM2)")
    parser.add_argument("--draft", help="a GGUF file (default: the model's own first layers)")
    parser.add_argument("--draft-layers", type=int, default=27, help="if no --draft (default: %(default)s)")
    parser.add_argument("--count", type=int, default=60, help="prompts (default: %(default)s)")
    parser.add_argument("--max-prompt-tokens", type=int, metavar="N", help="skip longer prompts")
    parser.add_argument("--max-tokens", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="(default: %(default)s)")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 4, 8], help="(default: 1 4 8)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="(default: 1 8)")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=[method for method in METHODS if method != "head"]
    )
    parser.add_argument("--backend", default="llamacpp", help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, help="(default: all usable cores)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()

    model = resolve_model(options.model)
    prompts = load_prompts(options.prompts, None if options.max_prompt_tokens else options.count)
    with tempfile.TemporaryDirectory() as folder:
        draft: Path | None = Path(options.draft) if options.draft else None
        if draft is None and "head" not in options.methods:
            draft = shallow_draft(model, Path(folder) / "shallow.gguf", options.draft_layers)
        cells = run(options, model, draft, prompts)
    bound = rounding_bound(cells)
    is_clean = report(cells, bound)
    if options.json:
        settings = {k: v for k, v in vars(options).items() if k not in ("json", "prompts", "model", "draft")}
        rows = [{k: v for k, v in asdict(cell).items() if k != "shifts"} for cell in cells]
        results = {"provenance": provenance([model]), "settings": settings, "rounding_bound": bound, "cells": rows}
        write_json(options.json, results)
    return 0 if is_clean else 1


def run(options: argparse.Namespace, model: Path, draft: Path | None, prompts: list[str]) -> list[Cell]:
    """Run all cells group by group. Each prompt is prefilled once; all its runs start from the same cached prefix."""
    cells = [Cell("none", 0, batch) for batch in options.batches] if "none" in options.methods else []
    cells += [Cell(method, depth, batch) for method in options.methods if method not in ("none", "auto")
              for depth in options.depths for batch in options.batches]  # fmt: skip
    cells += (
        [Cell("auto", max(options.depths), batch) for batch in options.batches] if "auto" in options.methods else []
    )
    llm_options = {"cache_tokens": 16384, "threads": options.threads, "backend": options.backend}
    with LLM(str(model), draft=str(draft) if draft else None, speculation="on", **llm_options) as llm:
        tokens = [_chat_tokens(llm, prompt) for prompt in prompts]
        if options.max_prompt_tokens:
            tokens = evenly([each for each in tokens if len(each) <= options.max_prompt_tokens], options.count)
        encoded = list(enumerate(tokens))
        group_size = max(options.batches)
        num_runs = len(encoded) * (1 + len(cells))
        # Ctrl-C keeps what was measured: all complete groups, and the finished cells of the current group.
        with tqdm(total=num_runs, unit="prompt", dynamic_ncols=True) as bar, suppress(KeyboardInterrupt):
            for begin in range(0, len(encoded), group_size):
                group = encoded[begin : begin + group_size]
                reference = generate(llm, group, Cell("none", 0, 1), options, bar)
                for cell in cells:
                    others = generate(llm, group, cell, options, bar, [_edited(each.text) for each in reference])
                    compare(cell, reference, others, group, options.temperature)
    return cells


def _chat_tokens(llm: LLM, prompt: str) -> list[int]:
    if llm.tokenizer.chat_template is None:
        return llm.tokenizer.encode(prompt)
    return llm.tokenizer.encode(llm.render_chat([{"role": "user", "content": prompt}]))


def generate(
    llm: LLM,
    prompts: list[Numbered],
    cell: Cell,
    options: argparse.Namespace,
    bar: tqdm[Any],
    predictions: Sequence[str] = (),
) -> list[CompletionOutput]:
    speculation = speculation_of(cell)
    is_predicted = cell.method in ("prediction", "auto")
    outputs = []
    for begin in range(0, len(prompts), cell.batch):
        batch = prompts[begin : begin + cell.batch]
        params = [
            SamplingParams(
                temperature=options.temperature,
                seed=number if options.temperature else None,
                max_tokens=options.max_tokens,
                logprobs=NUM_TOP,
                prediction=predictions[begin + i] if is_predicted else None,
                speculation=speculation,
            )
            for i, (number, _) in enumerate(batch)
        ]
        results = llm.generate([tokens for _, tokens in batch], params, progress=False)
        outputs += [result.outputs[0] for result in results]
        bar.update(len(batch))
    return outputs


def _edited(text: str) -> str:
    """The text without every seventh word."""
    return " ".join([word for i, word in enumerate(text.split(" "), 1) if i % 7])


def speculation_of(cell: Cell) -> SpeculationParams:
    if cell.method == "auto":
        return SpeculationParams(mode="auto", max_depth=cell.depth)
    return SpeculationParams(mode="off" if cell.method == "none" else "on", method=cell.method, max_depth=cell.depth)


def compare(
    cell: Cell,
    reference: list[CompletionOutput],
    others: list[CompletionOutput],
    prompts: list[Numbered],
    temperature: float,
) -> None:
    for (number, prompt), plain, other in zip(prompts, reference, others, strict=True):
        assert plain.logprobs is not None and other.logprobs is not None
        cell.num_drafted += other.speculation.num_drafted
        cell.num_accepted += other.speculation.num_accepted
        cell.compared += 1
        cell.identical += plain.token_ids == other.token_ids
        for i, (ours, theirs) in enumerate(zip(plain.logprobs, other.logprobs, strict=False)):
            a, b = ours.token_id, theirs.token_id
            if a == b:
                second = next(token for token, _ in ours.top if token != a)
                if is_reported(theirs, second):
                    cell.shifts.append(abs(log_odds(ours, a, second) - log_odds(theirs, a, second)))
                continue
            if not (is_reported(ours, b) and is_reported(theirs, a)):
                cell.unaudited += 1
                break
            gap = log_odds(ours, a, b) / (temperature or 1.0)
            if temperature:
                noise = gumbels(key(number, Purpose.TOKEN, len(prompt) + i), np.array([a, b]))
                gap += float(noise[0] - noise[1])
            shift = abs(log_odds(ours, a, b) - log_odds(theirs, a, b))
            cell.differences.append(Difference(number, i, a, b, gap, shift))
            break


def is_reported(answer: TokenLogprob, token: int) -> bool:
    return token == answer.token_id or any(token == other for other, _ in answer.top)


def log_odds(answer: TokenLogprob, a: int, b: int) -> float:
    """log p(a) - log p(b); infinite if one of them was not reported."""
    known = {**dict(answer.top), answer.token_id: answer.logprob}
    return known[a] - known[b] if a in known and b in known else math.inf


def rounding_bound(cells: list[Cell]) -> float:
    """The largest shift that speculation did not cause: positions where both runs agree, and plain runs."""
    agreeing = [shift for cell in cells for shift in cell.shifts]
    plain = [d.shift for cell in cells if cell.method == "none" for d in cell.differences]
    return max([*agreeing, *plain], default=0.0)


def report(cells: list[Cell], bound: float) -> bool:
    print(f"\n{'method':12}{'depth':>6}{'batch':>6}{'identical':>12}{'accepted':>10}{'max gap':>10}{'max shift':>11}")
    for cell in cells:
        accepted = f"{cell.num_accepted / cell.num_drafted:.0%}" if cell.num_drafted else "-"
        gap = max((d.gap for d in cell.differences), default=0.0)
        shift = max((d.shift for d in cell.differences), default=0.0)
        same = f"{cell.identical} / {cell.compared}"
        print(f"{cell.method:12}{cell.depth:6}{cell.batch:6}{same:>12}{accepted:>10}{gap:10.4f}{shift:11.4f}")
    shifts = np.array([shift for cell in cells for shift in cell.shifts] or [0.0])
    differences = [(cell, d) for cell in cells for d in cell.differences]
    print(f"\nrounding over {shifts.size} positions where the runs agree: exactly 0 at {np.mean(shifts == 0):.0%}, "
          f"99% below {np.quantile(shifts, 0.99):.4f}; bound {bound:.4f}")  # fmt: skip
    for cell, d in differences:
        flag = "" if d.shift <= bound else "   NOT ROUNDING"
        print(f"  {cell.method} depth {cell.depth} batch {cell.batch}: prompt {d.prompt}, output token {d.position}: "
              f"{d.plain_token} became {d.other_token}, gap {d.gap:.4f}, shift {d.shift:.4f}{flag}")  # fmt: skip
    too_large = sum(d.shift > bound for _, d in differences)
    num_runs = sum(cell.compared for cell in cells)
    unaudited = sum(cell.unaudited for cell in cells)
    print(f"{len(differences) + unaudited} differences in {num_runs} runs, {too_large} larger than rounding, "
          f"{unaudited} unknown: a token was not among the top {NUM_TOP}")  # fmt: skip
    return too_large == 0


if __name__ == "__main__":
    sys.exit(main())

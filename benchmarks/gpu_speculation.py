"""Speculation on a GPU with real acceptance and real cost: SmolLM2 and its draft head, padded to an 8B and its head.

    python -m benchmarks.gpu_speculation prepare MODEL.gguf QUESTIONS.jsonl TOKENS.json
    python -m benchmarks.gpu_speculation run MODEL.gguf TOKENS.json OUT

`prepare` needs the tokenizer (llama.cpp) and no GPU; `run` needs a GPU and no tokenizer. The outputs and the drafts are
those of SmolLM2 and its head (see `gpu_padding.py`; `run` first compares both with the unpadded ones). The head gets
the sizes of EAGLE-3's for Llama 3 8B: the model's width, one of its layers, 32,000 tokens that it can draft.

A block runs all settings on the same prompts; each block has other prompts. `x` is a setting's tokens per second over
those of plain decoding in the same block, as median (min-max) over blocks. Text and JSON are written after every block.

With `--draft self:KIND` the padded model's own rounded copy drafts, not the head; settings are then such as `draft:2`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import outpace
from benchmarks.prompts import load_prompts

LONGEST_PROMPT = 1024
CONTEXT = 1408
STEP_TOKENS = 4096
CONCURRENCY = (1, 8, 32, 128)
EMBEDDED_HEAD = Path(outpace.__file__).parent / "models" / "heads" / "smollm2-135m.gguf"


def prepare(model: str, questions: Path, out: Path) -> None:
    """Write prompts as token ids, in an order that mixes all kinds of questions."""
    from outpace import LLM

    with LLM(model, speculation="off") as llm:  # with the whole context: longer prompts are left out below
        encoded = [llm.encode_chat([{"role": "user", "content": text}]) for text in load_prompts(questions)]
    fitting = [tokens for tokens in encoded if len(tokens) <= LONGEST_PROMPT]
    stride = next(n for n in (97, 101, 103) if len(fitting) % n)  # coprime, so every prompt comes once
    kept = [fitting[i * stride % len(fitting)] for i in range(len(fitting))]
    out.write_text(json.dumps({"prompts": kept, "source": questions.name}) + "\n")
    print(f"{len(kept)} prompts of {len(encoded)}, {statistics.mean(map(len, kept)):.0f} tokens on average")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    preparing, running = commands.add_parser("prepare"), commands.add_parser("run")
    for each in (preparing, running):
        each.add_argument("model", type=Path, help="SmolLM2 as a GGUF file")
    preparing.add_argument("questions", type=Path, help="Spec-Bench's question.jsonl")
    preparing.add_argument("out", type=Path)
    running.add_argument("tokens", type=Path, help="the file that `prepare` wrote")
    running.add_argument("out", type=Path, help="folder for text and JSON")
    running.add_argument("--head", type=Path, default=EMBEDDED_HEAD, metavar="GGUF",
                         help="the model's draft head (default: the one that comes with Outpace)")  # fmt: skip
    running.add_argument("--draft", metavar="self:KIND", help="int4, int4-128, fp8 or int8 (default: the head)")
    running.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCY))
    running.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    running.add_argument("--settings", nargs="+", metavar="SETTING", help="plain, auto and depths such as head:3")
    running.add_argument("--blocks", type=int, default=3)
    running.add_argument("--new-tokens", type=int, default=96, help="mean of a request (default: %(default)s)")
    running.add_argument("--seconds", type=float, default=420, help="start no block after this (default: %(default)s)")
    running.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    running.add_argument("--traces", type=Path, metavar="FILE",
                         help="also write the time and reason of each step of auto here, as JSON lines")  # fmt: skip
    running.add_argument("--commit", help="commit of this code, for a copy without git history")
    options = parser.parse_args(arguments)
    if options.command == "prepare":
        prepare(str(options.model), options.questions, options.out)
        return 0
    return measure(options)


def measure(options: argparse.Namespace) -> int:
    # Imported here, because `prepare` needs no torch.
    from benchmarks.gpu_experiment import SETTINGS, Experiment, Report
    from benchmarks.gpu_padded_model import DRAFT_VOCABULARY, PaddedModel
    from outpace.bench.provenance import provenance

    prepared = json.loads(options.tokens.read_text())
    figures: dict[str, Any] = provenance(sys.argv, [options.model, options.head])
    figures |= {"prompts": prepared["source"], "new_tokens": options.new_tokens}
    figures["commit"] = options.commit or figures["commit"]
    report = Report(options.out, figures)
    begin, most = time.perf_counter(), max(options.concurrency)
    models = PaddedModel.build(options.model, options.head, options.device, most, CONTEXT, STEP_TOKENS)
    if options.draft is not None:
        models = models.with_self_draft(options.draft.removeprefix("self:"))
    figures |= {"parameters": models.sizes, "dtype": str(models.dtype), "draft_vocabulary": DRAFT_VOCABULARY}
    experiment = Experiment(
        models, prepared["prompts"], report, options.new_tokens, tuple(options.settings or SETTINGS), options.traces
    )  # fmt: skip
    for key in ("command", "commit", "python", "torch", "gpu"):
        report.say(f"{key}: {figures.get(key)}")
    report.say(
        f"parameters: target {models.sizes['target']:,}, head {models.sizes['head']:,}; the head can draft "
        f"{DRAFT_VOCABULARY:,} tokens; {models.dtype}; built in {time.perf_counter() - begin:.0f} s"
    )
    experiment.calibrate(most)
    if models.pair.draft is None:
        experiment.check_padding()
    report.save()
    for block in range(options.blocks):
        for concurrency in options.concurrency:
            for temperature in options.temperature:
                experiment.attempt(concurrency, temperature, block, options.seconds)
    experiment.summarise()
    return 0


if __name__ == "__main__":
    sys.exit(main())

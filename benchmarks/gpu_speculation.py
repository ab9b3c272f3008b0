"""Speculation on a GPU with real acceptance and real cost: SmolLM2 and its draft head, padded to an 8B and its head.

    python -m benchmarks.gpu_speculation prepare MODEL.gguf QUESTIONS.jsonl TOKENS.json
    python -m benchmarks.gpu_speculation run MODEL.gguf TOKENS.json OUT

`prepare` needs the tokenizer (llama.cpp) and no GPU; `run` needs a GPU and no tokenizer. The outputs and the drafts are
those of SmolLM2 and its head (see `gpu_padding.py`; `run` first compares both with the unpadded ones). The head gets
the sizes of EAGLE-3's for Llama 3 8B: the model's width, one of its layers, 32,000 tokens that it can draft.

A block runs all settings on the same prompts; each block has other prompts. `x` is a setting's tokens per second over
those of plain decoding in the same block, as median (min-max) over blocks. Text and JSON are written after every block.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import outpace
from benchmarks.prompts import load_prompts

LONGEST_PROMPT = 1024
CONTEXT = 1408
STEP_TOKENS = 4096
WARM_UP_TOKENS = 16
ALONE = 4  # prompts of a block at concurrency 1
COMPARED_PROMPTS, COMPARED_DEPTH = 12, 4  # of the logits and drafts that are compared with the small ones
CONCURRENCY = (1, 8, 32, 128)
SETTINGS = ("plain", "head:2", "head:3", "head:5", "head:7", "auto")
# Other depths that `auto` may choose. Their graphs are captured before the measurement, as for fixed settings.
PREPARED = ("head:1", "head:4", "head:6", "head:8")
MAX_PREPARED = 32  # concurrency up to which PREPARED is captured
# Required speedups of `auto` over plain decoding, by concurrency and temperature.
REQUIRED = {
    (1, 0.0): 1.9, (8, 0.0): 1.6, (32, 0.0): 1.2, (128, 0.0): 0.98,
    (1, 1.0): 1.3, (8, 1.0): 1.15, (32, 1.0): 0.98, (128, 1.0): 0.98,
}  # fmt: skip
EMBEDDED_HEAD = Path(outpace.__file__).parent / "models" / "heads" / "smollm2-135m.gguf"


def prepare(model: str, questions: Path, out: Path) -> None:
    """Write prompts as token ids, in an order that mixes all kinds of questions."""
    from outpace import LLM

    with LLM(model, max_context=CONTEXT, speculation="off") as llm:
        encoded = [llm.encode_chat([{"role": "user", "content": text}]) for text in load_prompts(questions)]
    fitting = [tokens for tokens in encoded if len(tokens) <= LONGEST_PROMPT]
    stride = next(n for n in (97, 101, 103) if len(fitting) % n)  # coprime, so every prompt comes once
    kept = [fitting[i * stride % len(fitting)] for i in range(len(fitting))]
    out.write_text(json.dumps({"prompts": kept, "source": questions.name}) + "\n")
    print(f"{len(kept)} prompts of {len(encoded)}, {statistics.mean(map(len, kept)):.0f} tokens on average")


class Report:
    """Collects lines and figures, and writes them to disk."""

    def __init__(self, folder: Path, figures: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.figures = figures
        self._lines: list[str] = []

    def say(self, line: str, *, keep: bool = True) -> None:
        print(line, flush=True)
        if keep:
            self._lines.append(line)

    def save(self) -> None:
        (self._folder / "gpu_speculation.json").write_text(json.dumps(self.figures, indent=1) + "\n")
        (self._folder / "gpu_speculation.txt").write_text("\n".join(self._lines) + "\n")


class Experiment:
    def __init__(
        self,
        models: Any,
        prompts: list[list[int]],
        report: Report,
        num_tokens: int,
        settings: tuple[str, ...] = SETTINGS,
        traces: Path | None = None,
    ) -> None:
        """`models`: a PaddedModel; `traces`: file for traces of every step of `auto`."""
        self.models, self.pair, self.settings = models, models.pair, settings
        self.prompts, self.report, self.num_tokens = prompts, report, num_tokens
        self._engines: dict[tuple[str, int, float], Any] = {}
        self._begin = time.perf_counter()
        self._traces = traces
        report.figures |= {"rows": [], "missing": []}

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._begin

    def attempt(self, concurrency: int, temperature: float, block: int, seconds: float) -> None:
        """Run a block, unless `seconds` are over. If it fails, report the error; the others still run."""
        cell = f"block {block}, concurrency {concurrency}, temperature {temperature:.0f}"
        reason = "the time is over" if self.elapsed > seconds else None
        if reason is None:
            try:
                self.block(concurrency, temperature, block)
            except Exception as error:
                traceback.print_exc()
                reason = f"FAILED: {error!r:.300}"
                self._drop_engines()
        if reason is not None:
            self.report.figures["missing"].append(f"{cell}: {reason}")
            self.report.say(f"  missing: {cell}: {reason}")
            self.report.save()

    def _drop_engines(self) -> None:
        """After an error: its requests still hold sequences of the runner, which all engines share."""
        self._engines.clear()
        for runner in self.pair.runners:
            for seq in range(runner.capacity.max_sequences):
                runner.free(seq)

    def check_padding(self) -> None:
        engine = self.pair.engine(1, self.costs)
        found = self.models.compare(engine, self.prompts[:COMPARED_PROMPTS], COMPARED_DEPTH)
        self.report.figures["padding"] = found
        self.report.say(
            f"logits of {found['tokens']} tokens against the small model in float32: relative error of the small "
            f"model {found['small_error']:.1e}, of the padded one {found['padded_error']:.1e}; same argmax "
            f"{found['small_argmax']:.4f} and {found['padded_argmax']:.4f}"
        )
        self.report.say(
            f"{found['drafted']} drafted tokens against the small head in float32: equal to those of the small head "
            f"{found['small_drafts']:.3f}, of the padded one {found['padded_drafts']:.3f}"
        )

    def calibrate(self, concurrency: int) -> None:
        begin = time.perf_counter()
        self.costs = self.pair.engine(concurrency, None).costs
        self.report.figures["costs"] = self.costs.as_dict()
        target, head = self.costs.target.points, self.costs.drafts["head"].passes.points
        self.report.say(
            f"costs measured in {time.perf_counter() - begin:.1f} s: target "
            + ", ".join(f"{size}: {1e3 * s:.2f}" for size, s in target.items())
            + " ms by tokens; a pass of the head "
            + ", ".join(f"{size}: {1e3 * s:.2f}" for size, s in head.items())
            + " ms by requests"
        )

    def engine(self, setting: str, concurrency: int, temperature: float) -> Any:
        """`auto` has one engine per cell, because its policy learns; fixed settings share one."""
        key = ("auto", concurrency, temperature) if setting == "auto" else ("fixed", concurrency, 0.0)
        if key not in self._engines:
            self._engines[key] = self.pair.engine(concurrency, self.costs)
        return self._engines[key]

    def run(self, setting: str, concurrency: int, temperature: float, block: int) -> dict[str, Any]:
        from benchmarks import gpu_cells

        prompts = self._prompts_of(concurrency, block)
        engine = self.engine(setting, concurrency, temperature)
        # A traced engine learns at once, not while the device works. So only `auto` is traced.
        keeps_trace = self._traces is not None and setting == "auto"
        found = gpu_cells.run(
            self.pair, engine, setting, prompts, concurrency, temperature, self.num_tokens, keep_trace=keeps_trace
        )  # fmt: skip
        cell = {"setting": setting, "concurrency": concurrency, "temperature": temperature, "block": block}
        if self._traces is not None and keeps_trace:
            with self._traces.open("a") as file:
                file.write(json.dumps(cell | {"costs": engine.costs.as_dict(), "steps": found.trace}) + "\n")
        return {**cell, **found.as_dict(), "texts": found.texts}

    def _prompts_of(self, concurrency: int, block: int) -> list[list[int]]:
        count = max(concurrency, ALONE)
        return [self.prompts[(block * count + i) % len(self.prompts)] for i in range(count)]

    def warm_up(self, concurrency: int, temperature: float, settings: tuple[str, ...]) -> None:
        """Capture graphs, because steps that capture one are not measured; `auto` learns nothing from it."""
        from benchmarks import gpu_cells

        more = PREPARED if "auto" in settings and concurrency <= MAX_PREPARED else ()
        for setting in dict.fromkeys((*settings, *more)):
            if setting != "auto":
                engine = self.engine(setting, concurrency, temperature)
                few = self.prompts[:concurrency]
                gpu_cells.run(self.pair, engine, setting, few, concurrency, temperature, WARM_UP_TOKENS)
        if more:
            gpu_cells.capture_packed(self.pair.runners[0], concurrency, greedy=temperature == 0)
            # The sizes of catch-up steps of `auto` are not known in advance: another engine runs it once.
            other = self.pair.engine(concurrency, self.costs)
            prompts = self._prompts_of(concurrency, -1)
            gpu_cells.run(self.pair, other, "auto", prompts, concurrency, temperature, self.num_tokens)

    def block(self, concurrency: int, temperature: float, block: int) -> None:
        """Run all settings once, starting with another setting in each block."""
        settings = self.settings
        if block == 0:
            self.warm_up(concurrency, temperature, settings)
        shift = block % len(settings)
        rows = [self.run(setting, concurrency, temperature, block) for setting in settings[shift:] + settings[:shift]]
        plain = next(row for row in rows if row["setting"] == "plain")
        for row in rows:
            row["speedup"] = row["tokens_per_s"] / plain["tokens_per_s"]
            row["num_texts"] = len(row["texts"])
            row["num_equal"], row["gaps"] = self._compare(plain, row)
        for row in rows:
            del row["texts"]
            self.report.figures["rows"].append(row)
            self._show(row)
        self.report.save()

    def _compare(self, plain: dict[str, Any], row: dict[str, Any]) -> tuple[int, list[float]]:
        """Number of outputs equal to plain decoding; for greedy ones that differ, the gap at the first difference."""
        from benchmarks.gpu_cells import first_difference

        prompts = self._prompts_of(row["concurrency"], row["block"])
        gaps, same = list[float](), 0
        for prompt, ours, theirs in zip(prompts, row["texts"], plain["texts"], strict=True):
            at = first_difference(ours, theirs)
            same += at is None
            if at is not None and row["temperature"] == 0:
                gaps.append(self.models.gap([*prompt, *theirs[:at]], ours[at], theirs[at]))
        return same, gaps

    def _show(self, row: dict[str, Any]) -> None:
        self.report.say(
            f"  block {row['block']} concurrency {row['concurrency']:3}, temperature {row['temperature']:.0f} "
            f"{row['setting']:>9} {row['tokens_per_s']:8.0f} tokens/s {row['speedup']:5.2f}x "
            f"{row['ms_per_step']:7.2f} ms per step, {row['tokens_per_step_and_request']:.2f} tokens each, equal to "
            f"plain {row['num_equal']} of {row['num_texts']}, {self.elapsed:.0f} s",
            keep=False,
        )

    def summarise(self) -> None:
        from benchmarks.gpu_summary import summary

        figures = summary(self.report.figures["rows"], REQUIRED)
        self.report.figures["summary"] = figures
        for line in figures["lines"]:
            self.report.say(line)
        self.report.save()


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
    running.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCY))
    running.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
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
    from benchmarks.gpu_padded_model import DRAFT_VOCABULARY, PaddedModel
    from outpace.bench.provenance import provenance

    prepared = json.loads(options.tokens.read_text())
    figures: dict[str, Any] = provenance(sys.argv, [options.model, options.head])
    figures |= {"prompts": prepared["source"], "new_tokens": options.new_tokens}
    figures["commit"] = options.commit or figures["commit"]
    report = Report(options.out, figures)
    begin, most = time.perf_counter(), max(options.concurrency)
    models = PaddedModel.build(options.model, options.head, options.device, most, CONTEXT, STEP_TOKENS)
    figures |= {"parameters": models.sizes, "dtype": str(models.dtype), "draft_vocabulary": DRAFT_VOCABULARY}
    experiment = Experiment(models, prepared["prompts"], report, options.new_tokens, traces=options.traces)
    for key in ("command", "commit", "python", "torch", "gpu"):
        report.say(f"{key}: {figures.get(key)}")
    report.say(
        f"parameters: target {models.sizes['target']:,}, head {models.sizes['head']:,}; the head can draft "
        f"{DRAFT_VOCABULARY:,} tokens; {models.dtype}; built in {time.perf_counter() - begin:.0f} s"
    )
    experiment.calibrate(most)
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

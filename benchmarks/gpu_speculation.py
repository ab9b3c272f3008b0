"""Speculation on a GPU with real acceptance and real cost: SmolLM2 padded to an 8B, its rounded copy padded to a 1B.

    python -m benchmarks.gpu_speculation prepare MODEL.gguf QUESTIONS.jsonl TOKENS.json
    python -m benchmarks.gpu_speculation run MODEL.gguf TOKENS.json OUT

`prepare` needs the tokenizer (llama.cpp) and no GPU; `run` needs a GPU and no tokenizer. The outputs are those of
SmolLM2 (see `gpu_padding.py`; `run` first compares the logits with the unpadded model's). The draft has a billion
parameters and SmolLM2's 30 layers, because layers cannot be merged; a real 1B has 16 layers and fewer kernel launches.
`gpu_rounding.py` rounds the draft; with `prepare --learn-from`, it learns the rounding from prompts of other files.

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
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.prompts import load_prompts

LONGEST_PROMPT = 1024
LONGEST_LEARNED = 96  # tokens of a prompt that rounding is learned from
MAX_LEARNED = 250  # such prompts of a file
CONTEXT = 1408
STEP_TOKENS = 4096
WARM_UP_TOKENS = 8
ALONE = 4  # prompts of a block at concurrency 1
# By concurrency. Fixed depths are smaller at high concurrency, where a drafted token costs more.
SETTINGS: dict[int, tuple[str, ...]] = {
    1: ("plain", "ngram:5", "suffix:5", "draft:4", "draft:6", "draft:9", "auto"),
    8: ("plain", "ngram:3", "suffix:3", "draft:3", "draft:5", "auto"),
    32: ("plain", "ngram:2", "suffix:2", "draft:2", "draft:4", "auto"),
    128: ("plain", "ngram:1", "suffix:1", "draft:1", "draft:2", "auto"),
}
# Other depths that `auto` may choose. Their graphs are captured before the measurement, as for fixed settings.
PREPARED = ("draft:1", "draft:2", "draft:3", "draft:4", "draft:6", "draft:8")
MAX_PREPARED = 32  # concurrency up to which PREPARED is captured
LEARNING_STEPS = 1000  # of the draft's rounding
# Required speedups of `auto` over plain decoding: in every cell, and at concurrency 1 and temperature 0.
MIN_AUTO, MIN_ALONE = 0.98, 2.0


def prepare(model: str, questions: Path, others: list[Path], out: Path) -> None:
    """Write prompts as token ids, in an order that mixes all kinds of questions."""
    from outpace import LLM

    with LLM(model, max_context=CONTEXT, speculation="off") as llm:

        def encoded_chats(texts: list[str]) -> list[list[int]]:
            return [llm.encode_chat([{"role": "user", "content": text}]) for text in texts]

        encoded = encoded_chats(load_prompts(questions))
        learned = [tokens for path in others for tokens in encoded_chats(load_prompts(path, MAX_LEARNED))]
        learn_from = [tokens for tokens in learned if len(tokens) <= LONGEST_LEARNED]
    fitting = [tokens for tokens in encoded if len(tokens) <= LONGEST_PROMPT]
    stride = next(n for n in (97, 101, 103) if len(fitting) % n)  # coprime, so every prompt comes once
    kept = [fitting[i * stride % len(fitting)] for i in range(len(fitting))]
    sources = {"source": questions.name, "learned_from": [path.name for path in others]}
    out.write_text(json.dumps({"prompts": kept, "learn_from": learn_from} | sources) + "\n")
    print(f"{len(kept)} prompts of {len(encoded)}, {statistics.mean(map(len, kept)):.0f} tokens on average")
    print(f"{len(learn_from)} prompts to learn the draft's rounding from")


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
        settings: Mapping[int, tuple[str, ...]] = SETTINGS,
        traces: Path | None = None,
    ) -> None:
        """`models`: a PaddedPair; `settings`: by concurrency; `traces`: file for traces of every step of `auto`."""
        self.models, self.pair, self.settings = models, models.pair, settings
        self.prompts, self.report, self.num_tokens = prompts, report, num_tokens
        self._engines: dict[tuple[str, int, float], Any] = {}
        self._begin = time.perf_counter()
        self._traces = traces
        report.figures["rows"] = []

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._begin

    def attempt(self, work: Callable[[], None]) -> None:
        """Run a part. If it fails, report the error and go on with the next part."""
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            self.report.say(f"  FAILED: {error!r:.300}")

    def check_padding(self) -> None:
        found = self.models.compare(self.prompts[:6])
        self.report.figures["padding"] = found
        self.report.say(
            f"logits of {found['tokens']} tokens against the small model in float32: relative error of the small "
            f"model {found['small_error']:.1e}, of the padded one {found['padded_error']:.1e}; same argmax "
            f"{found['small_argmax']:.4f} and {found['padded_argmax']:.4f}"
        )

    def calibrate(self) -> None:
        begin = time.perf_counter()
        self.costs = self.pair.engine(max(self.settings), None).costs
        self.report.figures["costs"] = self.costs.as_dict()
        target, draft = self.costs.target.points, self.costs.drafts["draft"].passes.points
        self.report.say(
            f"costs measured in {time.perf_counter() - begin:.1f} s: target "
            + ", ".join(f"{size}: {1e3 * s:.2f}" for size, s in target.items())
            + "; draft "
            + ", ".join(f"{size}: {1e3 * s:.2f}" for size, s in draft.items())
            + " ms, by tokens in the step"
        )

    def check_drafts(self) -> None:
        depth = 8
        share = self.models.drafts_like_steps(self.engine("plain", 1, 0.0), self.prompts[:6], depth)
        self.report.figures["drafts_like_single_steps"] = share
        self.report.say(f"share of tokens in drafts of {depth} that equal those of single steps: {share:.3f}")

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
        settings = self.settings[concurrency]
        if block == 0:
            self.warm_up(concurrency, temperature, settings)
        shift = block % len(settings)
        rows = [self.run(setting, concurrency, temperature, block) for setting in settings[shift:] + settings[:shift]]
        plain = next(row for row in rows if row["setting"] == "plain")
        for row in rows:
            row["speedup"] = row["tokens_per_s"] / plain["tokens_per_s"]
            row["texts_like_plain"], row["gaps"] = self._compare(plain, row)
        for row in rows:
            del row["texts"]
            self.report.figures["rows"].append(row)
            self._show(row)
        self.report.save()

    def _compare(self, plain: dict[str, Any], row: dict[str, Any]) -> tuple[float, list[float]]:
        """Share of outputs equal to plain decoding; for greedy ones that differ, the gap at the first difference."""
        from benchmarks.gpu_cells import first_difference

        prompts = self._prompts_of(row["concurrency"], row["block"])
        gaps, same = list[float](), 0
        for prompt, ours, theirs in zip(prompts, row["texts"], plain["texts"], strict=True):
            at = first_difference(ours, theirs)
            same += at is None
            if at is not None and row["temperature"] == 0:
                gaps.append(self.models.gap([*prompt, *theirs[:at]], ours[at], theirs[at]))
        return same / len(prompts), gaps

    def _show(self, row: dict[str, Any]) -> None:
        self.report.say(
            f"  block {row['block']} concurrency {row['concurrency']:3}, temperature {row['temperature']:.0f} "
            f"{row['setting']:>9} {row['tokens_per_s']:8.0f} tokens/s {row['speedup']:5.2f}x "
            f"{row['ms_per_step']:7.2f} ms per step, {row['tokens_per_step_and_request']:.2f} tokens each, equal to "
            f"plain {row['texts_like_plain']:.2f}, {self.elapsed:.0f} s",
            keep=False,
        )

    def beside_transformers(self, num_prompts: int, num_tokens: int) -> None:
        self.report.say(f"transformers, {num_prompts} prompts of {num_tokens} new tokens, including prefill")
        rows = self.report.figures["transformers"] = []
        for temperature in (0.0, 1.0):
            row = self.models.transformers_speed(self.prompts[:num_prompts], num_tokens, temperature)
            rows.append(row)
            self.report.say(
                f"  temperature {temperature:.0f}: generate {row['plain_tokens_per_s']:.1f} tokens/s, with "
                f"assistant_model {row['assisted_tokens_per_s']:.1f} ({row['speedup']:.2f}x), same output "
                f"{row['same_texts']} of {num_prompts}"
            )
            self.report.save()

    def summarise(self) -> None:
        from benchmarks.gpu_summary import summary

        figures = summary(self.report.figures["rows"], MIN_AUTO, MIN_ALONE)
        self.report.figures["summary"] = figures
        for line in figures["lines"]:
            self.report.say(line)
        self.report.save()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    preparing, running = commands.add_parser("prepare"), commands.add_parser("run")
    for each in (preparing, running):
        each.add_argument("model", help="SmolLM2 as a GGUF file")
    preparing.add_argument("questions", type=Path, help="Spec-Bench's question.jsonl")
    preparing.add_argument("out", type=Path)
    preparing.add_argument("--learn-from", type=Path, nargs="+", default=[], metavar="FILE",
                           help="prompts for learning the draft's rounding")  # fmt: skip
    running.add_argument("tokens", type=Path, help="the file that `prepare` wrote")
    running.add_argument("out", type=Path, help="folder for text and JSON")
    running.add_argument("--bits", type=int, default=4, help="bits of the draft's weights (default: %(default)s)")
    running.add_argument("--group", type=int, default=16, help="weights that share a grid (default: %(default)s)")
    running.add_argument("--rounding-steps", type=int, default=LEARNING_STEPS,
                         help="steps of learning; 0: round to the nearest value (default: %(default)s)")  # fmt: skip
    running.add_argument("--concurrency", type=int, nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    running.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    running.add_argument("--blocks", type=int, default=3)
    running.add_argument("--new-tokens", type=int, default=96, help="mean of a request (default: %(default)s)")
    running.add_argument("--transformers", type=int, default=2, help="prompts for transformers (default: %(default)s)")
    running.add_argument("--seconds", type=float, default=420, help="start no block after this (default: %(default)s)")
    running.add_argument("--traces", type=Path, metavar="FILE",
                         help="also write the time and reason of each step of auto here, as JSON lines")  # fmt: skip
    running.add_argument("--commit", help="commit of this code, for a copy without git history")
    options = parser.parse_args()
    if options.command == "prepare":
        prepare(options.model, options.questions, options.learn_from, options.out)
        return 0
    return measure(options)


def measure(options: argparse.Namespace) -> int:
    from benchmarks.gpu_padded_pair import PaddedPair
    from benchmarks.gpu_rounding import Rounding
    from outpace.bench.provenance import provenance

    prepared = json.loads(options.tokens.read_text())
    learn_from = prepared.get("learn_from", [])
    rounding = Rounding(options.bits, options.group, options.rounding_steps if learn_from else 0)
    figures: dict[str, Any] = provenance(sys.argv, [Path(options.model)]) | {
        "prompts": prepared["source"], "learned_from": prepared.get("learned_from"), "rounding": asdict(rounding),
        "new_tokens": options.new_tokens,
    }  # fmt: skip
    report = Report(options.out, figures)
    most = max(options.concurrency)
    begin = time.perf_counter()
    models = PaddedPair.build(Path(options.model), rounding, learn_from, most, CONTEXT, STEP_TOKENS)
    built_seconds = time.perf_counter() - begin
    figures["parameters"] = models.sizes
    figures["commit"] = options.commit or figures["commit"]
    experiment = Experiment(models, prepared["prompts"], report, options.new_tokens, traces=options.traces)
    for key in ("command", "commit", "python", "torch", "transformers", "gpu"):
        report.say(f"{key}: {figures.get(key)}")
    report.say(
        f"draft: {rounding.bits} bits, groups of {rounding.group}, rounding learned in {rounding.steps} steps from "
        f"{len(learn_from)} other prompts; parameters {models.sizes}; built in {built_seconds:.0f} s"
    )
    figures["agreement"] = models.agreement
    shares = ", ".join(f"{name} {share:.3f}" for name, share in models.agreement.items())
    report.say(f"share of next tokens equal to the exact model's, on held-out texts: {shares}")
    experiment.check_padding()
    experiment.calibrate()
    experiment.check_drafts()
    report.save()
    for block in range(options.blocks):
        for concurrency in options.concurrency:
            for temperature in options.temperature:
                if experiment.elapsed > options.seconds:
                    report.say(f"  block {block}, concurrency {concurrency}, T {temperature}: skipped, time is up")
                    continue
                experiment.attempt(partial(experiment.block, concurrency, temperature, block))
        if block == 0 and options.transformers:
            experiment.attempt(
                lambda: experiment.beside_transformers(options.transformers, min(48, options.new_tokens))
            )
    experiment.summarise()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The blocks of the GPU experiment: every setting on the same prompts, beside plain decoding, and what they found."""

from __future__ import annotations

import json
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks import gpu_cells
from benchmarks.gpu_cells import first_difference
from benchmarks.gpu_padded_model import PaddedModel
from benchmarks.gpu_summary import summary
from benchmarks.prompts import block_of

WARM_UP_TOKENS = 16
FEWEST_PROMPTS = 8  # of a block: at concurrency 1, one text more or less moves the mean of four by several percent
COMPARED_PROMPTS, COMPARED_DEPTH = 12, 4  # of the logits and drafts that are compared with the small ones
SETTINGS = ("plain", "head:2", "head:3", "head:5", "head:7", "tree:4", "auto")
# Other depths that `auto` may choose. Their graphs are captured before the measurement, as for fixed settings.
PREPARED: tuple[str, ...] = ("head:1", "head:4", "head:6", "head:8", "tree:4")
MAX_PREPARED = 32  # concurrency up to which PREPARED is captured
# Required speedups of `auto` over plain decoding, by concurrency and temperature.
REQUIRED = {
    (1, 0.0): 1.9, (8, 0.0): 1.6, (32, 0.0): 1.2, (128, 0.0): 0.98,
    (1, 1.0): 1.3, (8, 1.0): 1.15, (32, 1.0): 0.98, (128, 1.0): 0.98,
}  # fmt: skip


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
        models: PaddedModel,
        prompts: list[list[int]],
        report: Report,
        num_tokens: int,
        settings: tuple[str, ...] = SETTINGS,
        traces: Path | None = None,
    ) -> None:
        """`traces`: file for traces of every step of `auto`."""
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
        costs = self.pair.engine(concurrency, None).costs
        assert costs is not None
        head = costs.drafts["head" if self.pair.draft is None else "draft"].passes
        assert head is not None
        self.costs = costs
        self.report.figures["costs"] = costs.as_dict()
        self.report.say(
            f"costs measured in {time.perf_counter() - begin:.1f} s: target "
            + ", ".join(f"{size}: {1e3 * s:.2f}" for size, s in costs.target.points.items())
            + f" ms by tokens; a pass of the {'head' if self.pair.draft is None else 'draft model'} "
            + ", ".join(f"{size}: {1e3 * s:.2f}" for size, s in head.points.items())
            + " ms by requests"
        )

    def engine(self, setting: str, concurrency: int, temperature: float) -> Any:
        """`auto` has one engine per cell, because its policy learns; fixed settings share one."""
        key = ("auto", concurrency, temperature) if setting == "auto" else ("fixed", concurrency, 0.0)
        if key not in self._engines:
            self._engines[key] = self.pair.engine(concurrency, self.costs)
        return self._engines[key]

    def run(self, setting: str, concurrency: int, temperature: float, block: int) -> dict[str, Any]:
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
        return block_of(self.prompts, concurrency, block, FEWEST_PROMPTS)

    def warm_up(self, concurrency: int, temperature: float, settings: tuple[str, ...]) -> None:
        """Capture graphs, because steps that capture one are not measured; `auto` learns nothing from it."""
        own = PREPARED
        if self.pair.draft is not None:
            own = tuple(each.replace("head", "draft") for each in PREPARED if each.startswith("head"))
        more = own if "auto" in settings and concurrency <= MAX_PREPARED else ()
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
        figures = summary(self.report.figures["rows"], REQUIRED)
        self.report.figures["summary"] = figures
        for line in figures["lines"]:
            self.report.say(line)
        self.report.save()

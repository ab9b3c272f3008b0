"""Quantised weights on a GPU: checks every format, finds the fastest kernel configurations, times steps and the engine.

    python -m benchmarks.gpu_quantised OUT                          OUT.txt and OUT.json; about four minutes on one H200
    python -m benchmarks.gpu_quantised OUT --only check steps       only these sections
    python -m benchmarks.gpu_quantised OUT --formats int4 fp8       only these formats

The model has the shape of an 8B and random weights in the format. The floor is the bytes that a step must read, divided
by the measured bandwidth. Sections that follow `sweep` use the configurations that it found;
the figures have them as lines for `kernels/measured_quantised.py`. A failed section is
reported and the next one runs; files are written after every section.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import CONTEXT, WORKERS, Bench, Cell, Report, run_sections
from benchmarks.gpu_formats import (
    FORMATS,
    Sweep,
    Trial,
    check,
    check_cases,
    compile_all,
    head_kind,
    measured_source,
    random_weight,
    trials,
)
from benchmarks.gpu_kernels import spread
from benchmarks.gpu_machine import bandwidths, describe
from benchmarks.gpu_models import captured, random_caches, replay_ms, shape_config, uniform_step
from outpace.backends.torch.execution.pages import PAGE_TOKENS
from outpace.backends.torch.execution.step import StepInputs
from outpace.backends.torch.kernels.base import Cache
from outpace.backends.torch.kernels.triton_ops import Config, TritonOps
from outpace.backends.torch.model.model import Model
from outpace.backends.torch.model.weights import Weights, allocate
from outpace.models.architecture import Architecture

TIMED = ("int4", "int4-128", "fp8", "Q4_K")
TOKENS = (1, 8, 32, 128)
# Milliseconds of a whole engine's step, by rows and tokens per row.
ALLOWED: dict[str, dict[tuple[int, int], float]] = {
    "int4": {(1, 1): 1.7, (1, 8): 2.12, (32, 1): 5.0},
    "int4-128": {(1, 1): 1.7, (1, 8): 2.12, (32, 1): 5.0},
    "fp8": {(1, 1): 2.4, (8, 1): 2.6, (32, 1): 4.4, (128, 1): 8.0},
}
CELLS = ((1, 1), (1, 8), (8, 1), (32, 1), (128, 1), (256, 1))
Key = tuple[int, int, int]


def random_model(config: Architecture, kind: str, device: torch.device) -> Weights:
    weights = allocate(config, tied=False, dtype=torch.bfloat16, device=torch.device("meta"))
    weights.embedding = torch.empty(weights.embedding.shape, dtype=torch.bfloat16, device=device).normal_(0.0, 0.02)
    weights.final_norm = torch.ones(config.width, dtype=torch.bfloat16, device=device)
    rows, columns = weights.head.shape
    weights.head = random_weight(head_kind(kind), rows, columns, device)
    for layer in weights.layers:
        for name in ("qkv", "out", "gate_up", "down"):
            rows, columns = getattr(layer, name).shape
            setattr(layer, name, random_weight(kind, rows, columns, device))
        layer.attention_norm = layer.mlp_norm = weights.final_norm
    return weights


class QuantisedBench(Bench):
    def __init__(self, report: Report, formats: list[str], sweep_seconds: float, most_rows: int) -> None:
        super().__init__(report, None, [])
        self._sizes = [(rows, tokens) for rows, tokens in CELLS if rows <= most_rows]
        self._formats = formats
        self._sweep_seconds = sweep_seconds
        self._best: dict[str, dict[Key, Config]] = {kind: {} for kind in formats}
        self._current: tuple[str, Model] | None = None
        self._results: dict[str, dict[str, dict[str, float]]] = {kind: {} for kind in formats}

    def model(self, shape: str) -> Model:
        """`shape`: a format."""
        if self._current is None or self._current[0] != shape:
            self._current = None
            torch.cuda.empty_cache()
            config = shape_config("8B")
            weights = random_model(config, shape, self.device)
            ops = TritonOps(self.device, configs=self._best[shape])
            self._current = (shape, Model(config, weights, ops, 2 * CONTEXT))
        return self._current[1]

    # Sections, in order.

    def machine(self) -> None:
        found = describe(self.device) | bandwidths(self.device)
        self.bandwidth = 1e12 * max(found["read_tb_per_s"], found["copy_tb_per_s"])
        self.report.figures["machine"] = found
        self.report.say("  " + ", ".join(f"{name} {value}" for name, value in found.items()))

    def check(self) -> None:
        """Every format, with sizes that no block divides."""
        cases = check_cases()
        random.Random(0).shuffle(cases)
        checks = [each for found in spread(check, cases, WORKERS) for each in found]
        self.report.figures["checks"] = checks
        for kind in FORMATS[:-1]:
            mine = [each for each in checks if each["format"] == kind]
            failed = [each for each in mine if not each["passed"]]
            worst = max((each["error"] for each in mine if each["error"] == each["error"]), default=float("nan"))
            self.report.say(
                f"  {kind:16} {len(mine) - len(failed):3} of {len(mine):3} passed, largest error {worst:.1e}"
            )
            for each in failed[:4]:
                self.report.say(f"    FAILED {each['product']}: {each['case']}: {each['error']:.2e}")

    def sweep(self) -> None:
        """The fastest configuration of each product."""
        kinds = [kind for kind in self._formats if kind in TIMED]
        begin = time.perf_counter()
        found = compile_all(trials(kinds, TOKENS), WORKERS, self._sweep_seconds)
        self.report.say(f"  {len(found)} configurations compiled in {time.perf_counter() - begin:.0f} s")
        rows = self.report.figures["sweep"] = []
        timer = Sweep()
        fastest: dict[tuple[str, Key], tuple[float, Trial]] = {}
        for trial in sorted(found, key=lambda each: (each.kind, each.product.name, each.num_tokens)):
            try:
                us = timer.microseconds(trial)
            except Exception as error:
                rows.append(_row(trial) | {"error": repr(error)[:300]})
                continue
            floor = 1e6 * timer.weight_bytes / self.bandwidth
            rows.append(_row(trial) | {"us": us, "floor_us": floor})
            # Several numbers of tokens share an entry (8 and 16, for instance): the last one counts.
            best = fastest.get((trial.kind, trial.key))
            if best is None or us < best[0]:
                fastest[trial.kind, trial.key] = (us, trial)
        listed: dict[tuple[str, Key], Config] = {}
        for (kind, key), (us, trial) in fastest.items():
            mine = [row for row in rows if row["kind"] == kind and row["tokens"] == trial.num_tokens]
            mine = [row for row in mine if row["product"] == trial.product.name and "us" in row]
            default = next((row["us"] for row in mine if row["config"] == "None"), float("nan"))
            self.report.say(
                f"  {kind:9} {trial.product.name:8} {trial.num_tokens:3} tokens: {us:6.1f} us, floor "
                f"{mine[0]['floor_us']:6.1f}, default {default:6.1f}  {trial.config}"
            )
            if trial.config is not None and not us > 0.97 * default:
                listed[kind, key] = trial.config
                for model_kind in kinds:
                    stored = head_kind(model_kind) if trial.product.name == "head" else model_kind
                    if stored == kind:
                        self._best[model_kind][key] = trial.config
        self.report.figures["configs"] = measured_source(listed)

    def steps(self) -> None:
        """One forward pass in one CUDA graph."""
        found = self.report.figures["steps"] = []
        for kind in self._formats:
            try:
                model = self.model(kind)
            except Exception:
                self.report.say(traceback.format_exc())
                continue
            read = sum(weight.nbytes for weight in model.weights.tensors) - model.weights.embedding.nbytes
            for rows, tokens in self._sizes:
                try:
                    step = uniform_step(rows, tokens, CONTEXT, model.config.vocab_size, self.device)
                    caches = random_caches(model.config, rows * -(-CONTEXT // PAGE_TOKENS), self.device)
                    ms = replay_ms(captured(lambda m=model, s=step, c=caches: m.forward(s, c)), rounds=5)  # type: ignore[misc]
                    del caches
                except Exception:
                    self.report.say(traceback.format_exc())
                    continue
                floor = read + 2 * rows * CONTEXT * model.config.cache_elements_per_token
                entry = {"floor": 1e3 * floor / self.bandwidth, "step": statistics.median(ms)}
                self._results[kind][f"{rows} x {tokens}"] = entry
                found.append({"kind": kind, "rows": rows, "tokens": tokens, "ms": ms, **entry})
            shown = ", ".join(
                f"{cell}: {each['step']:.2f} ({each['floor']:.2f})" for cell, each in self._results[kind].items()
            )
            self.report.say(f"  {kind:9} {shown}")
            self.report.save()

    def attention(self) -> None:
        """The part of a step that no format changes, in one CUDA graph."""
        found = self.report.figures["attention"] = []
        config, ops = shape_config("8B"), TritonOps(self.device)
        rope = torch.from_numpy(config.rope.table(2 * CONTEXT)).to(self.device)
        for rows, tokens in self._sizes:
            step = uniform_step(rows, tokens, CONTEXT, config.vocab_size, self.device)
            caches = random_caches(config, rows * -(-CONTEXT // PAGE_TOKENS), self.device)
            width = config.q_size + 2 * config.kv_size
            qkv = torch.randn((rows * tokens, width), dtype=torch.bfloat16, device=self.device)

            def work(qkv: Tensor = qkv, caches: list[Cache] = caches, step: StepInputs = step) -> None:
                for cache in caches:
                    ops.attend(qkv, cache, step, rope, None, None, config.epsilon)

            ms = replay_ms(captured(work), rounds=5)
            floor = 1e3 * 2 * rows * CONTEXT * config.cache_elements_per_token / self.bandwidth
            found.append({"rows": rows, "tokens": tokens, "floor": floor, "ms": ms})
            self.report.say(f"  {rows} x {tokens}: {statistics.median(ms):.3f} ({floor:.3f})")
            del caches, work
            torch.cuda.empty_cache()

    def engine(self) -> None:
        """Steps of the whole engine, with scheduling, sampling and detokenising; greedy."""
        found = self.report.figures["engine"] = []
        for kind in self._formats:
            for rows, tokens in self._sizes:
                try:
                    row = self._engine_row(Cell(kind, rows, tokens, 0.0), 0.0)
                except Exception:
                    self.report.say(traceback.format_exc())
                    continue
                found.append(row | {"kind": kind, "rows": rows, "tokens": tokens})
                self._results[kind].setdefault(f"{rows} x {tokens}", {})["engine"] = row["step_ms"]
            self.report.say(f"  {kind} done")
            self.report.save()

    def table(self) -> None:
        self.report.say(
            f"  milliseconds per step, 8B shape, {CONTEXT} tokens of context: floor, step, engine, asked for"
        )
        self.report.figures["table"] = self._results
        for kind in self._formats:
            for rows, tokens in self._sizes:
                entry = self._results[kind].get(f"{rows} x {tokens}", {})
                shown = "".join(
                    f"{entry[name]:9.2f}" if name in entry else f"{'-':>9}" for name in ("floor", "step", "engine")
                )
                allowed = ALLOWED.get(kind, {}).get((rows, tokens))
                self.report.say(f"  {kind:9} {rows:4} x {tokens}{shown}{allowed if allowed is not None else '-':>9}")


def _row(trial: Trial) -> dict[str, Any]:
    return {
        "kind": trial.kind, "product": trial.product.name, "tokens": trial.num_tokens, "config": repr(trial.config),
    }  # fmt: skip


SECTIONS = ("machine", "check", "sweep", "attention", "steps", "engine", "table")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="output path, without a suffix")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="SECTION",
                        help=f"any of {', '.join(SECTIONS)} (default: all)")  # fmt: skip
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(TIMED), metavar="FORMAT",
                        help=f"what to time: any of {', '.join(FORMATS)} (default: {' '.join(TIMED)})")  # fmt: skip
    parser.add_argument("--sweep-seconds", type=float, default=100.0, help="for compiling configurations (100)")
    parser.add_argument("--most-rows", type=int, default=128, metavar="N", help="requests at once, up to 256 (128)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu_quantised needs a CUDA GPU, and torch sees none", file=sys.stderr)
        return 2
    report = Report(options.out)
    report.say(f"python -m benchmarks.gpu_quantised {' '.join(Path(arg).name for arg in sys.argv[1:])}")
    bench = QuantisedBench(report, options.formats, options.sweep_seconds, options.most_rows)
    return run_sections(bench, [section for section in SECTIONS if section in options.only])


if __name__ == "__main__":
    sys.exit(main())

"""The torch backend on a GPU: kernels against their references, then its steps and the whole engine beside the floor.

    python -m benchmarks.gpu OUT                                    OUT.txt and OUT.json; a few minutes on one H200
    python -m benchmarks.gpu OUT --model SMOLLM2.gguf --prompts P   also what speculation says beside plain decoding
    python -m benchmarks.gpu OUT --only steps engine                some sections

Weights of the 8B and the 1B are random and made on the device. A floor is the bytes a step must read (every matrix
once, every row's keys and values) over the read bandwidth measured here. P is what `benchmarks.gpu_speculation prepare`
writes: prompts as token ids, since no tokenizer is needed then. Each section is on its own: one that fails is reported
and the next runs. Files are written after every section, so that a run cut short still leaves what it found.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_exact, gpu_kernels
from benchmarks.gpu_machine import bandwidths, describe
from benchmarks.gpu_models import (
    SHAPES,
    Letters,
    NaiveModel,
    captured,
    random_caches,
    random_weights,
    replay_ms,
    shape_config,
    step_floor_bytes,
    uniform_step,
)
from outpace.backends.base import Capacity, LoadedModel
from outpace.backends.torch.kernels.triton_ops import TritonOps
from outpace.backends.torch.model.model import Model
from outpace.backends.torch.runner import PAGE_TOKENS, TorchRunner
from outpace.config import EngineConfig, SamplingParams, usable_cores
from outpace.core import Draft
from outpace.engine.engine import Engine
from outpace.speculation.proposers.base import DraftAsk, NoDraft

CONTEXT = 1024
WORKERS = max(1, min(14, usable_cores() - 1))  # that compile kernels
NEW_TOKENS = 24  # that transformers generate


@dataclass(frozen=True)
class Cell:
    shape: str
    rows: int
    tokens: int  # per row: one of plain decoding, or a draft and one more
    allowed: float  # milliseconds

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.rows} x {self.tokens}"


CELLS = (
    Cell("8B", 1, 1, 4.3), Cell("8B", 1, 8, 4.73), Cell("1B", 1, 1, 0.85), Cell("8B", 32, 1, 6.5),
    Cell("8B", 128, 1, 16.0),
)  # fmt: skip


class Report:
    """Text and figures, kept on disk as they come."""

    def __init__(self, out: Path) -> None:
        self._out = out
        out.parent.mkdir(parents=True, exist_ok=True)
        self.figures: dict[str, Any] = {}
        self._lines: list[str] = []

    def say(self, line: str = "") -> None:
        print(line, flush=True)
        self._lines.append(line)

    def save(self) -> None:
        self._out.with_suffix(".txt").write_text("\n".join(self._lines) + "\n")
        self._out.with_suffix(".json").write_text(json.dumps(self.figures, indent=1) + "\n")


class WrongDraft(NoDraft):
    """Always something to verify, and almost never right: what a step costs that verifies so many tokens."""

    name = "ngram"

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [Draft([(ask.request.tokens[-1] + i) % 1000 for i in range(ask.depth)], self.name) for ask in asks]


class Bench:
    def __init__(self, report: Report, model: Path | None, prompts: list[list[int]]) -> None:
        self.report, self._model_path, self._prompts = report, model, prompts
        self.device = torch.device("cuda", 0)
        self.bandwidth = 4.2e12  # replaced by what is measured
        self._models: dict[str, Model] = {}
        self._table: dict[str, dict[str, float]] = {cell.name: {} for cell in CELLS}

    def model(self, shape: str) -> Model:
        if shape not in self._models:
            config = shape_config(shape)
            weights = random_weights(config, self.device)
            self._models[shape] = Model(config, weights, TritonOps(self.device), 2 * CONTEXT)
        return self._models[shape]

    # Sections, in order.

    def machine(self) -> None:
        found = describe(self.device) | bandwidths(self.device)
        self.bandwidth = 1e12 * max(found["read_tb_per_s"], found["copy_tb_per_s"])
        self.report.figures["machine"] = found
        for name, value in found.items():
            self.report.say(f"  {name:16} {value}")

    def check(self) -> None:
        """Every kernel against its reference on random shapes."""
        checks = gpu_kernels.check_kernels(WORKERS)
        found = self.report.figures["checks"] = []
        for name in sorted({check["kernel"] for check in checks}):
            mine = [check for check in checks if check["kernel"] == name]
            failed = [check for check in mine if not check["passed"]]
            worst = max(check["error"] for check in mine)
            found.append({"kernel": name, "checks": len(mine), "failed": failed, "largest_error": worst})
            self.report.say(
                f"  {name:18} {len(mine) - len(failed):4} of {len(mine):4} passed, largest error {worst:.1e}"
            )
            for check in failed[:5]:
                self.report.say(f"  FAILED {check['kernel']}: {check['case']}: {check['error']:.2e}")

    def exact(self) -> None:
        """SmolLM2: speculation beside plain decoding."""
        if self._model_path is None:
            self.report.say("  left out: no --model")
            return
        self.report.figures["exact"] = gpu_exact.compare(self._model_path, self._prompts, self.report.say)

    def steps(self) -> None:
        """One forward pass in one graph, ours and naive."""
        found = self.report.figures["steps"] = []
        for cell in CELLS:
            model = self.model(cell.shape)
            config = model.config
            step = uniform_step(cell.rows, cell.tokens, CONTEXT, config.vocab_size, self.device)
            caches = random_caches(config, cell.rows * -(-CONTEXT // PAGE_TOKENS), self.device)
            ours = replay_ms(captured(lambda m=model, s=step, c=caches: m.forward(s, c)))  # type: ignore[misc]
            del caches
            naive_model = NaiveModel(config, model.weights, cell.rows, CONTEXT)
            tokens = step.tokens.view(cell.rows, cell.tokens)
            naive = replay_ms(captured(lambda m=naive_model, t=tokens: m.forward(t, CONTEXT)), rounds=3)  # type: ignore[misc]
            del naive_model
            torch.cuda.empty_cache()
            floor = 1e3 * step_floor_bytes(config, cell.rows, CONTEXT) / self.bandwidth
            self._table[cell.name] |= {
                "floor": floor,
                "step": statistics.median(ours),
                "naive": statistics.median(naive),
            }
            found.append({"cell": cell.name, "floor_ms": floor, "ours_ms": ours, "naive_ms": naive})
            self.report.say(
                f"  {cell.name:12} floor {floor:.3f}, ours {statistics.median(ours):.3f} "
                f"({min(ours):.3f} to {max(ours):.3f}), naive {statistics.median(naive):.2f} ms"
            )

    def engine(self) -> None:
        """Through the whole engine: scheduling, sampling, detokenising included."""
        found = self.report.figures["engine"] = []
        for cell in CELLS:
            for temperature in (0.0, 1.0) if cell.rows == 1 else (0.0,):
                row = self._engine_row(cell, temperature)
                found.append(row)
                if temperature == 0.0:
                    self._table[cell.name]["engine"] = row["step_ms"]
                self.report.say(
                    f"  {cell.name:12} temperature {temperature}: {row['step_ms']:.3f} ms a step (tenths "
                    f"{row['tenths'][0]:.3f} to {row['tenths'][1]:.3f}), of which waiting for the device "
                    f"{row['forward_ms']:.3f}"
                )

    def _engine_row(self, cell: Cell, temperature: float) -> dict[str, Any]:
        """Steps in which all requests decode and nothing else happens, around CONTEXT tokens of context."""
        model, drafts = self.model(cell.shape), cell.tokens > 1
        prompt, new = CONTEXT - 64, (96 if cell.rows == 1 else 64) + cell.rows  # the first go on while others are read
        config = EngineConfig(
            speculation="on" if drafts else "off", method="ngram" if drafts else None,
            depth=cell.tokens - 1 if drafts else None, max_sequences=cell.rows, max_context=2 * CONTEXT,
            max_step_tokens=2048, cache_tokens=cell.rows * (CONTEXT + 256) + 2 * CONTEXT, prefix_reuse=False,
        ).resolve(model_context=8192, model_path="random", draft_path=None, backend="torch")  # fmt: skip
        capacity = Capacity(cell.rows + 1, config.cache_tokens, config.max_context, config.max_step_tokens)
        runner = TorchRunner(model, capacity)
        loaded = LoadedModel(runner, Letters(model.config.vocab_size), "random", 0, 0)
        engine = Engine(loaded, {"none": NoDraft(), "ngram": WrongDraft()}, config)
        if drafts:
            engine.calibrate()
        rng = random.Random(0)
        for _ in range(cell.rows):
            tokens = [rng.randrange(model.config.vocab_size) for _ in range(prompt)]
            engine.submit(tokens, SamplingParams(max_tokens=new, temperature=temperature, ignore_eos=True, seed=1))
        taken: dict[str, list[float]] = {"step_ms": [], "forward_ms": [], "host_ms": []}
        while engine.has_requests:
            num_captured, begin = runner.num_captured, time.perf_counter()
            engine.step()
            seconds, stats = time.perf_counter() - begin, engine.stats
            is_verifying = stats.num_drafted == cell.rows * (cell.tokens - 1)
            is_whole = stats.num_decode_rows == cell.rows and not stats.num_prefill_tokens and is_verifying
            if is_whole and num_captured == runner.num_captured:
                for name, value in zip(taken, (seconds, stats.forward_seconds, stats.host_seconds), strict=True):
                    taken[name].append(1e3 * value)
        runner.close()
        torch.cuda.empty_cache()
        steps = sorted(taken["step_ms"][8:])
        medians = {name: statistics.median(values[8:]) for name, values in taken.items()}
        tenths = [steps[len(steps) // 10], steps[-1 - len(steps) // 10]]
        return {"cell": cell.name, "temperature": temperature, "steps": len(steps), "tenths": tenths, **medians}

    def transformers(self) -> None:
        """`generate` of the same shapes, greedy, with its default cache."""
        from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

        self._models.clear()
        torch.cuda.empty_cache()
        for shape in ("8B", "1B"):
            config = LlamaConfig(**{k: v for k, v in SHAPES[shape].items() if k != "architectures"})
            with torch.device(self.device):
                torch.set_default_dtype(torch.bfloat16)
                try:
                    model = LlamaForCausalLM(config).eval()
                finally:
                    torch.set_default_dtype(torch.float32)
            for cell in CELLS:
                if cell.shape != shape or cell.tokens > 1 or cell.rows > 32:
                    continue
                tokens = torch.randint(0, config.vocab_size, (cell.rows, CONTEXT - NEW_TOKENS), device=self.device)
                seconds = []
                for num_new in (2, NEW_TOKENS, 2, NEW_TOKENS):
                    settings = GenerationConfig(
                        max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False, pad_token_id=0, eos_token_id=1
                    )
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=settings)
                    torch.cuda.synchronize()
                    seconds.append(time.perf_counter() - begin)
                ms = self._table[cell.name]["transformers"] = 1e3 * (seconds[3] - seconds[2]) / (NEW_TOKENS - 2)
                self.report.say(f"  {cell.name:12} {ms:.1f} ms a step")
            del model
            torch.cuda.empty_cache()

    def table(self) -> None:
        """Everything side by side."""
        columns = ("floor", "step", "engine", "naive", "transformers")
        titles = ("floor", "ours: step", "ours: engine", "naive torch", "transformers", "allowed")
        self.report.say("  milliseconds a step, bfloat16, " + f"{CONTEXT} tokens of context, greedy")
        self.report.say(f"  {'rows x tokens':14}" + "".join(f"{title:>14}" for title in titles))
        for cell in CELLS:
            found = self._table[cell.name]
            shown = "".join(f"{found[name]:14.2f}" if name in found else f"{'-':>14}" for name in columns)
            self.report.say(f"  {cell.name:14}{shown}{cell.allowed:14.2f}")
        self.report.figures["table"] = self._table
        plain, verify = (self._table[cell.name].get("engine") for cell in CELLS[:2])
        if plain and verify:
            self.report.say(f"  verifying 8 tokens takes {verify / plain:.3f} of a plain step, through the engine")


SECTIONS = ("machine", "check", "exact", "steps", "engine", "transformers", "table")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where to write, without a suffix")
    parser.add_argument("--model", type=Path, help="SmolLM2 as a GGUF")
    parser.add_argument("--prompts", type=Path, help="token ids of its prompts")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="SECTION",
                        help=f"of {', '.join(SECTIONS)}")  # fmt: skip
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu needs a CUDA GPU, and torch sees none", file=sys.stderr)
        return 2
    prompts = json.loads(options.prompts.read_text())["prompts"] if options.prompts else []
    report = Report(options.out)
    report.say(f"python -m benchmarks.gpu {' '.join(Path(arg).name for arg in sys.argv[1:])}")
    bench = Bench(report, options.model if prompts else None, prompts)
    failed = False
    for name in [section for section in SECTIONS if section in options.only]:
        started = time.perf_counter()
        report.say(f"{name}")
        try:
            section: Callable[[], None] = getattr(bench, name)
            section()
        except Exception:
            failed = True
            report.say(traceback.format_exc())
        report.say(f"  ({time.perf_counter() - started:.0f} s)")
        report.save()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

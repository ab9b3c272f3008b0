"""The torch backend on a GPU: kernels against their references, then steps and the whole engine beside the floor.

    python -m benchmarks.gpu OUT                     everything, about eight minutes on one H200
    python -m benchmarks.gpu OUT --only check steps  some sections

Weights are random and made on the device. A floor is the bytes a step must read (every matrix once, every row's keys
and values) over the read bandwidth measured here. Each section is on its own: one that fails is reported and the next
runs. Text and JSON are written after every section, so that a run cut short still leaves what it found.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_kernels as kernels
from benchmarks.gpu_models import (
    NaiveModel,
    captured,
    median_ms,
    random_caches,
    random_weights,
    replay_ms,
    shape_config,
    step_floor_bytes,
    uniform_step,
)
from outpace.backends.base import Capacity, LoadedModel
from outpace.backends.torch.kernels.linear import LinearConfig
from outpace.backends.torch.kernels.triton_ops import TritonOps
from outpace.backends.torch.model import Model
from outpace.backends.torch.runner import PAGE_TOKENS, TorchRunner
from outpace.backends.torch.weights import Weights
from outpace.config import EngineConfig, SamplingParams, usable_cores
from outpace.engine.engine import Engine
from outpace.speculation.base import NoDraft

CONTEXT = 1024
SWEEP_SECONDS = 200
AHEADS = (0, 1, 2, 4, 8)  # lines that a thread asks for ahead
PREFETCHES = (0, 1)
PRODUCTS = ("qkv", "out", "gate_up", "down", "head")
WORKERS = max(1, min(14, usable_cores() - 1))  # that compile kernels
# (shape, rows, tokens per row, what the step may take in milliseconds)
STEPS = [("8B", 1, 1, 4.3), ("8B", 1, 8, 4.73), ("1B", 1, 1, 0.85), ("8B", 32, 1, 6.5), ("8B", 128, 1, 16.0)]


class Report:
    """Text and figures, kept on disk as they come."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.figures: dict[str, Any] = {}
        self._lines: list[str] = []

    def say(self, line: str = "") -> None:
        print(line, flush=True)
        self._lines.append(line)

    def save(self) -> None:
        (self.folder / "gpu.txt").write_text("\n".join(self._lines) + "\n")
        (self.folder / "gpu.json").write_text(json.dumps(self.figures, indent=1) + "\n")


class Bench:
    def __init__(self, report: Report, device: torch.device) -> None:
        self.report = report
        self.device = device
        self.bandwidth = 4.2e12  # replaced by what is measured
        self.configs: dict[tuple[int, int, int], LinearConfig] = {}
        self._models: dict[str, Model] = {}

    def model(self, shape: str) -> Model:
        if shape not in self._models:
            config = shape_config(shape)
            ops = TritonOps(self.device, configs=self.configs)
            self._models[shape] = Model(config, random_weights(config, self.device), ops, 2 * CONTEXT)
        return self._models[shape]

    # Sections, in order.

    def machine(self) -> None:
        say, properties = self.report.say, torch.cuda.get_device_properties(self.device)
        found: dict[str, Any] = {name: _version(name) for name in ("torch", "triton", "transformers", "numpy")}
        found |= {
            "gpu": properties.name, "multiprocessors": properties.multi_processor_count,
            "memory": properties.total_memory, "driver": _driver(), "commit": _commit(),
        }  # fmt: skip
        found |= _bandwidths(self.device)
        self.bandwidth = 1e12 * max(found["read_tb_per_s"], found["copy_tb_per_s"])
        found["bandwidth"] = self.bandwidth
        self.report.figures["machine"] = found
        for name, value in found.items():
            say(f"  {name:16} {value}")

    def check(self) -> None:
        checks = kernels.check_kernels(WORKERS)
        failed = [check for check in checks if not check["passed"]]
        self.report.figures["checks"] = checks
        for name in sorted({check["kernel"] for check in checks}):
            mine = [check for check in checks if check["kernel"] == name]
            worst = max(check["error"] for check in mine)
            passed = sum(check["passed"] for check in mine)
            self.report.say(f"  {name:14} {passed:4} of {len(mine):4} passed, largest error {worst:.1e}")
        for check in failed[:20]:
            self.report.say(f"  FAILED {check['kernel']}: {check['case']}: {check['error']:.2e}")

    def sweep(self) -> None:
        """Time each way to stream each product on its own; later sections use the best."""
        jobs = [
            (shape, product, config)
            for shape in ("8B", "1B")
            for product in kernels.products(shape)
            for config in kernels.candidates(product, 16)
        ]
        begin = time.perf_counter()
        kernels.compile_ahead([(product, 1, config) for _, product, config in jobs], WORKERS)
        self.report.say(f"  {len(jobs)} variants compiled in {time.perf_counter() - begin:.0f} s")
        rows: list[dict[str, Any]] = []
        for (shape, product), group in itertools.groupby(jobs, key=lambda job: job[:2]):
            if time.perf_counter() - begin > SWEEP_SECONDS:
                self.report.say(f"  {shape} {product.name}: left out, time is up")
                continue
            timed = []
            for *_, config in group:
                try:
                    timed.append((kernels.time_product(product, 1, config, self.device), config))
                except Exception as error:
                    self.report.say(f"  {shape} {product.name} {_short(config)}: {error!r:.120}")
            if not timed:
                continue
            timed.sort(key=lambda pair: pair[0]["us"])
            library = kernels.time_product(product, 1, None, self.device)
            rows += [row | {"shape": shape} for row, _ in timed] + [library | {"shape": shape}]
            best = timed[0][0]
            self.report.say(
                f"  {shape} {product.name:8}: ours {best['us']:7.2f} us {best['tb_per_s']:.2f} TB/s, "
                f"library {library['us']:7.2f} us {library['tb_per_s']:.2f} TB/s"
            )
            for row, config in timed[:6]:
                self.report.say(f"      {row['us']:7.2f} us {_short(config)}")
            self.configs[product.weight_rows, product.k, 16] = timed[0][1]
            self.report.figures["sweep"] = rows
            self.report.save()

    def tune(self) -> None:
        """What a kernel should ask for ahead, found inside whole steps: for all products alike, then for each."""
        jobs = [
            (shape, self._asking(shape, dict.fromkeys(PRODUCTS, (ahead, prefetch))))
            for shape in ("8B", "1B")
            for ahead in AHEADS
            for prefetch in PREFETCHES
        ]
        kernels.compile_steps_ahead(jobs, CONTEXT, WORKERS)
        rows = self.report.figures["tune"] = []
        for shape in ("8B", "1B"):
            whole, num_layers = self.model(shape), 8
            part = Weights(
                whole.weights.embedding, whole.weights.head, whole.weights.final_norm, whole.weights.layers[:num_layers]
            )
            step = uniform_step(1, 1, CONTEXT, whole.config.vocab_size, self.device)
            caches = random_caches(whole.config, -(-CONTEXT // PAGE_TOKENS), self.device, num_layers)

            def timed(
                asked: dict[str, tuple[int, int]], s: str = shape, p: Weights = part, i: Any = step, c: Any = caches
            ) -> float:
                ops = TritonOps(self.device, configs=self._asking(s, asked))
                model = Model(shape_config(s), p, ops, 2 * CONTEXT)
                us = 1e3 * median_ms(lambda: model.forward(i, c), replays=5, rounds=5)
                rows.append({"shape": s, "asked": dict(asked), "us": us})
                return us

            asked = min(
                (dict.fromkeys(PRODUCTS, (ahead, prefetch)) for ahead in AHEADS for prefetch in PREFETCHES), key=timed
            )
            alike = timed(asked)
            for name in PRODUCTS * 2:
                options = [asked | {name: (ahead, prefetch)} for ahead in AHEADS for prefetch in PREFETCHES]
                asked = min(options, key=timed)
            without = timed(dict.fromkeys(PRODUCTS, (0, 0)))
            self.report.say(
                f"  {shape}: {num_layers} layers and the head: asking nothing {without:.1f} us, "
                f"all alike {alike:.1f} us, each its own {timed(asked):.1f} us"
            )
            for name, (ahead, prefetch) in asked.items():
                self.report.say(f"      {name:8} {ahead:5} lines a thread, prefetch {prefetch}")
            self.configs |= self._asking(shape, asked)
            self.report.save()
        self.report.figures["configs"] = [(list(key), asdict(config)) for key, config in self.configs.items()]
        self._models.clear()
        torch.cuda.empty_cache()

    def _asking(self, shape: str, asked: dict[str, tuple[int, int]]) -> dict[tuple[int, int, int], LinearConfig]:
        """The configurations in use, with other bytes asked for ahead and slices prefetched."""
        found = {}
        ops = TritonOps(self.device, configs=self.configs)
        for product in kernels.products(shape):
            ahead, prefetch = asked[product.name]
            config = ops.config_for(1, product.weight_rows, product.k, torch.bfloat16, is_swiglu=product.swiglu)
            assert config is not None
            found[product.weight_rows, product.k, 16] = replace(config, ahead=ahead, prefetch=prefetch)
        return found

    def attention(self) -> None:
        cases = [("8B", 1, 1), ("8B", 1, 8), ("1B", 1, 1), ("8B", 32, 1), ("8B", 128, 1)]
        jobs = [(*case, CONTEXT, options) for case in cases for options in kernels.attention_candidates(case[1])]
        kernels.compile_attention_ahead(jobs, WORKERS)
        found = self.report.figures["attention"] = []
        for case in cases:
            shape, num_rows, row_tokens = case
            size = 2 * num_rows * CONTEXT * 2 * shape_config(shape).kv_size
            timed = []
            for options in kernels.attention_candidates(num_rows):
                try:
                    timed.append((kernels.time_attention(*case, CONTEXT, options, self.device), options))
                except Exception as error:
                    self.report.say(f"  {options}: {error!r:.150}")
            timed.sort(key=lambda pair: pair[0])
            default = kernels.time_attention(*case, CONTEXT, {"dependent": True}, self.device)
            self.report.say(
                f"  {shape} {num_rows:3} x {row_tokens}: default {default:.1f} us, "
                f"floor {size / self.bandwidth * 1e6:.1f} us"
            )
            for us, options in timed[:3]:
                self.report.say(f"      {us:7.2f} us {options}")
            found.append({"shape": shape, "rows": num_rows, "tokens": row_tokens, "timed": timed})
            self.report.save()

    def steps(self) -> None:
        """One forward pass in one graph, ours and naive, beside the floor."""
        self.report.say(f"  {'shape':6}{'rows':>5}{'tokens':>7}{'floor':>9}{'ours':>9}{'naive':>9}{'allowed':>9}  ms")
        found = self.report.figures["steps"] = []
        for shape, num_rows, row_tokens, allowed in STEPS:
            model = self.model(shape)
            config = model.config
            step = uniform_step(num_rows, row_tokens, CONTEXT, config.vocab_size, self.device)
            caches = random_caches(config, num_rows * -(-CONTEXT // PAGE_TOKENS), self.device)
            ours = replay_ms(captured(lambda m=model, s=step, c=caches: m.forward(s, c)))  # type: ignore[misc]
            del caches
            naive_model = NaiveModel(config, model.weights, num_rows, CONTEXT)
            tokens = step.tokens.view(num_rows, row_tokens)
            naive = replay_ms(captured(lambda m=naive_model, t=tokens: m.forward(t, CONTEXT)), rounds=3)  # type: ignore[misc]
            del naive_model
            torch.cuda.empty_cache()
            floor = 1e3 * step_floor_bytes(config, num_rows, CONTEXT) / self.bandwidth
            row = {
                "shape": shape, "rows": num_rows, "tokens": row_tokens, "floor_ms": floor,
                "ours_ms": statistics.median(ours), "ours_range": [min(ours), max(ours)],
                "naive_ms": statistics.median(naive), "allowed_ms": allowed,
            }  # fmt: skip
            found.append(row)
            self.report.say(
                f"  {shape:6}{num_rows:5}{row_tokens:7}{floor:9.2f}{row['ours_ms']:9.3f}{row['naive_ms']:9.2f}"
                f"{allowed:9.2f}"
            )

    def profile(self) -> None:
        """Where the time of a step goes, kernel by kernel."""
        from torch.profiler import ProfilerActivity, profile

        for shape, num_rows, row_tokens in (("8B", 1, 1), ("8B", 1, 8), ("1B", 1, 1), ("8B", 32, 1), ("8B", 128, 1)):
            model = self.model(shape)
            step = uniform_step(num_rows, row_tokens, CONTEXT, model.config.vocab_size, self.device)
            caches = random_caches(model.config, num_rows * -(-CONTEXT // PAGE_TOKENS), self.device)
            graph = captured(lambda m=model, s=step, c=caches: m.forward(s, c))  # type: ignore[misc]
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                for _ in range(3):
                    graph.replay()
                torch.cuda.synchronize()
            events = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
            self.report.say(f"  {shape} {num_rows} x {row_tokens}")
            for event in events[:9]:
                us = event.self_device_time_total / 3
                self.report.say(f"    {us:9.1f} us in {event.count // 3:4} of {event.key[:90]}")
            del graph, caches
            torch.cuda.empty_cache()

    def engine(self) -> None:
        """Tokens through the whole engine: scheduling, sampling, detokenising included."""
        found = self.report.figures["engine"] = []
        for shape, num_rows, temperature in (
            ("8B", 1, 0.0), ("8B", 1, 1.0), ("1B", 1, 0.0), ("1B", 1, 1.0), ("8B", 32, 0.0), ("8B", 128, 0.0),
        ):  # fmt: skip
            row = self._engine_row(shape, num_rows, temperature)
            found.append(row)
            self.report.say(
                f"  {shape} {num_rows:4} requests, temperature {temperature}: {row['step_ms']:.3f} ms a step "
                f"(of which forward {row['forward_ms']:.3f}, verify {row['verify_ms']:.3f}, "
                f"schedule {row['schedule_ms']:.3f})"
            )

    def _engine_row(self, shape: str, num_rows: int, temperature: float) -> dict[str, Any]:
        model = self.model(shape)
        prompt, new = CONTEXT - 64, 48 + num_rows  # while the last prompts are read, the first requests go on
        config = EngineConfig(
            speculation="off", max_sequences=num_rows, max_context=2 * CONTEXT, max_step_tokens=2048,
            cache_tokens=num_rows * (CONTEXT + 192) + 2 * CONTEXT, prefix_reuse=False,
        ).resolve(model_context=8192, model_path="random", draft_path=None, backend="torch")  # fmt: skip
        capacity = Capacity(num_rows + 1, config.cache_tokens, config.max_context, config.max_step_tokens)
        runner = TorchRunner(model, capacity)
        loaded = LoadedModel(runner, _Letters(model.config.vocab_size), "random", 0, 0)
        engine = Engine(loaded, {"none": NoDraft()}, config)
        rng = random.Random(0)
        for _ in range(num_rows):
            tokens = [rng.randrange(model.config.vocab_size) for _ in range(prompt)]
            engine.submit(tokens, SamplingParams(max_tokens=new, temperature=temperature, ignore_eos=True))
        taken: dict[str, list[float]] = {"step_ms": [], "forward_ms": [], "verify_ms": [], "schedule_ms": []}
        while engine.has_requests:
            begin = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - begin
            stats = engine.stats
            if stats.num_decode_rows == num_rows and not stats.num_prefill_tokens:
                for name, value in zip(
                    taken, (seconds, stats.forward_seconds, stats.verify_seconds, stats.schedule_seconds), strict=True
                ):
                    taken[name].append(1e3 * value)
        runner.close()
        torch.cuda.empty_cache()
        medians = {name: statistics.median(values[8:]) for name, values in taken.items()}
        return {"shape": shape, "rows": num_rows, "temperature": temperature, "context": prompt, **medians}

    def transformers(self) -> None:
        """`generate` of the same shapes, greedy, with its default cache."""
        from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

        self._models.clear()
        torch.cuda.empty_cache()
        found = self.report.figures["transformers"] = []
        for shape, new in (("8B", 24), ("1B", 24)):
            from benchmarks.gpu_models import SHAPES

            config = LlamaConfig(**{k: v for k, v in SHAPES[shape].items() if k != "architectures"})
            with torch.device(self.device):
                torch.set_default_dtype(torch.bfloat16)
                try:
                    model = LlamaForCausalLM(config).eval()
                finally:
                    torch.set_default_dtype(torch.float32)
            tokens = torch.randint(0, config.vocab_size, (1, CONTEXT - new), device=self.device)
            seconds = []
            for num_new in (2, new, 2, new):
                settings = GenerationConfig(
                    max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False, pad_token_id=0, eos_token_id=1
                )
                torch.cuda.synchronize()
                begin = time.perf_counter()
                model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=settings)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - begin)
            ms = 1e3 * (seconds[3] - seconds[2]) / (new - 2)
            found.append({"shape": shape, "ms_per_token": ms})
            self.report.say(f"  {shape}: {ms:.1f} ms a token")
            del model
            torch.cuda.empty_cache()


class _Letters:
    """A tokenizer for random weights: every token is a letter."""

    bos_text = eos_text = ""
    chat_template: str | None = None
    end_ids: frozenset[int] = frozenset()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return [ord(letter) % self.vocab_size for letter in text]

    def token_bytes(self, token: int) -> bytes:
        return bytes([97 + token % 26])

    def vocabulary(self) -> list[tuple[bytes, int]]:
        return [(b"%d" % token, 0) for token in range(self.vocab_size)]


def _short(config: LinearConfig) -> str:
    return f"{config.block_n}x{config.block_k} w{config.num_warps} s{config.num_stages} p{config.programs_per_sm}"


def _bandwidths(device: torch.device) -> dict[str, float]:
    data = torch.empty(1 << 31, dtype=torch.float32, device=device).normal_()
    other = torch.empty_like(data)
    return {
        "read_tb_per_s": data.nbytes / median_ms(data.sum, 3, 5) / 1e9,
        "copy_tb_per_s": 2 * data.nbytes / median_ms(lambda: other.copy_(data), 3, 5) / 1e9,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _driver() -> str:
    return _output("nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader")


def _commit() -> str:
    return _output("git", "rev-parse", "--short", "HEAD")


SECTIONS = ("machine", "check", "sweep", "tune", "attention", "steps", "profile", "engine", "transformers")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for gpu.txt and gpu.json")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="SECTION",
                        help=f"of {', '.join(SECTIONS)}")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=560, help="start no section after this (default: %(default)s)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu needs a CUDA GPU, and torch sees none", file=sys.stderr)
        return 2
    report = Report(options.out)
    bench = Bench(report, torch.device("cuda", 0))
    begin = time.perf_counter()
    failed = False
    for name in [section for section in SECTIONS if section in options.only]:
        started = time.perf_counter()
        if started - begin > options.seconds:
            report.say(f"{name}: left out, {started - begin:.0f} s have passed")
            continue
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

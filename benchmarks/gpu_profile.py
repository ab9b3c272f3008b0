"""Where the device's time goes in steps with drafts: by kernel, and how long the device waits between kernels.

    python -m benchmarks.gpu_profile MODEL.gguf TOKENS.json OUT [--cells 32:0 128:0:head:3 ...]

The models are those of `gpu_speculation.py`. A cell is concurrency:temperature[:setting]. Each runs steps without the
profiler, for their time; then a few with it. Kernels that overlap are counted once: `busy` is the time in which any
kernel runs, `idle` the rest. The profiler lengthens steps, mostly by waiting. OUT receives the table, the kernels of
the last steps in order, and a profile of the host's functions.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_cells import speculation_params
from benchmarks.gpu_padded_model import PaddedModel
from benchmarks.gpu_speculation import CONTEXT, EMBEDDED_HEAD, STEP_TOKENS
from benchmarks.prompts import block_of
from outpace.config import SamplingParams
from outpace.engine.engine import Engine

CELLS = ("8:0", "8:1", "32:0", "32:1", "128:0", "128:1")
WARM_UP, TIMED, PROFILED, HOST = 12, 40, 8, 20  # steps
MOST_LINES = 32  # kernels that are listed
KEPT_STEPS = 2  # whose kernels are written in order


def start(engine: Engine, prompts: Sequence[Sequence[int]], temperature: float, setting: str) -> list[Any]:
    """Submit requests and run their prefill."""
    params = SamplingParams(
        max_tokens=CONTEXT - max(map(len, prompts)) - 1, temperature=temperature, ignore_eos=True,
        speculation=speculation_params(setting),
    )  # fmt: skip
    requests = [engine.submit(prompt, params, seed=i) for i, prompt in enumerate(prompts)]
    while not all(request.num_output for request in requests):
        engine.step()
    return requests


def kernels_of(found: profile) -> list[tuple[str, float, float]]:
    """(name, begin, end) of everything that ran on the device, in milliseconds."""
    assert found.profiler is not None
    assert found.profiler.kineto_results is not None
    events = [event for event in found.profiler.kineto_results.events() if event.device_type() == DeviceType.CUDA]
    found_at = [(event.name(), 1e-6 * event.start_ns(), 1e-6 * event.duration_ns()) for event in events]
    return sorted(((name, begin, begin + length) for name, begin, length in found_at), key=itemgetter(1))


def busy(kernels: Sequence[tuple[str, float, float]]) -> float:
    total, last = 0.0, 0.0
    for _, begin, end in kernels:
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cells", nargs="+", default=list(CELLS))
    parser.add_argument("--host", action="store_true", help="also profile the host's functions")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    cells = [each.split(":", 2) for each in options.cells]
    most = max(int(cell[0]) for cell in cells)
    models = PaddedModel.build(options.model, EMBEDDED_HEAD, "cuda", most, CONTEXT, STEP_TOKENS)
    prompts = json.loads(options.tokens.read_text())["prompts"]
    costs = models.pair.engine(4, None).costs
    lines: list[str] = []
    (options.out / "order.txt").unlink(missing_ok=True)
    for concurrency, temperature, *rest in cells:
        setting = rest[0] if rest else "head:3"
        engine = models.pair.engine(int(concurrency), costs)
        few = block_of(prompts, int(concurrency), 0)[: int(concurrency)]
        requests = start(engine, few, float(temperature), setting)
        cell = f"{concurrency} requests, temperature {temperature}, {setting}"
        for _ in range(WARM_UP):
            engine.step()
        times, emitted = list[float](), 0
        parts: dict[str, float] = defaultdict(float)
        for _ in range(TIMED):
            begin = time.perf_counter()
            engine.step()
            times.append(1e3 * (time.perf_counter() - begin))
            emitted += engine.stats.num_emitted
            for name in ("schedule", "policy", "lookup", "draft", "forward", "hidden", "verify"):
                parts[name] += 1e3 * getattr(engine.stats, f"{name}_seconds") / TIMED
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(PROFILED):
                engine.step()
            torch.cuda.synchronize()
        kernels = kernels_of(found)
        span = kernels[-1][2] - kernels[0][1]
        by_name: dict[str, list[float]] = defaultdict(list)
        for name, begin, end in kernels:
            by_name[name[:90]].append(end - begin)
        first = len(lines)
        lines.append(
            f"{cell}: {statistics.median(times):.2f} ms a step ({min(times):.2f}-{max(times):.2f}), "
            f"{emitted / TIMED / int(concurrency):.2f} tokens; under the profiler {span / PROFILED:.2f}, "
            f"busy {busy(kernels) / PROFILED:.2f}, idle {(span - busy(kernels)) / PROFILED:.2f}"
        )
        lines.append("  host's parts, ms: " + ", ".join(f"{name} {value:.2f}" for name, value in parts.items()))
        for name, each in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:MOST_LINES]:
            lines.append(f"  {sum(each) / PROFILED:8.3f} ms {len(each) / PROFILED:7.1f} x  {name}")
        after = kernels[-1][2] - KEPT_STEPS * span / PROFILED
        order = "".join(f"{b - after:.4f} {e - b:.4f} {name[:60]}\n" for name, b, e in kernels if b >= after)
        with (options.out / "order.txt").open("a") as file:
            file.write(f"# {cell}\n{order}")
        if options.host:
            lines += host_functions(engine)
        for request in requests:
            engine.abort(request)
        print("\n".join(lines[first : first + 2]), flush=True)
        (options.out / "profile.txt").write_text("\n".join(lines) + "\n")
    return 0


def host_functions(engine: Engine) -> list[str]:
    """The functions of the host that take most time, by their own time."""
    watch = cProfile.Profile()
    watch.enable()
    for _ in range(HOST):
        engine.step()
    watch.disable()
    out = io.StringIO()
    pstats.Stats(watch, stream=out).sort_stats("tottime").print_stats(45)
    pstats.Stats(watch, stream=out).sort_stats("cumtime").print_stats(60)
    return [line for line in out.getvalue().splitlines() if line.strip()]


if __name__ == "__main__":
    sys.exit(main())

"""Compares the native backend with llama.cpp and with the memory bandwidth of the machine.

    python -m benchmarks.native [--model FILE] [--rounds N] [--tokens N] [--json FILE]

Decoding one token reads every weight once, so a step cannot be faster than weights / bandwidth: the floor. The
bandwidth is that of plain reads with as many threads: the best of several passes over as many bytes as a step reads (up
to 256 MB, more than any cache holds). On a shared machine the bandwidth can change by half or more within seconds, so
two shares of it are printed:

    in turns   best of nine passes of reads / best of nine steps right after them. It shows how near the kernels come to
               the memory bandwidth. The limit applies to this share.
    strictly   best pass of the whole run / every step. It counts changes of the machine's speed against the steps, so
               plain reads would also stay below 1.

Verifying a draft reads the weights once for all its tokens. The additional cost is arithmetic, and it decides whether
speculation can pay on a CPU.

Measured are: plain decoding with the whole engine; single forward passes of 1 to 16 tokens of one sequence; passes over
one token each of several sequences; prefill; and the share of a plain step spent outside the kernels. Both backends are
loaded in one process and take turns in random order, so that noise affects both alike. They pause between turns,
because llama.cpp's threads keep spinning for a while. Ratios are taken within a round; medians and quartiles are
printed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from tqdm import tqdm

from benchmarks.report import provenance, spread, write_json
from outpace import LLM, SamplingParams
from outpace.backends.base import Runner
from outpace.backends.curve import CURVE_SIZES, REST, measure_curves
from outpace.backends.native.runner import NativeRunner
from outpace.core import Row, StepPlan
from outpace.models.resolve import resolve_model

PROMPT = "Write a short note about the history of the bicycle and how it changed cities."
BANDWIDTH_BYTES = 256 << 20  # at most
FLOOR_PAIRS = 5  # groups of reads and steps per round
FLOOR_STEPS = 9  # steps of one token per group, after as many passes of reads
PREFILL_SIZES = (128, 512)
NUM_SEQUENCES = 8

# Limits; they are printed beside the results.
RATE_RATIOS = {"embedded": 1.6, "other": 1.2}  # tokens per second, native over llama.cpp, by model
FLOOR_SHARE = 0.75
STEP_LIMITS = {4: 1.5, 8: 2.5}
SEQUENCES_LIMIT = 2.5
HOST_LIMIT = 0.08
SUMMARY = ("rate_ratio", "floor_share", "least_floor_share", "host_share")  # printed as JSON in the last line


class InsideKernels:
    """Counts the seconds spent inside the native library by wrapping the call a step makes."""

    def __init__(self, runner: NativeRunner) -> None:
        self.seconds = 0.0
        self._forward: Callable[..., int] = runner._lib.forward
        setattr(runner._lib, "forward", self._timed)  # noqa: B010 - the attribute is unknown to a type checker

    def _timed(self, *arguments: Any) -> int:
        begin = perf_counter()
        status = self._forward(*arguments)
        self.seconds += perf_counter() - begin
        return status


def decode_rate(llm: LLM, num_tokens: int) -> float:
    """Tokens per second after the first token, with the whole engine."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    timing = llm.generate(PROMPT, params, progress=False)[0].outputs[0].timing
    llm.engine.scheduler.forget_kept()
    assert timing.total is not None and timing.time_to_first_token is not None
    return (num_tokens - 1) / (timing.total - timing.time_to_first_token)


def floors_and_steps(runner: NativeRunner, threads: int) -> Iterator[tuple[float, list[float]]]:
    """In turns: the least seconds to read the weights, and the seconds of steps of one token after 64."""
    size = min(runner.bytes_per_step, BANDWIDTH_BYTES)
    runner.forward(StepPlan([Row(0, 0, list(range(64)), 0)]))
    for _ in range(FLOOR_PAIRS):
        floor = runner.bytes_per_step / runner._lib.read_bandwidth(threads, size)
        steps = []
        for i in range(FLOOR_STEPS):
            begin = perf_counter()
            runner.forward(StepPlan([Row(0, 64, [100 + i], 1)]))
            steps.append(perf_counter() - begin)
            runner.truncate(0, 64)
        yield floor, steps
    runner.free(0)


def sequences_seconds(runner: Runner, counts: Sequence[int]) -> dict[int, float]:
    """Seconds of a forward pass over one token each of `count` sequences of length 64, by count."""
    for seq in range(max(counts)):
        runner.forward(StepPlan([Row(seq, 0, list(range(64)), 0)]))
    taken: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(3):
        for count in counts:
            begin = perf_counter()
            runner.forward(StepPlan([Row(seq, 64, [100 + seq], 1) for seq in range(count)]))
            taken[count].append(perf_counter() - begin)
            for seq in range(count):
                runner.truncate(seq, 64)
    for seq in range(max(counts)):
        runner.free(seq)
    return {count: statistics.median(seconds) for count, seconds in taken.items()}


def prefill_seconds(runner: Runner, size: int) -> float:
    begin = perf_counter()
    runner.forward(StepPlan([Row(0, 0, [i * 7 % 1000 for i in range(size)], 1)]))
    seconds = perf_counter() - begin
    runner.free(0)
    return seconds


def host_shares(llm: LLM, inside: InsideKernels, num_tokens: int) -> list[float]:
    """Time outside the library over time inside it, for every plain decode step of one sequence."""
    shares = []
    llm.engine.submit(
        llm.tokenizer.encode(PROMPT), SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    )
    while llm.engine.has_requests:
        inside.seconds = 0.0
        begin = perf_counter()
        llm.engine.step()
        total = perf_counter() - begin
        if llm.engine.stats.num_decode_rows == 1 and not llm.engine.stats.num_prefill_tokens:
            shares.append((total - inside.seconds) / inside.seconds)
    llm.engine.scheduler.forget_kept()
    return shares


class Table:
    """Prints medians with quartiles, and keeps the medians for the results file."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}

    def heading(self, text: str) -> None:
        print(f"\n{text:52}{'median':>9}   quartiles")

    def line(self, key: str, label: str, values: list[float], style: str, wanted: str = "") -> None:
        median = statistics.median(values)
        print(f"  {label:50}{median:9{style}}   {spread(values, style):24} {wanted}")
        self.figures[key] = median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file (default: the embedded SmolLM2)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens per run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each kind (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()

    llms = {
        name: LLM(options.model, backend=name, speculation="off", max_context=2048, cache_tokens=4096)
        for name in ("native", "llamacpp")
    }
    runners = {name: llm._target.runner for name, llm in llms.items()}
    native = runners["native"]
    assert isinstance(native, NativeRunner)
    threads = llms["native"].config.threads
    prefill_sizes = [n for n in PREFILL_SIZES if n <= native.capacity.max_step_tokens]

    rates: dict[str, list[float]] = {name: [] for name in llms}
    curves: dict[str, dict[int, list[float]]] = {name: {n: [] for n in CURVE_SIZES} for name in llms}
    together: dict[str, dict[int, list[float]]] = {name: {1: [], NUM_SEQUENCES: []} for name in llms}
    prefill: dict[str, dict[int, list[float]]] = {name: {n: [] for n in prefill_sizes} for name in llms}
    floors: list[float] = []
    plain: list[list[float]] = []
    names = list(llms)
    for _ in tqdm(range(options.rounds), desc="rounds"):
        random.shuffle(names)
        sleep(REST)
        for floor, steps in floors_and_steps(native, threads):
            floors.append(floor)
            plain.append(steps)
        for name in names:
            sleep(REST)
            rates[name].append(decode_rate(llms[name], options.tokens))
        for name, seconds in measure_curves({name: runners[name] for name in names}, CURVE_SIZES, 1).items():
            for n, values in seconds.items():
                curves[name][n].append(statistics.median(values))
        for name in names:
            sleep(REST)
            for n, taken in sequences_seconds(runners[name], (1, NUM_SEQUENCES)).items():
                together[name][n].append(taken)
            for n in prefill_sizes:
                prefill[name][n].append(prefill_seconds(runners[name], n))
    inside = InsideKernels(native)
    shares = [share for _ in range(3) for share in host_shares(llms["native"], inside, options.tokens)]

    def paired(top: list[float], bottom: list[float]) -> list[float]:
        return [a / b for a, b in zip(top, bottom, strict=True)]

    table = Table()
    table.heading("plain decoding with the engine")
    for name in llms:
        table.line(f"tokens_per_second.{name}", f"{name}, tokens per second", rates[name], ".1f")
    wanted = f">= {RATE_RATIOS['other' if options.model else 'embedded']}"
    table.line("rate_ratio", "native / llamacpp", paired(rates["native"], rates["llamacpp"]), ".2f", wanted)
    table.line("host_share", "host time over kernel time, native", shares, ".2%", f"<= {HOST_LIMIT:.0%}")
    table.heading(f"forward pass, ms ({native.bytes_per_step / 1e6:.0f} MB of weights)")
    table.line("floor_ms", f"floor: reading the weights, {threads} threads", [1e3 * s for s in floors], ".2f")
    steps = [seconds for group in plain for seconds in group]
    table.line("plain_ms", "native, 1 token, in turns with the floor", [1e3 * s for s in steps], ".2f")
    share = paired(floors, [min(group) for group in plain])
    table.line("floor_share", "in turns: floor / step, best of nine each", share, ".2f", f">= {FLOOR_SHARE}")
    table.line("least_floor_ms", "the least floor of the run", [1e3 * min(floors)], ".2f")
    table.line("least_floor_share", "strictly: the least floor / every step", [min(floors) / s for s in steps], ".2f")
    for name in llms:
        for n in CURVE_SIZES:
            values = [1e3 * s for s in curves[name][n]]
            table.line(f"step_ms.{name}.{n}", f"{name}, {n} token{'s' if n > 1 else ''}", values, ".2f")
    table.heading("step time over that of one token")
    for name in llms:
        for n in CURVE_SIZES[1:]:
            wanted = f"<= {STEP_LIMITS[n]}" if name == "native" and n in STEP_LIMITS else ""
            table.line(
                f"step_ratio.{name}.{n}", f"{name}, {n} tokens", paired(curves[name][n], curves[name][1]), ".2f", wanted
            )
        ratio = paired(together[name][NUM_SEQUENCES], together[name][1])
        wanted = f"<= {SEQUENCES_LIMIT}" if name == "native" else ""
        table.line(
            f"sequences_ratio.{name}", f"{name}, a token each of {NUM_SEQUENCES} sequences", ratio, ".2f", wanted
        )
    table.heading("prefill, tokens per second")
    for n in prefill_sizes:
        for name in llms:
            table.line(f"prefill.{name}.{n}", f"{name}, {n} tokens", [n / s for s in prefill[name][n]], ".0f")
        ratio = paired(prefill["llamacpp"][n], prefill["native"][n])
        table.line(f"prefill_ratio.{n}", f"native / llamacpp, {n} tokens", ratio, ".2f", ">= 1")
    if options.json:
        write_json(options.json, table.figures | {"provenance": provenance([resolve_model(options.model)])})
    print(json.dumps({key: table.figures[key] for key in SUMMARY}))


if __name__ == "__main__":
    main()

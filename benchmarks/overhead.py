"""The overhead of Outpace over llama.cpp: host time per step, and tokens per second against a minimal loop.

    python -m benchmarks.overhead [--model FILE] [--tokens N] [--rounds N] [--json FILE]

Host time is the time outside the llama.cpp calls of a plain decode step: scheduling, filling the batch, sampling,
detokenising, statistics. The bare loop only decodes, takes the argmax, and repeats. Rounds are interleaved in one
process in random order, so that noise affects all alike. Medians and quartiles are printed.
"""

from __future__ import annotations

import argparse
import ctypes as c
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.report import provenance, spread, write_json
from outpace import LLM, SamplingParams
from outpace.backends.llamacpp.runner import LlamaRunner
from outpace.models import llama_library as llama
from outpace.models.resolve import resolve_model

PROMPT = "Write a short note about the history of the bicycle and how it changed cities."
LIMIT = {1: 0.05, 8: 0.10}
BARE_RATIO = 0.95


class InsideLlama:
    """Counts the seconds spent inside llama.cpp by wrapping the two calls a step makes."""

    def __init__(self, runner: LlamaRunner) -> None:
        self.seconds = 0.0
        library = runner._lib
        for name in ("llama_decode", "llama_get_logits"):
            setattr(library, name, self._timed(getattr(library, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begin = perf_counter()
            result = function(*arguments)
            self.seconds += perf_counter() - begin
            return result

        return call


def host_share(llm: LLM, inside: InsideLlama, num_sequences: int, num_tokens: int, temperature: float) -> list[float]:
    """Host time over llama.cpp time, for every step in which all requests decode and none prefills."""
    params = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True)
    prompt = llm.tokenizer.encode(PROMPT)
    # Different first tokens, so that no prefix is reused.
    for i in range(num_sequences):
        llm.engine.submit([100 + i, *prompt], params)
    shares = []
    while llm.engine.has_requests:
        inside.seconds = 0.0
        begin = perf_counter()
        llm.engine.step()
        total = perf_counter() - begin
        if llm.engine.stats.num_decode_rows == num_sequences and not llm.engine.stats.num_prefill_tokens:
            shares.append((total - inside.seconds) / inside.seconds)
    return shares


def engine_rate(llm: LLM, num_tokens: int) -> float:
    begin = perf_counter()
    llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True), progress=False)
    seconds = perf_counter() - begin
    llm.engine.scheduler.forget_kept()
    return num_tokens / seconds


def bare_rate(llm: LLM, num_tokens: int) -> float:
    """A minimal loop over the same context: llama_decode, argmax, repeat. Tokens become text once, at the end."""
    runner = llm._target.runner
    assert isinstance(runner, LlamaRunner)
    library, context, size = runner._lib, runner._ctx, runner.vocab_size
    begin = perf_counter()
    prompt = llm.tokenizer.encode(PROMPT)
    token = np.array(prompt, np.int32)
    position = np.arange(len(prompt), dtype=np.int32)
    num_ids, zero = np.ones(len(prompt), np.int32), np.zeros(1, np.int32)
    ids = np.full(len(prompt), zero.ctypes.data, np.uintp)
    wants = np.zeros(len(prompt), np.int8)
    wants[-1] = 1
    batch = llama.Batch(
        len(prompt),
        token.ctypes.data,
        None,
        position.ctypes.data,
        num_ids.ctypes.data,
        ids.ctypes.data,
        wants.ctypes.data,
    )
    emitted: list[int] = []
    while True:
        assert library.llama_decode(context, batch) == 0
        memory = (c.c_float * size).from_address(library.llama_get_logits(context))
        emitted.append(int(np.frombuffer(memory, np.float32).argmax()))  # type: ignore[call-overload]
        if len(emitted) == num_tokens:
            break
        token[0], position[0], wants[0], batch.n_tokens = emitted[-1], len(prompt) + len(emitted) - 1, 1, 1
    b"".join(llm.tokenizer.token_bytes(token) for token in emitted).decode(errors="replace")
    seconds = perf_counter() - begin
    runner.free(0)
    return num_tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file (default: the embedded SmolLM2)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens per run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each kind (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()

    llm = LLM(options.model, backend="llamacpp", speculation="off", max_sequences=8)
    runner = llm._target.runner
    assert isinstance(runner, LlamaRunner)
    rates: dict[str, list[float]] = {"engine": [], "bare": []}
    kinds: list[tuple[str, Callable[[LLM, int], float]]] = [("engine", engine_rate), ("bare", bare_rate)]
    for _ in tqdm(range(options.rounds), desc="tokens per second"):
        random.shuffle(kinds)
        for name, measure in kinds:
            rates[name].append(measure(llm, options.tokens))
    ratios = [engine / bare for engine, bare in zip(rates["engine"], rates["bare"], strict=True)]

    inside = InsideLlama(runner)
    cells = [(n, t) for n in LIMIT for t in (0.0, 0.8)]
    shares: dict[tuple[int, float], list[float]] = {cell: [] for cell in cells}
    for _ in tqdm(range(options.rounds), desc="host time per step"):
        random.shuffle(cells)
        for n, temperature in cells:
            shares[n, temperature] += host_share(llm, inside, n, options.tokens, temperature)
            llm.engine.scheduler.forget_kept()

    print(f"\n{'tokens per second, one sequence':42}{'median':>9}   quartiles")
    for name, values in rates.items():
        print(f"  {name:40}{statistics.median(values):9.1f}   {spread(values, '.1f')}")
    print(f"  {'engine / bare, paired':40}{statistics.median(ratios):9.3f}   {spread(ratios, '.3f')}   >= {BARE_RATIO}")
    print(f"\n{'host time as a share of the llama.cpp call':42}{'median':>9}   quartiles")
    results: dict[str, Any] = {
        "engine_over_bare": {"median": statistics.median(ratios), "all": ratios},
        "host_share": [],
    }
    for (n, temperature), values in sorted(shares.items()):
        label = f"{n} sequence{'s' if n > 1 else ''}, temperature {temperature:g}"
        print(f"  {label:40}{statistics.median(values):9.2%}   {spread(values, '.2%')}   at most {LIMIT[n]:.0%}")
        results["host_share"].append(
            {"sequences": n, "temperature": temperature, "median": statistics.median(values), "steps": len(values)}
        )
    results["tokens_per_second"] = {name: statistics.median(values) for name, values in rates.items()}
    results["provenance"] = provenance([resolve_model(options.model)])
    if options.json:
        write_json(options.json, results)
    print(json.dumps(results["tokens_per_second"]))


if __name__ == "__main__":
    main()

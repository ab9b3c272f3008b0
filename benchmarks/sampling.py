"""The cost of sampling: host time per step with the native library's sampler and with the numpy reference.

    python -m benchmarks.sampling [--model FILE] [--backend NAME] [--rounds N] [--tokens N] [--json FILE]

Plain decoding with the whole engine, with one and eight sequences, at several settings. Both verifiers take turns in
one process in random order. They choose the same tokens, so the steps are the same. Host time is the time outside the
model's forward pass, from the engine's statistics. Medians and quartiles are over steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.report import provenance, spread, write_json
from outpace import LLM, SamplingParams
from outpace.backends.base import Verifier
from outpace.decoding.verification import HostExecutor, HostVerifier
from outpace.models.resolve import resolve_model

PROMPT = "Write a short note about the history of the bicycle and how it changed cities."
NUM_SEQUENCES = (1, 8)
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "temperature 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "temperature 0.8, top_k 40": {"temperature": 0.8, "top_k": 40},
}


def step_times(llm: LLM, verifier: Verifier, num: int, setting: dict[str, Any], num_tokens: int) -> list[list[float]]:
    """(host, forward) seconds of every step in which all requests decode and none prefills."""
    engine = llm.engine
    engine._forward_and_verify = HostExecutor(llm._target.runner, verifier)
    prompt = llm.tokenizer.encode(PROMPT)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1, **setting)
    for i in range(num):  # different first tokens, so that no prefix is reused
        engine.submit([100 + i, *prompt], params)
    times = []
    while engine.has_requests:
        engine.step()
        stats = engine.stats
        if stats.num_decode_rows == num and not stats.num_prefill_tokens:
            times.append([stats.host_seconds, stats.forward_seconds])
    engine.scheduler.forget_kept()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file (default: the embedded SmolLM2)")
    parser.add_argument("--backend", default="native", choices=["native", "llamacpp"], help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens per run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()

    llm = LLM(options.model, backend=options.backend, speculation="off", max_context=2048, max_sequences=8)
    native = llm._target.runner.capabilities.verifier
    if native is None:
        parser.error("the native library is missing; build it with python -m outpace.backends.native.build")
    verifiers: dict[str, Verifier] = {"numpy": HostVerifier(), "native": native}
    cells = [(name, num, label) for name in verifiers for num in NUM_SEQUENCES for label in SETTINGS]
    times: dict[tuple[str, int, str], list[list[float]]] = {cell: [] for cell in cells}
    for _ in tqdm(range(options.rounds), desc="rounds"):
        random.shuffle(cells)
        for name, num, label in cells:
            times[name, num, label] += step_times(llm, verifiers[name], num, SETTINGS[label], options.tokens)

    results: dict[str, Any] = {"steps": []}
    print(f"\n{'':42}{'host us':>9}   {'quartiles':20}{'of forward':>10}")
    for num in NUM_SEQUENCES:
        for label in SETTINGS:
            for name in verifiers:
                host = [1e6 * h for h, _ in times[name, num, label]]
                share = statistics.median(h / f for h, f in times[name, num, label])
                title = f"{num} x {label}, {name}"
                print(f"  {title:40}{statistics.median(host):9.0f}   {spread(host, '.0f'):20}{share:10.1%}")
                results["steps"].append(
                    {
                        "sequences": num,
                        "setting": label,
                        "verifier": name,
                        "host_us": statistics.median(host),
                        "share": share,
                    }
                )
    results["provenance"] = provenance([resolve_model(options.model)])
    if options.json:
        write_json(options.json, results)
    print(json.dumps({"backend": options.backend, "cells": len(results["steps"])}))


if __name__ == "__main__":
    main()

"""What deciding and learning cost: the policy's own time per step, in the simulator, by number of running requests.

    python -m benchmarks.policy_time [--rounds N] [--json FILE]
    python -m benchmarks.policy_time --engine [--backend NAME]      # in real steps of the embedded model

The policy is the engine's own; only models and the clock are simulated, on a machine whose plain step takes 4 ms. Timed
are the calls an engine makes in a step: which guesses are wanted, the decision, what came of it, the books. Between two
steps the processor's caches are filled with something else, as a model's weights do. Sizes take turns in one process,
so that a noisy machine hits all alike; medians and quartiles over steps, by what a step did. The last lines are the
constants of `outpace/bench/simulation/policy_time.py`: seconds of a step and of each row, fitted to these medians.

With `--engine` a story is told at temperature 1, where there is nothing to copy: what `auto` adds to steps that say one
token, all of it (guessing, deciding, learning and the books, with the processor's caches full of the model's weights),
beside what the same calls take with speculation off.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, get_args

import numpy as np
from tqdm import tqdm

from benchmarks.report import provenance, spread, write_json
from outpace import LLM, SamplingParams, SpeculationParams
from outpace.bench.simulation.runner import Simulation
from outpace.bench.simulation.world import Load, Proposing, Scenario, constant, either
from outpace.config import BackendName

SIZES = (1, 8, 64, 256)
PLAIN_STEP_MS = 4.0
LEAST_STEPS = 20  # for a median
CALLS = ("wanted_guesses", "decide", "observe_drafting", "observe", "account")
KINDS: dict[str, dict[str, Any]] = {
    "nothing to copy": {"text": Proposing(constant(0.05), guess_share=0.3)},
    "text": {"text": Proposing(either((0.1, 0.9)))},
    "text and model": {"text": Proposing(constant(0.7), guess_share=0.4), "model": Proposing(constant(0.75))},
}


WEIGHTS = np.ones(1 << 23)  # 64 MiB: more than the processor's caches hold


class Stopwatch:
    """Adds up the policy's calls; every `account` ends a step."""

    def __init__(self, decider: Any) -> None:
        self.steps: list[tuple[str, float]] = []  # what it did, seconds
        self._seconds = 0.0
        self._policy = decider.policy
        for name in CALLS:
            setattr(self._policy, name, self._timed(name, getattr(self._policy, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin = perf_counter()
            result = call(*arguments)
            self._seconds += perf_counter() - begin
            if name == "account":
                has_drafts = any(outcome.choice.depth for outcome in arguments[0])
                kind = "drafted" if has_drafts else "idle" if self._policy.is_resting else "decided"
                self.steps.append((kind, self._seconds))
                self._seconds = 0.0
                WEIGHTS.sum()
            return result

        return timed


def measure(kind: str, concurrency: int, seed: int) -> list[tuple[str, float]]:
    """Every step but the first few, in which nothing is warm: what it did, and milliseconds."""
    load = Load(concurrency, max(8, 2 * concurrency))
    scenario = Scenario(f"{kind} c{concurrency}", "h200", load, seed, mean_output=64, **KINDS[kind])
    simulation = Simulation(scenario, "ours")
    watch = Stopwatch(simulation.decider)
    simulation.run()
    return [(did, 1e3 * seconds) for did, seconds in watch.steps[5:]]


def fitted(medians: dict[int, float]) -> tuple[float, float]:
    """Milliseconds of a step and of each row, by least squares of relative errors."""
    sizes, values = np.array(list(medians)), np.array(list(medians.values()))
    table = np.stack([np.ones(sizes.size), sizes]).T / values[:, None]
    step, row = np.linalg.lstsq(table, np.ones(sizes.size), rcond=None)[0]
    return max(0.0, float(step)), max(0.0, float(row))


def engine_shares(backend: BackendName, rounds: int) -> dict[tuple[int, str], list[float]]:
    """What choosing and learning take of every plain step, by number of requests and mode."""
    shares: dict[tuple[int, str], list[float]] = {(size, mode): [] for size in (1, 8) for mode in ("off", "auto")}
    llm = LLM(backend=backend, max_sequences=8, max_context=2048)
    engine = llm.engine
    seconds = 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            nonlocal seconds
            begin = perf_counter()
            result = call(*arguments, **named)
            seconds += perf_counter() - begin
            return result

        return run

    setattr(engine, "_choose", timed(engine._choose))  # noqa: B010
    setattr(engine, "_learn", timed(engine._learn))  # noqa: B010
    prompt = llm.tokenizer.encode("Tell me a long story about a lighthouse keeper who finds a map.")
    for seed, (size, mode) in product(range(rounds), shares):
        wishes = SpeculationParams(mode="off" if mode == "off" else "auto")
        params = SamplingParams(temperature=1.0, max_tokens=128, ignore_eos=True, speculation=wishes)
        engine.forget()  # what was said before would be copied
        for i in range(size):
            engine.submit(prompt, params, seed=1000 * seed + i)
        while engine.has_requests:
            seconds, begin = 0.0, perf_counter()
            engine.step()
            stats = engine.stats
            if stats.num_decode_rows == size and not stats.num_prefill_tokens and not stats.num_drafted:
                shares[size, mode].append(seconds / (perf_counter() - begin))
    return shares


def print_engine(backend: BackendName, rounds: int) -> None:
    print(f"{'requests':>8} {'mode':>5} {'steps':>7} {'mean share':>11} {'median':>8}")
    for (size, mode), values in engine_shares(backend, rounds).items():
        mean, median = statistics.mean(values), statistics.median(values)
        print(f"{size:8} {mode:>5} {len(values):7} {mean:11.2%} {median:8.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", action="store_true", help="in the engine, with the embedded model")
    parser.add_argument("--backend", choices=get_args(BackendName), default="auto", help="(default: %(default)s)")
    options = parser.parse_args()
    if options.engine:
        print_engine(options.backend, options.rounds)
        return
    steps: dict[tuple[str, int], list[float]] = {}
    for seed in tqdm(range(options.rounds), unit="round"):
        for kind, size in product(KINDS, SIZES):
            for did, milliseconds in measure(kind, size, seed):
                steps.setdefault((did, size), []).append(milliseconds)
    print(f"{'step':8} {'requests':>8} {'steps':>7} {'median ms':>10} {'quartiles':>18} {'of a plain step':>16}")
    results: list[dict[str, Any]] = []
    medians: dict[str, dict[int, float]] = {}
    for (did, size), values in sorted(steps.items()):
        if len(values) < LEAST_STEPS:
            continue
        median = medians.setdefault(did, {})[size] = statistics.median(values)
        share = median / PLAIN_STEP_MS
        print(f"{did:8} {size:8} {len(values):7} {median:10.3f} {spread(values, '.3f'):>18} {share:16.1%}")
        quartiles = statistics.quantiles(values, n=4)
        results.append({"step": did, "requests": size, "steps": len(values), "quartiles_ms": quartiles})
    constants = {did: fitted(by_size) for did, by_size in medians.items()}
    for did, (step, row) in constants.items():
        print(f"{did:8} {1e3 * step:6.1f} us a step, {1e3 * row:6.2f} us a row")
    if options.json:
        found = {"plain_step_ms": PLAIN_STEP_MS, "sizes": results, "constants_ms": constants}
        write_json(options.json, {"provenance": provenance([])} | found)


if __name__ == "__main__":
    main()

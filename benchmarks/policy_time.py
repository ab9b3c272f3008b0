"""What deciding and learning cost: the policy's own time per step, in the simulator, by number of running requests.

    python -m benchmarks.policy_time [--rounds N] [--json FILE]

The policy is the engine's own; only models and the clock are simulated, on a machine whose plain step takes 4 ms. Timed
are the calls an engine makes in a step: which guesses are wanted, the decision, what came of it, the books. Sizes take
turns in one process, so that a noisy machine hits all alike; medians and quartiles over steps.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from tqdm import tqdm

from benchmarks.report import provenance, spread, write_json
from outpace.bench.simulation.runner import Simulation
from outpace.bench.simulation.world import Load, Proposing, Scenario, constant, either

SIZES = (1, 8, 64, 256)
PLAIN_STEP_MS = 4.0
CALLS = ("wanted_guesses", "decide", "observe_drafting", "observe", "account")
KINDS: dict[str, dict[str, Any]] = {
    "text": {"text": Proposing(either((0.1, 0.9)))},
    "text and model": {"text": Proposing(constant(0.7), guess_share=0.4), "model": Proposing(constant(0.75))},
}


class Stopwatch:
    """Adds up the policy's calls; every `account` ends a step."""

    def __init__(self, simulation: Simulation) -> None:
        self.steps: list[float] = []
        self._seconds = 0.0
        for name in CALLS:
            setattr(simulation._policy, name, self._timed(name, getattr(simulation._policy, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin = perf_counter()
            result = call(*arguments)
            self._seconds += perf_counter() - begin
            if name == "account":
                self.steps.append(self._seconds)
                self._seconds = 0.0
            return result

        return timed


def measure(kind: str, concurrency: int, seed: int) -> list[float]:
    """Milliseconds of every step but the first few, in which nothing is warm."""
    load = Load(concurrency, max(20, 2 * concurrency))
    scenario = Scenario(f"{kind} c{concurrency}", "gpu-flat", load, seed, mean_output=64, **KINDS[kind])
    simulation = Simulation(scenario, "ours")
    watch = Stopwatch(simulation)
    simulation.run()
    return [1e3 * seconds for seconds in watch.steps[5:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    steps: dict[tuple[str, int], list[float]] = {(kind, size): [] for kind in KINDS for size in SIZES}
    for seed in tqdm(range(options.rounds), unit="round"):
        for kind, size in steps:
            steps[kind, size] += measure(kind, size, seed)
    print(f"{'proposers':16} {'requests':>8} {'steps':>7} {'median ms':>10} {'quartiles':>18} {'of a plain step':>16}")
    results: list[dict[str, Any]] = []
    for (kind, size), values in steps.items():
        median = statistics.median(values)
        share = median / PLAIN_STEP_MS
        print(f"{kind:16} {size:8} {len(values):7} {median:10.3f} {spread(values, '.3f'):>18} {share:16.1%}")
        quartiles = statistics.quantiles(values, n=4)
        results.append({"proposers": kind, "requests": size, "steps": len(values), "quartiles_ms": quartiles})
    if options.json:
        write_json(options.json, {"provenance": provenance([]), "plain_step_ms": PLAIN_STEP_MS, "sizes": results})


if __name__ == "__main__":
    main()

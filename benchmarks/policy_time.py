"""The policy's own time per step, for deciding and learning, by number of running requests.

    python -m benchmarks.policy_time [--rounds N] [--json FILE]      # in the simulator
    python -m benchmarks.policy_time --engine [--backend NAME]      # in real steps of the embedded model

The policy is the engine's; only the models and the clock are simulated, with a plain step of 4 ms. The two calls of a
step, decide and learn, are timed, without the time of proposers. Half of the runs overwrite the processor's caches
between two steps, as a model's weights do when the CPU runs it (cold). With a GPU the caches stay (warm), and learning
from a step with drafts overlaps with the next one, so that it is left out. Sizes take turns in one process, so that
noise affects all alike. Medians and quartiles are over steps, by what a step did. The last lines are the constants of
`outpace/bench/simulation/policy_time.py`, fitted to all steps: the time per step, per row, and per row with a lookup or
a draft.

With `--engine`, the model writes a story at temperature 1, where lookups find little. Measured is all that `auto` adds
to plain steps (lookups, deciding, learning and accounting, with the processor's caches full of the model's weights),
beside the same calls with speculation off.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, get_args

import numpy as np
from scipy.optimize import nnls
from tqdm import tqdm

from benchmarks.report import provenance, spread, write_json
from outpace import LLM, SamplingParams, SpeculationParams
from outpace.bench.simulation.deciders import Ours
from outpace.bench.simulation.runner import OURS, Simulation
from outpace.bench.simulation.world import Load, Proposing, Scenario, constant, either
from outpace.config import BackendName

SIZES = (1, 8, 32, 64, 256)
PLAIN_STEP_MS = 4.0
DID = ("idle", "decided", "drafted", "repeated")
MIN_STEPS = 20  # for a median
KINDS: dict[str, dict[str, Any]] = {
    "nothing to copy": {"text": Proposing(constant(0.05), guess_share=0.3)},
    "text": {"text": Proposing(either((0.1, 0.9)))},
    "text and model": {"text": Proposing(constant(0.7), guess_share=0.4), "model": Proposing(constant(0.75))},
}
WEIGHTS = np.ones(1 << 23)  # 64 MiB: more than the processor's caches hold


@dataclass(slots=True)
class Timed:
    """A step: what it did, and the time of the policy."""

    did: str  # one of DID
    rows: int
    num_touched: int  # rows with a lookup or a draft
    milliseconds: float


class Stopwatch:
    """Times the policy's calls."""

    def __init__(self, policy: Any, *, cold: bool) -> None:
        self._cold = cold
        self.steps: list[Timed] = []
        self._decide, self._learn = policy.decide, policy.learn
        self._seconds = self._looking_up = 0.0
        policy.decide, policy.learn = self.decide, self.learn

    def decide(self, requests: Any, look_up: Callable[[Any], Any], num_prefill: int) -> Any:
        def timed_look_up(asks: Any) -> Any:
            begin = perf_counter()
            found = look_up(asks)
            self._looking_up += perf_counter() - begin
            return found

        begin = perf_counter()
        decision = self._decide(requests, timed_look_up, num_prefill)
        self._seconds = perf_counter() - begin - self._looking_up
        self._looking_up = 0.0
        return decision

    def learn(self, decision: Any, outcomes: Any, *rest: Any, **named: Any) -> None:
        begin = perf_counter()
        self._learn(decision, outcomes, *rest, **named)
        seconds = self._seconds
        has_ended = any(outcome.request.finish_reason is not None for outcome in outcomes)
        if self._cold or has_ended or not decision.has_drafts:  # else a device verifies the next drafts meanwhile
            seconds += perf_counter() - begin
        did = "drafted" if decision.has_drafts else "decided"
        did = "idle" if decision.is_idle else "repeated" if decision.is_repeated else did
        drafted = {row for row, choice in enumerate(decision.choices) if choice.depth}
        self.steps.append(Timed(did, len(decision.choices), len(drafted | set(decision.found)), 1e3 * seconds))
        if self._cold:
            WEIGHTS.sum()


def measure(kind: str, concurrency: int, seed: int, *, cold: bool) -> list[Timed]:
    """All steps but the first few, which warm up."""
    load = Load(concurrency, max(8, 2 * concurrency))
    scenario = Scenario(f"{kind} c{concurrency}", "h200", load, seed, mean_output=64, **KINDS[kind])
    simulation = Simulation(scenario, OURS)
    assert isinstance(simulation.decider, Ours)
    watch = Stopwatch(simulation.decider.session.policy, cold=cold)
    simulation.run()
    return watch.steps[5:]


def fitted(steps: Sequence[Timed]) -> list[float]:
    """Milliseconds per step, per row and per touched row: a least-squares fit of relative errors.

    It fits the medians of groups of steps with equal rows and a similar share of touched rows.
    """
    groups: dict[tuple[int, int], list[float]] = {}
    for step in steps:
        groups.setdefault((step.rows, 4 * step.num_touched // step.rows), []).append(step.milliseconds)
    groups_kept = {key: values for key, values in groups.items() if len(values) >= MIN_STEPS}
    medians = np.array([statistics.median(values) for values in groups_kept.values()])
    table = np.array([(1.0, rows, rows * quarters / 4) for rows, quarters in groups_kept])
    found, _ = nnls(table / medians[:, None], np.ones(medians.size))
    return [float(each) for each in found]


def engine_shares(backend: BackendName, rounds: int) -> dict[tuple[int, str], list[float]]:
    """Share of choosing and learning in the time of every plain step, by number of requests and mode."""
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

    for name in ("choose", "learn"):
        setattr(engine._session, name, timed(getattr(engine._session, name)))
    prompt = llm.tokenizer.encode("Tell me a long story about a lighthouse keeper who finds a map.")
    for seed, (size, mode) in product(range(rounds), shares):
        speculation = SpeculationParams(mode="off" if mode == "off" else "auto")
        params = SamplingParams(temperature=1.0, max_tokens=128, ignore_eos=True, speculation=speculation)
        engine.forget()  # otherwise proposers would copy earlier outputs
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
    parser.add_argument("--engine", action="store_true", help="measure in the engine, with the embedded model")
    parser.add_argument("--backend", choices=get_args(BackendName), default="auto", help="(default: %(default)s)")
    options = parser.parse_args()
    if options.engine:
        print_engine(options.backend, options.rounds)
        return
    steps: dict[str, list[Timed]] = {"cold": [], "warm": []}
    for seed in tqdm(range(options.rounds), unit="round"):
        for kind, size, caches in product(KINDS, SIZES, steps):
            steps[caches] += measure(kind, size, seed, cold=caches == "cold")
    results = [each for caches, timed in steps.items() for each in show(caches, timed)]
    constants = {caches: show_constants(caches, timed) for caches, timed in steps.items()}
    if options.json:
        found = {"plain_step_ms": PLAIN_STEP_MS, "sizes": results, "constants_ms": constants}
        write_json(options.json, {"provenance": provenance([])} | found)


def show(caches: str, steps: Sequence[Timed]) -> list[dict[str, Any]]:
    print(f"{caches:13} {'requests':>8} {'steps':>7} {'median ms':>10} {'quartiles':>18} {'of a plain step':>16}")
    results = []
    for did, size in product(DID, SIZES):
        values = [step.milliseconds for step in steps if (step.did, step.rows) == (did, size)]
        if len(values) < MIN_STEPS:
            continue
        median = statistics.median(values)
        share = median / PLAIN_STEP_MS
        print(f"  {did:11} {size:8} {len(values):7} {median:10.3f} {spread(values, '.3f'):>18} {share:16.1%}")
        quartiles = statistics.quantiles(values, n=4)
        found = {"caches": caches, "step": did, "requests": size, "steps": len(values), "quartiles_ms": quartiles}
        results.append(found)
    return results


def show_constants(caches: str, steps: Sequence[Timed]) -> dict[str, list[float]]:
    constants = {did: fitted([step for step in steps if step.did == did]) for did in DID}
    for did, values in constants.items():
        each, row, touched = (1e3 * value for value in values)
        line = f"{each:6.1f} us per step, {row:5.2f} us per row, {touched:5.2f} us per row with a lookup or draft"
        print(f"{caches} {did:8} {line}")
    return constants


if __name__ == "__main__":
    main()

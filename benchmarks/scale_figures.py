"""The tables of docs/scale.md: a 70B on several GPUs, and many replicas. Derived and simulated, not measured.

python -m benchmarks.scale_figures [--requests 40000] > benchmarks/results/scale.txt
"""

from __future__ import annotations

import argparse

from outpace.bench.provenance import commit_name
from outpace.bench.simulate import policy_named
from outpace.bench.simulation.fleet import Fleet, Rule, simulate
from outpace.bench.simulation.machines import DRAFTS
from outpace.bench.simulation.runner import Simulation
from outpace.bench.simulation.sharded import LLAMA_70B, SHARDED, communication_seconds, sharded_draft_seconds
from outpace.bench.simulation.world import Load, Proposing, Scenario, constant

_RULES: tuple[Rule, ...] = ("random", "better of two", "least busy", "prefix")
_CONTEXT = 1024.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40_000, help="requests to each fleet")
    options = parser.parse_args()
    print(f"# python -m benchmarks.scale_figures --requests {options.requests}; commit {commit_name()}")
    _steps()
    _placement()
    _policies()
    _fleets(options.requests)


def _steps() -> None:
    print("\n## A step of a 70B in bfloat16, milliseconds, 1,024 tokens of context\n")
    print("| GPUs | 1 request | of that sums | verifying 5 tokens of one | 32 requests | 32 requests x 5 tokens |")
    print("|---|---|---|---|---|---|")
    for name, law in SHARDED.items():
        num = _num_gpus(name)
        sums = communication_seconds(LLAMA_70B, num, 1)
        cells = [law.of(1, 1, _CONTEXT), sums, law.of(1, 5, _CONTEXT), law.of(32, 32, _CONTEXT)]
        cells.append(law.of(32, 160, _CONTEXT))
        print(f"| {num} | " + " | ".join(f"{1e3 * each:.2f}" for each in cells) + " |")


def _placement() -> None:
    print("\n## A draft of 4 tokens by a 1B: on one GPU, or sharded like the target; milliseconds, one request\n")
    print("| GPUs | target step | draft on one | sharded | gain at acceptance 0.6 / 0.75, on one | sharded |")
    print("|---|---|---|---|---|---|")
    alone = DRAFTS["h200"].of(1, 1)
    for name, law in SHARDED.items():
        num = _num_gpus(name)
        plain, verify, spread = law.of(1, 1, _CONTEXT), law.of(1, 5, _CONTEXT), sharded_draft_seconds(num)
        gains = [
            " / ".join(f"{_tokens(rate, 4) * plain / (verify + 4 * draft):.2f}" for rate in (0.6, 0.75))
            for draft in (alone, spread)
        ]
        times = f"{1e3 * plain:.2f} | {4e3 * alone:.2f} | {4e3 * spread:.2f}"
        print(f"| {num} | {times} | {gains[0]} | {gains[1]} |")


def _tokens(rate: float, depth: int) -> float:
    return sum(rate**i for i in range(depth + 1))


def _policies() -> None:
    print("\n## `auto` over plain decoding in the simulator, the 1B on one GPU, greedy\n")
    print("| GPUs | requests | acceptance | auto / plain | oracle / plain |")
    print("|---|---|---|---|---|")
    for name in SHARDED:
        for concurrency in (1, 8, 32):
            for rate in (0.6, 0.8):
                scenario = Scenario(
                    name=f"{name} c{concurrency} {rate}",
                    machine=name,
                    load=Load(concurrency, max(40, 2 * concurrency)),
                    seed=1,
                    model=Proposing(constant(rate)),
                    draft_share=None,
                )
                speeds = {
                    policy: Simulation(scenario, policy_named(policy)).run().tokens_per_second
                    for policy in ("plain", "auto", "oracle")
                }
                shares = f"{speeds['auto'] / speeds['plain']:.2f} | {speeds['oracle'] / speeds['plain']:.2f}"
                print(f"| {_num_gpus(name)} | {concurrency} | {rate} | {shares} |")


def _fleets(num_requests: int) -> None:
    print("\n## Routing: share of requests whose prefix is cached, and seconds to the first token (mean, P99)\n")
    print("| replicas | load | " + " | ".join(_RULES) + " |")
    print("|---|---|" + "---|" * len(_RULES))
    for num_replicas in (10, 100, 1000):
        for load in (0.6, 0.85):
            fleet = Fleet(num_replicas=num_replicas, load=load, num_requests=max(num_requests, 60 * num_replicas))
            cells = []
            for rule in _RULES:
                found = simulate(fleet, rule)
                cells.append(f"{found.hit_share:.0%}, {found.mean_wait:.2f}, {found.p99_wait:.2f}")
            print(f"| {num_replicas} | {load} | " + " | ".join(cells) + " |")


def _num_gpus(name: str) -> int:
    return int(name.split("-")[1].removesuffix("xh200"))


if __name__ == "__main__":
    main()

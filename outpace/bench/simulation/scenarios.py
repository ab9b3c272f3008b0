"""The scenarios: combinations of a machine, a load and an acceptance pattern.

Every scenario runs with several seeds. The seeds of a published table are derived from the hash of its commit, so that
a policy cannot be tuned on them.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from outpace.bench.simulation.machines import DRAFTS, GPUS, HEADS, MACHINES
from outpace.bench.simulation.world import (
    Load,
    Proposing,
    Scenario,
    constant,
    either,
    sliding,
    switching,
)
from outpace.core import MeasuredAcceptance

_STATIONARY = (0.1, 0.4, 0.6, 0.8, 0.95)
_CPU_LOADS = (1, 4, 8)
_GPU_LOADS = (1, 8, 32, 128, 256)
_HEAD = MeasuredAcceptance(greedy=(0.62, 0.62, 0.62, 0.62), sampled=(0.48, 0.48, 0.48, 0.48))


def all_scenarios() -> list[Scenario]:
    """Several hundred; `quick_scenarios` is a sample of them."""
    made: list[Scenario] = []
    for machine in MACHINES:
        for concurrency in _GPU_LOADS if machine in GPUS else _CPU_LOADS:
            made += _of_machine(machine, concurrency)
    return made


def quick_scenarios() -> list[Scenario]:
    chosen = all_scenarios()[::23]
    return [_shortened(scenario) for scenario in chosen if scenario.load.concurrency <= 32]


def seeded(scenario: Scenario, source: str, index: int) -> Scenario:
    """The scenario with a seed derived from a text, such as a commit hash, and the number of the run."""
    digest = hashlib.sha256(f"{source}/{scenario.name}/{index}".encode()).digest()
    return replace(scenario, seed=int.from_bytes(digest[:4], "big"))


def _of_machine(machine: str, concurrency: int) -> list[Scenario]:
    closed = Load(concurrency, max(80, 3 * concurrency))
    own_draft = None if machine in DRAFTS else 0.12
    made = []

    def add(
        kind: str,
        *,
        load: Load = closed,
        text: Proposing | None = None,
        model: Proposing | None = None,
        temperature: float = 0.0,
        draft_share: float | None = own_draft,
        measured: MeasuredAcceptance | None = None,
        drifts: bool = False,
        adversarial: bool = False,
    ) -> None:
        made.append(
            Scenario(
                name=f"{machine} c{concurrency} {kind}",
                machine=machine,
                load=load,
                seed=0,
                text=text,
                model=model,
                temperature=temperature,
                draft_share=draft_share,
                measured=measured,
                drifts=drifts,
                adversarial=adversarial,
            )
        )

    for rate in _STATIONARY:
        add(f"text {rate}", text=Proposing(constant(rate)))
    for rate in _STATIONARY:
        add(f"model {rate}", model=Proposing(constant(rate)))
    add("text, half guessed", text=Proposing(constant(0.85), guess_share=0.5))
    add("text mixed", text=Proposing(either((0.1, 0.9))))
    add("model mixed", model=Proposing(constant(0.2, 0.9)))
    add("both", text=Proposing(constant(0.7), guess_share=0.4), model=Proposing(constant(0.75)))
    if machine in HEADS:
        text = Proposing(constant(0.4, 0.9), guess_share=0.2)
        add("head", text=text, model=Proposing(constant(0.45, 0.75)), measured=_HEAD)
        copies = Proposing(switching(0.05, 0.95, 40))
        add("head, copies", text=copies, model=Proposing(constant(0.45, 0.75)), measured=_HEAD, drifts=True)
        add("head hot", text=text, model=Proposing(constant(0.35, 0.6)), measured=_HEAD, temperature=1.0)
    add("dear draft", model=Proposing(constant(0.8)), draft_share=0.4)
    add("hot", text=Proposing(constant(0.3, 0.5)), temperature=1.0)
    add("vain", text=Proposing(constant(0.15), overconfidence=3.0))
    add("text switching", text=Proposing(switching(0.05, 0.9, 40)), drifts=True)
    add("text sliding", text=Proposing(sliding(0.9, 0.1)), drifts=True)
    add("model sliding", model=Proposing(sliding(0.2, 0.9)), drifts=True)
    add("model switching", model=Proposing(switching(0.2, 0.9, 80)), drifts=True)
    add("text spiteful", text=Proposing(constant(0.9), rejects_after_draft=True), adversarial=True)
    if concurrency > 1:
        for intensity in (0.5, 0.9, 1.5):
            load = Load(concurrency, closed.num_requests, intensity)
            add(f"poisson {intensity} text mixed", load=load, text=Proposing(either((0.1, 0.9))))
        bursts = Load(concurrency, closed.num_requests, 0.8, bursty=True)
        add("bursts model 0.75", load=bursts, model=Proposing(constant(0.75)))
        add("bursts text 0.2", load=bursts, text=Proposing(constant(0.2)))
    return made


def _shortened(scenario: Scenario) -> Scenario:
    load = replace(scenario.load, num_requests=max(30, 2 * scenario.load.concurrency))
    return replace(scenario, load=load)

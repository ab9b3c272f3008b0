"""The facts that no policy can see: which draft tokens will be accepted, and when requests arrive.

A request has one random draw per position and proposer, made before anything runs, so every policy gets the same ones.
The draft token at a position is accepted if its draw is below the position's rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outpace.bench.simulation.machines import DRAFTS, HEADS, MACHINES, StepLaw
from outpace.bench.simulation.sharded import SHARDED, SHARDED_DRAFTS
from outpace.core import MeasuredAcceptance

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Rates:
    """P(accepted) at each output position of one request, and the random draws that decide."""

    rate: Floats
    draws: Floats
    confidence: Floats  # what the proposer reports there
    has_guess: NDArray[np.bool_]
    rejects_after_draft: bool = False  # an adversary: nothing is accepted right after a step with a draft

    def hit(self, position: int, *, drafted_before: bool) -> bool:
        if position >= self.rate.size or (self.rejects_after_draft and drafted_before):
            return False
        return bool(self.draws[position] < self.rate[position])


@dataclass(slots=True)
class SimulatedRequest:
    """A request as drawn before anything runs."""

    arrival: float
    prompt_length: int
    output_length: int
    temperature: float
    text: Rates | None  # a lookup proposer
    model: Rates | None  # a draft model


RateProcess = Callable[[np.random.Generator, int], Floats]


def constant(low: float, high: float | None = None) -> RateProcess:
    """One rate for the whole request: fixed, or drawn between `low` and `high`."""

    def make(rng: np.random.Generator, length: int) -> Floats:
        rate = low if high is None else rng.uniform(low, high)
        return np.full(length, rate)

    return make


def either(rates: tuple[float, ...]) -> RateProcess:
    """One of several rates for each request, so that a batch is mixed."""

    def make(rng: np.random.Generator, length: int) -> Floats:
        return np.full(length, rng.choice(rates))

    return make


def switching(low: float, high: float, mean_length: float) -> RateProcess:
    """A rate that alternates, as in a text that changes between prose and copies."""

    def make(rng: np.random.Generator, length: int) -> Floats:
        rate, filled, is_high = np.empty(length), 0, bool(rng.integers(2))
        while filled < length:
            run = 1 + int(rng.exponential(mean_length))
            rate[filled : filled + run] = high if is_high else low
            filled += run
            is_high = not is_high
        return rate

    return make


def sliding(start: float, end: float) -> RateProcess:
    """A rate that changes slowly within the request."""

    def make(rng: np.random.Generator, length: int) -> Floats:
        return np.linspace(start, end, length)

    return make


@dataclass(frozen=True, slots=True)
class Proposing:
    """How a kind of proposer behaves in a scenario."""

    rates: RateProcess
    guess_share: float = 1.0  # share of positions where a lookup finds a draft
    noise: float = 0.5  # of its confidence, in log-odds
    overconfidence: float = 0.7  # of its confidence, in log-odds
    rejects_after_draft: bool = False

    def draw(self, rng: np.random.Generator, length: int) -> Rates:
        rate = self.rates(rng, length)
        inside = np.clip(rate, 0.02, 0.98)
        odds = np.log(inside / (1 - inside)) + self.overconfidence + self.noise * rng.normal(size=length)
        return Rates(
            rate=rate,
            draws=rng.uniform(size=length),
            confidence=1 / (1 + np.exp(-odds)),
            has_guess=rng.uniform(size=length) < self.guess_share,
            rejects_after_draft=self.rejects_after_draft,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """`concurrency` requests always running or, with `intensity`, arrivals at that share of plain decoding capacity."""

    concurrency: int
    num_requests: int
    intensity: float | None = None
    bursty: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    machine: str
    load: Load
    seed: int
    text: Proposing | None = None
    model: Proposing | None = None
    draft_share: float | None = 0.12  # cost of a draft pass over a target pass; None: the machine's own draft
    measured: MeasuredAcceptance | None = None  # the model is a head, with what was measured when it was trained
    temperature: float = 0.0
    mean_output: int = 128
    noise: float = 0.03  # of a step's time
    drifts: bool = False  # acceptance changes over time; excluded from the ratio to the oracle
    adversarial: bool = False

    @property
    def law(self) -> StepLaw:
        return MACHINES[self.machine] if self.machine in MACHINES else SHARDED[self.machine]

    @property
    def draft_law(self) -> StepLaw | None:
        if self.model is None:
            return None
        if self.measured is not None:
            return HEADS[self.machine]
        if self.draft_share is not None:
            return self.law.scaled(self.draft_share)
        return DRAFTS[self.machine] if self.machine in DRAFTS else SHARDED_DRAFTS[self.machine]

    def requests(self) -> list[SimulatedRequest]:
        rng = np.random.default_rng(self.seed)
        arrivals = self._arrivals(rng)
        made = []
        for arrival in arrivals:
            length = int(np.clip(rng.exponential(self.mean_output), 48, 512))
            made.append(
                SimulatedRequest(
                    arrival=float(arrival),
                    prompt_length=int(rng.integers(32, 256)),
                    output_length=length,
                    temperature=self.temperature,
                    text=self.text.draw(rng, length) if self.text is not None else None,
                    model=self.model.draw(rng, length) if self.model is not None else None,
                )
            )
        return made

    def _arrivals(self, rng: np.random.Generator) -> Floats:
        count = self.load.num_requests
        if self.load.intensity is None:
            return np.zeros(count)
        capacity = self.load.concurrency / (self.law.of(self.load.concurrency, self.load.concurrency, 200.0))
        gap = self.mean_output / (capacity * self.load.intensity)
        gaps = rng.exponential(gap, size=count)
        if self.load.bursty:  # ten requests together, then a pause of ten gaps
            gaps = np.where(np.arange(count) % 10 == 0, 10 * gap, 0.0)
        return np.cumsum(gaps)


@dataclass(slots=True)
class Result:
    """The result of one policy in one scenario with one seed."""

    policy: str
    tokens_per_second: float
    tpots: list[tuple[int, float]]  # per finished request: output tokens, seconds per token
    estimated_speedup: float | None = None


def jitter(rng: np.random.Generator, size: float) -> float:
    """A random factor around 1, because step times vary."""
    return float(np.exp(size * rng.normal()))

"""What is true in the simulation and no policy may see: which draft tokens will be accepted, and when requests come.

A request is a row of coins, one per position and proposer, drawn before anything runs: every policy meets the same
ones. The draft token at a position is accepted where its coin falls below the position's rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outpace.bench.simulation.machines import DRAFTS, MACHINES, StepLaw

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Rates:
    """P(accepted) at each output position of one request, and the coins that decide."""

    rate: Floats
    coins: Floats
    confidence: Floats  # what a proposer would say of itself there
    has_guess: NDArray[np.bool_]
    spites: bool = False  # an adversary: nothing is accepted right after a step with a draft

    def hit(self, position: int, *, drafted_before: bool) -> bool:
        if position >= self.rate.size or (self.spites and drafted_before):
            return False
        return bool(self.coins[position] < self.rate[position])


@dataclass(slots=True)
class SimulatedRequest:
    """What a scenario knows of a request before anything runs."""

    arrival: float
    prompt_length: int
    output_length: int
    temperature: float
    text: Rates | None  # a proposer that guesses from text
    model: Rates | None  # a draft model


RateProcess = Callable[[np.random.Generator, int], Floats]


def constant(low: float, high: float | None = None) -> RateProcess:
    """One rate for the whole request, the same for all or drawn between two."""

    def make(rng: np.random.Generator, length: int) -> Floats:
        rate = low if high is None else rng.uniform(low, high)
        return np.full(length, rate)

    return make


def either(rates: tuple[float, ...]) -> RateProcess:
    """Requests of several kinds in one batch."""

    def make(rng: np.random.Generator, length: int) -> Floats:
        return np.full(length, rng.choice(rates))

    return make


def switching(low: float, high: float, mean_length: float) -> RateProcess:
    """A text that turns from prose to copying and back."""

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
    guess_share: float = 1.0  # of positions where a proposer that guesses from text has something to say
    noise: float = 0.5  # of its confidence, in log-odds
    flattery: float = 0.7  # how much it overrates itself, in log-odds
    spites: bool = False

    def draw(self, rng: np.random.Generator, length: int) -> Rates:
        rate = self.rates(rng, length)
        inside = np.clip(rate, 0.02, 0.98)
        odds = np.log(inside / (1 - inside)) + self.flattery + self.noise * rng.normal(size=length)
        return Rates(
            rate=rate,
            coins=rng.uniform(size=length),
            confidence=1 / (1 + np.exp(-odds)),
            has_guess=rng.uniform(size=length) < self.guess_share,
            spites=self.spites,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """`concurrency` requests always running, or, with a rate, arrivals at `intensity` of what plain decoding takes."""

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
    draft_share: float | None = 0.12  # cost of a draft model's pass over the target's; None: the machine's own draft
    temperature: float = 0.0
    mean_output: int = 128
    noise: float = 0.03  # of a step's time
    drifts: bool = False  # acceptance changes in time: less is asked of a policy
    adversarial: bool = False

    @property
    def law(self) -> StepLaw:
        return MACHINES[self.machine]

    @property
    def draft_law(self) -> StepLaw | None:
        if self.model is None:
            return None
        return DRAFTS[self.machine] if self.draft_share is None else self.law.scaled(self.draft_share)

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
        if self.load.bursty:  # ten together, then a pause as long as ten gaps
            gaps = np.where(np.arange(count) % 10 == 0, 10 * gap, 0.0)
        return np.cumsum(gaps)


@dataclass(slots=True)
class Result:
    """What one policy made of one scenario with one seed."""

    policy: str
    tokens_per_second: float
    tpots: list[tuple[int, float]]  # of every request that ended: its output tokens, seconds for each of them
    estimated_speedup: float | None = None


def jitter(rng: np.random.Generator, size: float) -> float:
    """A factor around one: no step takes exactly what the law says."""
    return float(np.exp(size * rng.normal()))

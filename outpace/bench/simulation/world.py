"""What is true in the simulation and no policy may see: what steps cost, and which draft tokens will be accepted.

A request is a row of coins, one per position and proposer, drawn before anything runs: every policy meets the same
ones. The draft token at a position is accepted where its coin falls below the position's rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepLaw:
    """Seconds of a forward pass by its tokens: straight between points, then straight on; stairs where asked for."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    stair: int = 0  # tokens are rounded up to a multiple of this
    row_context_seconds: float = 0.0

    def of(self, rows: int, tokens: int, context: float = 0.0) -> float:
        if self.stair:
            tokens = -(-tokens // self.stair) * self.stair
        last, before = self.sizes[-1], self.sizes[-2]
        if tokens > last:
            slope = (self.seconds[-1] - self.seconds[-2]) / (last - before)
            base = self.seconds[-1] + slope * (tokens - last)
        else:
            base = float(np.interp(tokens, self.sizes, self.seconds))
        return base + rows * context * self.row_context_seconds

    def scaled(self, factor: float) -> StepLaw:
        return StepLaw(
            self.sizes, tuple(factor * s for s in self.seconds), self.stair, factor * self.row_context_seconds
        )


# Shapes of real machines; seconds of the first point are the cost of one token alone.
MACHINES: dict[str, StepLaw] = {
    # Measured on two cores with benchmarks.native for SmolLM2: the native backend and llama.cpp.
    "cpu-native": StepLaw((1, 2, 4, 8, 16, 64), (4.2e-3, 4.5e-3, 5.3e-3, 7.3e-3, 12.5e-3, 44e-3)),
    "cpu-llamacpp": StepLaw((1, 2, 4, 8, 16, 64), (9e-3, 14e-3, 25e-3, 42e-3, 70e-3, 250e-3)),
    # A large GPU with an 8B model: the weights are read in any case, arithmetic shows beyond about 64 tokens.
    "gpu-flat": StepLaw((1, 64, 256, 2048), (4.0e-3, 4.3e-3, 7.5e-3, 46e-3), row_context_seconds=3e-8),
    "gpu-stairs": StepLaw((16, 64, 256, 2048), (4.0e-3, 4.4e-3, 8.0e-3, 50e-3), stair=16),
    "compute-bound": StepLaw((1, 64), (1e-3, 60e-3)),
    "stairs-of-8": StepLaw((8, 16, 24, 64), (5e-3, 9e-3, 13e-3, 33e-3), stair=8),
}


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
    draft_share: float = 0.15  # cost of a draft model's pass, as a share of the target's
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
        return self.law.scaled(self.draft_share) if self.model is not None else None

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
    """What one policy made of one scenario."""

    policy: str
    tokens_per_second: float
    p99_tpot: float
    mean_tpot: float
    estimated_speedup: float | None = None
    policy_ms: float = 0.0  # deciding and learning, of the median step


def jitter(rng: np.random.Generator, size: float) -> float:
    """A factor around one: no step takes exactly what the law says."""
    return float(np.exp(size * rng.normal()))

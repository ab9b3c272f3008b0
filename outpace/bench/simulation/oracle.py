"""The oracle: our policy with true rates and costs instead of learned ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from outpace.bench.simulation.proposers import TEXT, Running
from outpace.speculation.acceptance_model import AcceptanceModel, Prospects
from outpace.speculation.seats import NEURAL
from outpace.speculation.sweep import survival


class TrueRates(AcceptanceModel):
    """The oracle's: it reads the world instead of learning."""

    def __init__(self) -> None:
        super().__init__([TEXT, NEURAL])
        self.known: dict[int, Running] = {}  # by the identity of a request's prospects

    def given_confidence(self, method: str, prospects: Prospects, confidence: Sequence[float]) -> list[float]:
        return self.forecast(method, prospects, len(confidence))

    def survival(self, method: str, prospects: Prospects, confidence: Sequence[float], least: float) -> list[float]:
        return survival(self.forecast(method, prospects, len(confidence)))

    def forecast(self, method: str, prospects: Prospects, depth: int) -> list[float]:
        running = self.known[id(prospects)]
        rates = running.world.text if method == TEXT else running.world.model
        assert rates is not None
        if rates.spites and running.drafted_last:
            return [1e-6] * depth
        true = rates.rate[running.position : running.position + depth].tolist()
        return [min(max(rate, 1e-6), 0.999) for rate in true] + [1e-6] * (depth - len(true))

    def forecast_survival(self, method: str, prospects: Prospects, depth: int, least: float) -> list[float]:
        return survival(self.forecast(method, prospects, depth))

    def evidence(self, method: str) -> float:
        return float("inf")

    def certainty(self, methods: Iterable[str]) -> float:
        return 1.0

    def cautious_share(self, method: str, temperature: int, depth: int) -> float:
        return 1.0

    def end(self, prospects: Prospects) -> None:
        del self.known[id(prospects)]

    def observe(self, *_: Any) -> None:
        pass

    def observe_guess(self, *_: Any) -> None:
        pass

    def observe_unsaid(self, *_: Any) -> None:
        pass

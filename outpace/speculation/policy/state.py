"""Data types of the policy.

`RequestState` is what the policy keeps of a request, with its `SpeculationSettings`. `Choice` is what it chose for the
request in a step, and `Outcome` is the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outpace.config import MAX_DEPTH, WORKLOADS, ResolvedConfig, SpeculationMode
from outpace.core import Draft, Request, Verdict
from outpace.speculation.policy.acceptance import RequestShift, temperature_class
from outpace.speculation.policy.budget import Backoff, Budget
from outpace.speculation.policy.tunables import TUNABLES
from outpace.speculation.proposers.base import DraftAsk, Proposer


@dataclass(slots=True)
class Choice:
    """What one request does in this step."""

    method: str
    depth: int
    draft: Draft | None = None  # a lookup; the engine shortens it if the cache has less room
    ask: DraftAsk | None = None  # or a draft to be made by a proposer
    expected: float = 1.0  # tokens emitted

    @staticmethod
    def plain() -> Choice:
        """One shared object: it never changes."""
        return _PLAIN

    def shorten(self, depth: int) -> None:
        """Reduce the depth to what the cache has room for."""
        self.depth = depth
        if self.ask is not None:
            self.ask.depth = depth
        if self.draft is not None:
            self.draft = Draft(self.draft.tokens[:depth], self.draft.proposer, None, self.draft.confidence[:depth])


_PLAIN = Choice("none", 0)


@dataclass(slots=True)
class Outcome:
    """The verdict on a choice."""

    request: Request
    choice: Choice
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """What a request may use, resolved once from its parameters and the engine's config."""

    mode: SpeculationMode
    method: str  # for mode `on`
    lookups: tuple[str, ...]
    models: tuple[str, ...]
    max_depth: int
    temperature: int  # class
    log_odds: float  # initial shift of its acceptance, from the workload it names

    @classmethod
    def of(
        cls, request: Request, config: ResolvedConfig, proposers: Mapping[str, Proposer], can_speculate: bool
    ) -> SpeculationSettings:
        asked = request.params.speculation
        mode: SpeculationMode = (asked.mode or config.speculation) if can_speculate else "off"
        methods = config.methods if asked.method is None else (asked.method,)
        loaded = [name for name in methods if name in proposers and name != "none" and proposers[name].serves(request)]
        default = config.auto_depth if mode == "auto" else config.depth
        return cls(
            mode,
            asked.method or config.method,
            tuple(name for name in loaded if proposers[name].is_lookup),
            tuple(name for name in loaded if not proposers[name].is_lookup),
            min(default if asked.max_depth is None else asked.max_depth, MAX_DEPTH),
            temperature_class(request.params.temperature),
            WORKLOADS[asked.workload].log_odds if asked.workload is not None else 0.0,
        )


@dataclass(slots=True)
class Mean:
    """A moving average that starts as the arithmetic mean."""

    value: float = 0.0
    count: int = 0

    def add(self, seen: float) -> None:
        self.count += 1
        self.value += max(TUNABLES.smoothing, 1.0 / self.count) * (seen - self.value)

    def shrunk(self, of_others: float) -> float:
        """With few observations, close to the mean of others."""
        weight = TUNABLES.prior_trials
        return (self.count * self.value + weight * of_others) / (self.count + weight)


@dataclass(slots=True)
class RequestState:
    """What the policy keeps of a request."""

    settings: SpeculationSettings
    budget: Budget
    num_earned: int = 0  # output tokens for which the budget has earned
    shifts: dict[str, RequestShift] = field(default_factory=dict)  # by proposer
    saved: Mean = field(default_factory=Mean)  # seconds, by a lookup
    lookup: Backoff = field(default_factory=Backoff)  # when it is looked up
    booked: tuple[float, float] = (0.0, 0.0)  # of the seconds of steps without drafts: those known to its counts

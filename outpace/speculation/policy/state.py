"""The nouns of a decision: what the policy keeps of a request, what it chose for it, and what came of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outpace.config import MAX_DEPTH, WORKLOADS, ResolvedConfig, SpeculationMode
from outpace.core import Draft, Request, Verdict
from outpace.speculation.policy.acceptance import Own, temperature_class
from outpace.speculation.policy.budget import Backoff, Budget
from outpace.speculation.policy.tunables import TUNABLES
from outpace.speculation.proposers.base import DraftAsk, Proposer


@dataclass(slots=True)
class Choice:
    """What one request does in this step."""

    method: str
    depth: int
    draft: Draft | None = None  # looked up already; the engine cuts it to the depth there is room for
    ask: DraftAsk | None = None  # or to be asked for
    expected: float = 1.0  # tokens emitted

    @staticmethod
    def plain() -> Choice:
        """The same one for all: nothing about it ever changes."""
        return _PLAIN

    def shorten(self, depth: int) -> None:
        """There is room for so much only."""
        self.depth = depth
        if self.ask is not None:
            self.ask.depth = depth
        if self.draft is not None:
            self.draft = Draft(self.draft.tokens[:depth], self.draft.proposer, None, self.draft.confidence[:depth])


_PLAIN = Choice("none", 0)


@dataclass(slots=True)
class Outcome:
    """What came of a choice."""

    request: Request
    choice: Choice
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a request may have, settled once from its own wishes and the engine's."""

    mode: SpeculationMode
    method: str  # of drafts made in any case
    lookups: tuple[str, ...]
    models: tuple[str, ...]
    max_depth: int
    temperature: int  # class
    log_odds: float  # added to what is expected of its drafts

    @classmethod
    def of(
        cls, request: Request, config: ResolvedConfig, proposers: Mapping[str, Proposer], can_speculate: bool
    ) -> Wishes:
        asked = request.params.speculation
        mode: SpeculationMode = (asked.mode or config.speculation) if can_speculate else "off"
        methods = config.methods if asked.method is None else (asked.method,)
        loaded = [name for name in methods if name in proposers and name != "none"]
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
class Recent:
    """A mean over what was seen lately and, while that is little, over what others have seen."""

    total: float = 0.0  # older ones fading,
    count: float = 0.0  # as their number does

    def add(self, seen: float) -> None:
        fade = 1.0 - TUNABLES.smoothing / 2.0
        self.total = fade * self.total + seen
        self.count = fade * self.count + 1.0

    def mean(self, of_others: float, weight: float = TUNABLES.prior_weight) -> float:
        return (self.total + weight * of_others) / (self.count + weight)


@dataclass(slots=True)
class Lookup:
    """How looking up drafts of one proposer has paid for one request."""

    saved_seconds: Recent = field(default_factory=Recent)  # by each lookup
    backoff: Backoff = field(default_factory=Backoff)


@dataclass(slots=True)
class Mean:
    """A moving average that begins as a plain one."""

    value: float = 0.0
    count: int = 0

    def add(self, seen: float) -> None:
        self.count += 1
        self.value += max(TUNABLES.smoothing / 4.0, 1.0 / self.count) * (seen - self.value)


@dataclass(frozen=True, slots=True)
class PlainTime:
    """Seconds of steps without drafts, since the start."""

    spent: float = 0.0
    plain: float = 0.0  # of them, what plain decoding takes without a policy


@dataclass(slots=True)
class RequestState:
    """What the policy keeps of a request."""

    wishes: Wishes
    budget: Budget
    lookups: dict[str, Lookup]
    gain: Recent  # draft tokens expected to be accepted in a step with drafts; also where those were others'
    plain_time: PlainTime  # until this request was last booked
    own: dict[str, Own] = field(default_factory=dict)  # how its drafts differ from others', by proposer: given their
    own_forecasts: dict[str, Own] = field(default_factory=dict)  # confidence, and before they are made

    def trusted_gain(self, of_others: float) -> float:
        """The usual gain, as far as it can be counted on: the less, the deeper the request is in debt all the same."""
        return self.gain.mean(of_others, 2.0) * min(
            1.0, max(0.0, 1.0 + 1.5 * self.budget.balance / TUNABLES.request_grant)
        )

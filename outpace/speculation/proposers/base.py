"""The contract of a proposer, and the base of those that look drafts up.

A proposer sees requests and returns drafts of any length up to the depth asked for; an empty draft is an ordinary
answer. It keeps whatever state it likes per request and brings that state up to date when next asked: a request that is
not drafted for costs it nothing. `request.tokens` is append-only, so catching up is reading on from where it stopped.

The policy knows no proposer by name. What it needs to know of one is here: whether it is a lookup, what its drafts
cost (`measure_costs`, corrected by `timing`), what it has to catch up with (`num_uncached`), and how sure it is
(`Draft.confidence`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from outpace.core import Draft, Request, Verdict
from outpace.speculation.costs.curves import DraftCosts
from outpace.speculation.costs.timing import DraftTiming

_TIMED_TEXT = 256  # tokens a lookup is timed on
_TIMED_LOOKUPS = 8


@dataclass(slots=True)
class DraftAsk:
    """A draft is wanted for this request, of at most `depth` tokens (at least one)."""

    request: Request
    depth: int
    goes_on: Callable[[float], bool] | None = None
    """Asked by a draft model before each token, with its confidence in whatever it will draw: False ends the draft."""


class Proposer(Protocol):
    name: str
    timing: DraftTiming | None  # of the latest call, where a model was run
    is_lookup: bool
    """Its drafts cost microseconds and no model: they can be had before deciding whether to use them."""

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """One draft per ask, in order. Requests in one call are distinct."""
        ...

    def observe(self, request: Request, verdict: Verdict) -> None:
        """The verdict on this request's last draft, after its tokens were added to `request.tokens`."""
        ...

    def release(self, request: Request) -> None:
        """Forget the request: it finished, was aborted, or lost its place. Unknown requests are ignored."""
        ...

    def num_uncached(self, request: Request) -> int:
        """Tokens it would have to compute before drafting, each at a cost; 0 where that is as good as free."""
        ...

    def prepare(self, request: Request) -> None:
        """There is time to take the request's text in, should drafting need that."""
        ...

    def measure_costs(self, scratch: Request) -> DraftCosts:
        """What its drafts cost here. Called while nothing runs; `scratch` is a request to try it on."""
        ...

    def warm_up(self) -> None:
        """Costs are known from an earlier start: do what only the first draft would pay for."""
        ...

    def forget(self) -> None:
        """Drop what was learned from requests that are over."""
        ...


class NoDraft:
    """Plain decoding as a proposer; also the base of lookups and of those that have nothing to hear or forget."""

    name = "none"
    is_lookup = True
    timing: DraftTiming | None = None

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [Draft([], self.name) for _ in asks]

    def observe(self, request: Request, verdict: Verdict) -> None:
        pass

    def release(self, request: Request) -> None:
        pass

    def num_uncached(self, request: Request) -> int:
        return 0

    def prepare(self, request: Request) -> None:
        pass

    def measure_costs(self, scratch: Request) -> DraftCosts:
        """A lookup in a text that repeats itself, after it was taken in: as costly as lookups come."""
        scratch.tokens = [i % 37 for i in range(_TIMED_TEXT)]
        try:
            self.propose([DraftAsk(scratch, 8)])
            begin = perf_counter()
            for i in range(_TIMED_LOOKUPS):
                scratch.tokens.append(i)
                self.propose([DraftAsk(scratch, 8)])
            return DraftCosts(lookup_seconds=(perf_counter() - begin) / _TIMED_LOOKUPS)
        finally:
            scratch.tokens = list(scratch.prompt)  # what stood in it is no text to learn from
            self.release(scratch)

    def warm_up(self) -> None:
        pass

    def forget(self) -> None:
        pass

"""The interface of a proposer, and the base class of lookups.

A proposer returns a draft for each request, of any length up to the given depth; a draft may be empty. It may keep
state per request and updates it when it next drafts, so a request without drafts costs nothing. `request.tokens` is
append-only: a proposer catches up by processing the tokens after the last one it has seen.

The policy does not know proposers by name. It uses whether one is a lookup, the cost of its drafts (`measure_costs`,
corrected by `timing`), how many tokens it must catch up on (`num_uncached`), and its confidence (`Draft.confidence`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from outpace.backends.base import DraftStop
from outpace.core import Draft, MeasuredAcceptance, Request, Verdict
from outpace.decoding.tree import Tree
from outpace.speculation.costs.curves import DraftCosts
from outpace.speculation.costs.timing import DraftTiming

_TIMED_TEXT = 256  # tokens a lookup is timed on
_TIMED_LOOKUPS = 8


@dataclass(slots=True)
class DraftAsk:
    """Asks for a draft of at most `depth` tokens for a request, or of a tree of as many; `depth` is at least one."""

    request: Request
    depth: int
    goes_on: DraftStop | None = None
    """A draft model calls this before it draws a token, with its confidence; False ends the draft."""
    prefix: Sequence[int] = ()
    """Tokens assumed to follow the request's own: a lookup drafts what comes after them."""


class Proposer(Protocol):
    name: str
    timing: DraftTiming | None  # of the latest call, if it ran a model
    measured: MeasuredAcceptance | None  # what the policy may expect before it has seen drafts; None: nothing is known
    is_lookup: bool
    """Drafts take microseconds and no model, so the policy can get them before it decides whether to use them."""
    drafts_whole: bool
    """A draft always has its full depth: it cannot stop where its confidence is low."""
    tree: Tree | None  # the shape of its drafts that are as deep as this tree; None: every draft is a chain

    def serves(self, request: Request) -> bool:
        """Whether it can ever have a draft for this request. The answer never changes."""
        ...

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """One draft per ask, in order. Requests in one call are distinct."""
        ...

    def observe(self, request: Request, verdict: Verdict) -> None:
        """Receive the verdict on the request's last draft, after the emitted tokens were added to `request.tokens`."""
        ...

    def release(self, request: Request) -> None:
        """Forget a request that finished, was aborted or was preempted. Unknown requests are ignored."""
        ...

    def num_uncached(self, request: Request) -> int:
        """Tokens to compute before drafting; 0 if that costs almost nothing."""
        ...

    def prepare(self, request: Request) -> None:
        """Called when there is time to process the request's tokens, if drafting needs that."""
        ...

    def measure_costs(self, scratch: Request) -> DraftCosts:
        """Measure the cost of drafts. Called while nothing runs; `scratch` is a request to measure on."""
        ...

    def warm_up(self, scratch: Request) -> None:
        """Called instead of `measure_costs` if costs are known: do the one-time work of a first draft."""
        ...

    def forget(self) -> None:
        """Drop what was learned from finished requests."""
        ...


def num_tokens(proposer: Proposer, depth: int) -> int:
    """Tokens of a draft of this depth: what the target verifies, and what is asked for."""
    return depth if proposer.tree is None or depth < proposer.tree.depth else len(proposer.tree)


def depth_of(proposer: Proposer, num_tokens: int) -> int:
    """How deep a draft of so many tokens is."""
    return num_tokens if proposer.tree is None else min(num_tokens, proposer.tree.depth)


class NoDraft:
    """Plain decoding as a proposer, and the base class of lookups and of proposers without state."""

    name = "none"
    is_lookup = True
    drafts_whole = False
    tree: Tree | None = None
    measured: MeasuredAcceptance | None = None
    timing: DraftTiming | None = None

    def serves(self, request: Request) -> bool:
        return True

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
        """Time lookups in a repetitive text that is already processed: the most expensive kind."""
        scratch.tokens = [i % 37 for i in range(_TIMED_TEXT)]
        try:
            self.propose([DraftAsk(scratch, 8)])
            begin = perf_counter()
            for i in range(_TIMED_LOOKUPS):
                scratch.tokens.append(i)
                self.propose([DraftAsk(scratch, 8)])
            return DraftCosts(lookup_seconds=(perf_counter() - begin) / _TIMED_LOOKUPS)
        finally:
            scratch.tokens = list(scratch.prompt)  # the timed text must not be learned
            self.release(scratch)

    def warm_up(self, scratch: Request) -> None:
        pass

    def forget(self) -> None:
        pass

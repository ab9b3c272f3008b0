"""The contract of a proposer, and the one that never proposes.

A proposer sees requests and returns drafts of any length up to the depth asked for; an empty draft is an ordinary
answer. It keeps whatever state it likes per request and brings that state up to date when next asked: a request that is
not drafted for costs it nothing. `request.tokens` is append-only, so catching up is reading on from where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from outpace.core import Draft, Request, Verdict


@dataclass(slots=True)
class DraftAsk:
    """A draft is wanted for this request, of at most `depth` tokens (at least one)."""

    request: Request
    depth: int


class Proposer(Protocol):
    name: str

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """One draft per ask, in order. Requests in one call are distinct."""
        ...

    def observe(self, request: Request, verdict: Verdict) -> None:
        """The verdict on this request's last draft, after its tokens were added to `request.tokens`."""
        ...

    def release(self, request: Request) -> None:
        """Forget the request: it finished, was aborted, or lost its place. Unknown requests are ignored."""
        ...

    def forget(self) -> None:
        """Drop what was learned from requests that are over."""
        ...


class NoDraft:
    """Plain decoding as a proposer; also the base of those that have nothing to hear or forget."""

    name = "none"

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [Draft([], self.name) for _ in asks]

    def observe(self, request: Request, verdict: Verdict) -> None:
        pass

    def release(self, request: Request) -> None:
        pass

    def forget(self) -> None:
        pass

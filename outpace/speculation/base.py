"""The contract of a proposer, and the one that never proposes.

A proposer sees requests and returns drafts of any length up to the depth asked for; an empty draft is an ordinary
answer. It keeps whatever state it likes per request and brings that state up to date when next asked: a request that is
not drafted for costs it nothing. `request.tokens` is append-only, so catching up is reading on from where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outpace.core import Draft, Request, Verdict


@dataclass(slots=True)
class DraftAsk:
    """A draft is wanted for this request, of at most `depth` tokens (at least one)."""

    request: Request
    depth: int
    goes_on: Callable[[float], bool] | None = None
    """Asked by a draft model before each token, with its confidence in whatever it will draw: False ends the draft."""


@dataclass(slots=True)
class DraftTiming:
    """Where the time of one call to a draft model went."""

    forwards: list[tuple[int, int, float, float]] = field(default_factory=list)  # rows, tokens, mean context, seconds
    reading_seconds: float = 0.0  # of the forwards: catching up with texts not followed before,
    num_read: int = 0  # and their tokens, where nothing else was done in that time
    draw_seconds: float = 0.0  # shaping and drawing, on the host
    num_drawn: int = 0
    undivided: tuple[int, int, float, float] | None = None  # rows, passes, context, seconds: both in one go

    def divide(self, pass_seconds: Callable[[int, int, float], float]) -> float:
        """Of what was done in one go, the passes took what they usually take (rows, tokens, context), and the rest was
        reading; returns what the first pass would have taken without it."""
        if self.undivided is None:
            return 0.0
        rows, passes, context, seconds = self.undivided
        usual = min(pass_seconds(rows, rows, context), seconds / passes)
        self.reading_seconds += seconds - passes * usual
        self.undivided = None
        return usual


class Proposer(Protocol):
    name: str
    timing: DraftTiming | None  # of the latest call, where a model was run
    guesses_from_text: bool
    """Guesses cost microseconds and no model: they can be had before deciding whether to use them."""

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """One draft per ask, in order. Requests in one call are distinct."""
        ...

    def observe(self, request: Request, verdict: Verdict) -> None:
        """The verdict on this request's last draft, after its tokens were added to `request.tokens`."""
        ...

    def release(self, request: Request) -> None:
        """Forget the request: it finished, was aborted, or lost its place. Unknown requests are ignored."""
        ...

    def num_unread(self, request: Request) -> int:
        """Tokens it would have to read before drafting, each at a cost; 0 where reading is as good as free."""
        ...

    def read(self, request: Request) -> None:
        """There is time to take its text in, should guessing from it need that."""
        ...

    def forget(self) -> None:
        """Drop what was learned from requests that are over."""
        ...


class NoDraft:
    """Plain decoding as a proposer; also the base of those that have nothing to hear or forget."""

    name = "none"
    guesses_from_text = True
    timing: DraftTiming | None = None

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [Draft([], self.name) for _ in asks]

    def observe(self, request: Request, verdict: Verdict) -> None:
        pass

    def release(self, request: Request) -> None:
        pass

    def num_unread(self, request: Request) -> int:
        return 0

    def read(self, request: Request) -> None:
        pass

    def forget(self) -> None:
        pass

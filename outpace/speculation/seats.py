"""What the policy keeps of a request, and what it says of it in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outpace.config import SpeculationMode
from outpace.core import Draft, Request, Verdict
from outpace.speculation.acceptance_model import Prospects
from outpace.speculation.base import DraftAsk

NEURAL = "draft"


@dataclass(slots=True)
class Choice:
    """What one request does in this step."""

    method: str
    depth: int
    draft: Draft | None = None  # guessed already; the engine cuts it to the depth there is room for
    ask: DraftAsk | None = None  # or to be asked for
    expected: float = 1.0  # tokens said

    @classmethod
    def plain(cls) -> Choice:
        return cls("none", 0)

    def shorten(self, depth: int) -> None:
        """There is room for so much only."""
        self.depth = depth
        if self.ask is not None:
            self.ask.depth = depth
        if self.draft is not None:
            self.draft = Draft(self.draft.tokens[:depth], self.draft.proposer, None, self.draft.confidence[:depth])


@dataclass(slots=True)
class Outcome:
    """What came of a choice."""

    request: Request
    choice: Choice
    verdict: Verdict


@dataclass(slots=True)
class Seat:
    """A request's wishes, settled once, and how it has fared."""

    prospects: Prospects
    mode: SpeculationMode
    method: str  # of drafts made in any case
    guessers: tuple[str, ...]
    may_draft: bool  # by a model
    most: int  # depth
    patience: int = 1  # steps between guesses
    wait: int = 0  # until the next
    guess_value: float = 0.0  # seconds that guesses have saved lately, each
    num_asked: int = 0  # guesses
    unused: Sequence[int] = ()  # what is left of the latest guess that was not used: right so far,
    num_right: int = 0  # for so many tokens
    hits: dict[str, float] = field(default_factory=dict)  # tokens of each guesser that were right lately, a guess
    gain: float = 1.0  # over plain decoding, in its latest steps with drafts in them
    has_read: bool = False  # the draft model has read its text
    num_said: int = 0  # since then,
    num_said_drafting: int = 0  # and of them, in steps with a draft of that model
    staked_seconds: float = 0.0  # on reading its text for the first time
    unpaid_seconds: float = 0.0  # of reading this request's text with the draft model
    unpaid_tokens: int = 0


@dataclass(slots=True)
class Step:
    """The step being decided."""

    requests: Sequence[Request]
    seats: list[Seat]
    guesses: Mapping[int, Sequence[Draft]]  # by request id
    num_prefill: int
    context: float  # tokens a request has, on average
    plain_seconds: float
    slot_seconds: float  # one draft token more
    guess_seconds: float  # spent already
    was_unfair: bool = False  # what would have paid for the batch was left undone for a request's sake
    weighed: list[int] = field(default_factory=list)  # rows that are in `auto`
    reason: str = "nothing to weigh"

    @property
    def rows(self) -> int:
        return len(self.requests)

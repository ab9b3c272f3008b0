"""What the policy keeps of a request, and what it says of it in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outpace.config import MAX_DEPTH, WORKLOADS, ResolvedConfig, SpeculationMode
from outpace.core import Draft, Request, Verdict
from outpace.speculation.acceptance_model import Prospects, temperature_class
from outpace.speculation.base import DraftAsk, Proposer

NEURAL = "draft"


@dataclass(slots=True)
class Choice:
    """What one request does in this step."""

    method: str
    depth: int
    draft: Draft | None = None  # guessed already; the engine cuts it to the depth there is room for
    ask: DraftAsk | None = None  # or to be asked for
    expected: float = 1.0  # tokens said

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


@dataclass(slots=True)
class Seat:
    """A request's wishes, settled once, and how it has fared."""

    prospects: Prospects
    mode: SpeculationMode
    method: str  # of drafts made in any case
    guessers: tuple[str, ...]
    may_draft: bool  # by a model
    most: int  # depth
    guess_value: float = 0.0  # seconds that guesses have saved lately, each
    num_asked: int = 0  # guesses, the latest
    asked_at: int = -1  # this step
    is_eager: bool = False  # to be asked about at once
    unused: Sequence[int] = ()  # what is left of the latest guess that was not used: right so far,
    unused_from: int = 0  # up to this place of the text
    num_right: int = 0  # tokens on end that were as guessed, whether the guess was used or only compared
    hits: dict[str, float] = field(default_factory=dict)  # tokens of each guesser that were right lately, a guess
    gain: float = 1.0  # over plain decoding, in its latest steps with drafts in them
    reading_seconds: float = 0.0  # that the draft model has read texts in, its own and others', while this waited
    has_read: bool = False  # the draft model has read its text,
    expected_output: float = 0.0  # when it was expected to say so many tokens in all
    too_dear_until: int = 0  # to read: looked at again in that step
    probed_at: int = -(1 << 30)  # the step of its latest probe
    num_guessed: int = 0  # tokens said in steps with a guess, for which no draft model is needed
    num_said: int = 0  # since its text was read,
    num_said_drafting: int = 0  # and of them, in steps with a draft of that model
    lead_seconds: float = 0.0  # that it was ahead of plain decoding before that,
    has_won: bool = False  # and is again
    unpaid_seconds: float = 0.0  # of reading this request's text with the draft model
    unpaid_tokens: int = 0


@dataclass(slots=True)
class Step:
    """The step being decided."""

    number: int
    requests: Sequence[Request]
    seats: list[Seat]
    guesses: Mapping[int, Sequence[Draft]]  # by request id
    num_prefill: int
    context: float  # tokens a request has, on average
    plain_seconds: float
    slot_seconds: float = 0.0  # one draft token more, where anything could be drafted,
    first_slot_seconds: float = 0.0  # and the first of them: nothing, below the edge of a stair
    guess_seconds: float = 0.0  # spent already
    weighed: list[int] = field(default_factory=list)  # rows that are in `auto`
    reason: str = "nothing to weigh"
    is_vetoed: bool = False  # there was a plan that pays, but not for everybody
    is_probe: bool = False  # a draft model drafts only to find out about it
    measures: bool = False  # plain only to measure what that takes: it says nothing about drafts

    @property
    def rows(self) -> int:
        return len(self.requests)


def new_seat(
    request: Request, config: ResolvedConfig, proposers: Mapping[str, Proposer], number: int, *, can_speculate: bool
) -> Seat:
    """What a request wishes, and what the engine grants it."""
    wishes = request.params.speculation
    mode: SpeculationMode = (wishes.mode or config.speculation) if can_speculate else "off"
    methods = config.methods if wishes.method is None else (wishes.method,)
    loaded = [name for name in methods if name in proposers and name != "none"]
    default = config.auto_depth if mode == "auto" else config.depth
    shift = WORKLOADS[wishes.workload].log_odds if wishes.workload is not None else 0.0
    return Seat(
        prospects=Prospects(temperature_class(request.params.temperature), shift, number),
        mode=mode,
        method=wishes.method or config.method,
        guessers=tuple(name for name in loaded if proposers[name].guesses_from_text),
        may_draft=NEURAL in loaded,
        most=min(default if wishes.max_depth is None else wishes.max_depth, MAX_DEPTH),
    )

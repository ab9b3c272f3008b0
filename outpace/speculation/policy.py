"""Whether to speculate, for whom, with which proposer and how deep; depth 0 is an ordinary answer.

`on` drafts to the depth asked for, `off` never. `auto` weighs, each step, for the whole batch. Proposers that guess
from text alone are asked first: their guess, and how sure they are of it, is part of the decision. A draft model is
weighed by what its drafts have come to lately, before it is run. Every possible draft token then has a chance of
surviving, and the most likely are taken, as many as make expected tokens per second largest by the measured costs.

Three things keep a wrong belief from costing much. The ledger: where speculation has lost more than is allowed, there
is only plain decoding and rare probes until that is made good; where only reading texts has lost it, drafts that have
lately saved time make it good too. Fairness: a step is not stretched for the sake of some
requests at the expense of another that gains nothing by it, beyond what that one is allowed to lose. And a plain step
now and then, so that what plain decoding costs is always known from the present.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outpace.config import ResolvedConfig
from outpace.core import Draft, Request, StepStats
from outpace.speculation.acceptance_model import AcceptanceModel, Prospects
from outpace.speculation.asking import Asking, guess_seconds, is_proven
from outpace.speculation.base import DraftAsk, DraftTiming, Proposer
from outpace.speculation.books import Books
from outpace.speculation.costs import Costs
from outpace.speculation.drafting import DraftWeigher
from outpace.speculation.evidence import learn_from_draft, learn_from_guesses
from outpace.speculation.ledger import Ledger
from outpace.speculation.probing import Probes
from outpace.speculation.resting import Resting
from outpace.speculation.seats import NEURAL, Choice, Outcome, Seat, Step, new_seat
from outpace.speculation.trace import StepTrace
from outpace.speculation.weighing import Weigher

_FIRST_PLAIN = 8  # steps with drafts after which one is plain, to measure it; after each, twice as many, up to
_PLAIN_EVERY = 128
_MOST_LEARNED = 48  # guesses learned from in a step; where there are more, requests take turns; and so many
_MOST_DRAFTS = 16  # drafts, once enough is known of them


@dataclass(slots=True)
class _Parts:
    """What there is once costs are known."""

    costs: Costs
    asking: Asking
    drafting: DraftWeigher
    probes: Probes
    weigher: Weigher
    books: Books
    resting: Resting


class Policy:
    def __init__(
        self,
        config: ResolvedConfig,
        costs: Costs | None,
        proposers: Mapping[str, Proposer],
        *,
        can_speculate: bool,
        begins_ahead: bool = False,
        trace_steps: int = 0,
    ) -> None:
        """`begins_ahead`: the runner begins a plain step that follows others before it is asked for."""
        self._config = config
        self._proposers = proposers
        self._can_speculate = can_speculate
        self._begins_ahead = begins_ahead
        models = [name for name, proposer in proposers.items() if not proposer.guesses_from_text]
        self.acceptance = AcceptanceModel(list(proposers), models=models)
        self.ledger = Ledger(config.allowed_loss)
        self.trace: deque[StepTrace] = deque(maxlen=trace_steps)
        self._seats: dict[int, Seat] = {}
        self._number = 0  # of the step
        self._step: Step | None = None  # the latest in which something could be decided
        self._steps_without_plain = 0
        self._plain_after = _FIRST_PLAIN
        self.use_costs(costs)

    def use_costs(self, costs: Costs | None) -> None:
        """Without costs there is nothing to weigh with: `auto` decodes plainly."""
        self.costs = costs
        self._plain_of, self._plain = (-1, 0), (0.0, 0.0)
        self._parts: _Parts | None = None
        if costs is not None:
            drafting = DraftWeigher(costs, self.acceptance, self._proposers)
            weigher = Weigher(costs, self.acceptance, drafting, self._config.max_step_tokens)
            books = Books(costs, self.ledger, drafting.reading, self._seats, begins_ahead=self._begins_ahead)
            asking = Asking(costs)
            probes = Probes(costs, self.acceptance, drafting, self._proposers)
            resting = Resting(costs, asking, probes, books)
            self._parts = _Parts(costs, asking, drafting, probes, weigher, books, resting)

    def keep_trace(self, num_steps: int) -> None:
        """From now on, remember why the latest steps did what they did."""
        self.trace = deque(maxlen=num_steps)

    def prospects(self, request: Request) -> Prospects:
        """What is known of a request's acceptance."""
        return self._seat(request).prospects

    def guessers(self, request: Request) -> tuple[str, ...]:
        """Which proposers may be asked for guesses about a request, sooner or later."""
        seat = self._seat(request)
        return seat.guessers if seat.mode == "auto" else ()

    @property
    def is_resting(self) -> bool:
        """In this step nothing was looked at, because there is nobody to ask about."""
        return self._parts is not None and self._parts.resting.is_now

    @property
    def is_idle(self) -> bool:
        """In this step there was nothing to decide: nothing need be learned from it."""
        return self._step is None or self.is_resting

    @property
    def latest(self) -> Step | None:
        """The step decided last, for `observe` and `account` to be told where they come after the next decision."""
        return self._step

    @property
    def is_weighing(self) -> bool:
        """What comes of the latest step bears upon the next decision."""
        return self._step is not None and bool(self._step.weighed)

    # ---- deciding

    def wanted_guesses(self, requests: Sequence[Request]) -> dict[str, list[DraftAsk]]:
        """Which proposers to ask before deciding."""
        self._number += 1
        if self._parts is None or self._parts.resting.goes_on(requests) or self._is_crowded(len(requests)):
            return {}
        seats = [self._seat(request) for request in requests]
        if not any(seat.mode == "auto" for seat in seats):
            return {}
        asking, books = self._parts.asking, self._parts.books
        plain_seconds, context = self._plain_seconds(requests)
        asking.reckon(len(requests), context, plain_seconds, self._number)
        asking.save(plain_seconds, thrift=books.thrift)
        asks = asking.wanted(requests, seats, self._number, in_debt=books.forbid_guesses)
        if not asks and self._parts.costs.draft is None and not any(seat.mode == "on" for seat in seats):
            self._parts.resting.begin_now(requests, seats, self._number, plain_seconds)
        return asks

    def decide(
        self, requests: Sequence[Request], guesses: Mapping[int, Sequence[Draft]], num_prefill: int = 0
    ) -> list[Choice]:
        """One choice per decoding request; `guesses` are by request id, as `wanted_guesses` asked for them."""
        if self.is_resting:
            choices = [Choice.plain()] * len(requests)
            if self.trace.maxlen:
                self.trace.append(StepTrace.of(requests, choices, 0.0, "nobody to ask about yet"))
            return choices
        seats = [self._seat(request) for request in requests]
        choices = self._fixed(requests, seats)
        self.ledger.num_running = max(1, len(requests))
        self._step = step = self._begin(requests, seats, guesses, num_prefill)
        if step is None:
            return choices
        if step.weighed:
            self._weigh(step, choices)
        if any(choice.depth for choice in choices):
            self._steps_without_plain += 1
        else:
            self._steps_without_plain = 0
        if self.trace.maxlen:
            self.trace.append(StepTrace.of(step.requests, choices, step.plain_seconds, step.reason))
        return choices

    def _plain_seconds(self, requests: Sequence[Request]) -> tuple[float, float]:
        """What a plain step of this batch takes, and its mean context; found once a step."""
        assert self._parts is not None
        rows = len(requests)
        if self._plain_of != (self._number, rows):
            self._plain_of, self._plain = (self._number, rows), self._parts.books.plain_seconds(requests)
        return self._plain

    def _begin(
        self,
        requests: Sequence[Request],
        seats: list[Seat],
        guesses: Mapping[int, Sequence[Draft]],
        num_prefill: int,
    ) -> Step | None:
        """What is known before deciding; None where all requests decode plainly by their own wish."""
        if self.costs is None or all(seat.mode == "off" for seat in seats):
            return None
        rows, target = len(requests), self.costs.target
        plain_seconds, context = self._plain_seconds(requests)
        step = Step(self._number, requests, seats, guesses, num_prefill, context, plain_seconds)
        for seat in seats:
            seat.prospects.step = self._number
        if guesses or self.costs.draft is not None:
            once, more, twice = (target.seconds(rows, tokens, context) for tokens in (rows, rows + 1, 2 * rows))
            # The price of one slot over a token for every row, because costs have steps in them.
            step.slot_seconds = max(0.0, twice - once) / rows
            step.first_slot_seconds = max(0.0, more - once)
            step.guess_seconds = guess_seconds(self.costs, guesses)
        if not self._is_crowded(rows):
            step.weighed = [i for i, seat in enumerate(seats) if seat.mode == "auto" and seat.most]
        return step

    def _is_crowded(self, num_running: int) -> bool:
        limit = self._config.disable_by_batch_size
        return limit is not None and num_running >= limit

    def _seat(self, request: Request) -> Seat:
        seat = self._seats.get(request.id)
        if seat is None:
            seat = self._seats[request.id] = self._new_seat(request)
        return seat

    def _new_seat(self, request: Request) -> Seat:
        seat = new_seat(request, self._config, self._proposers, self._number, can_speculate=self._can_speculate)
        if self._parts is not None:
            seat.gain = self._parts.books.mean_gain
            self._parts.asking.begin(seat, self.ledger.num_running)
            self._parts.resting.welcome()
        return seat

    def _fixed(self, requests: Sequence[Request], seats: Sequence[Seat]) -> list[Choice]:
        """What is done without weighing: the depth asked for, or nothing."""
        choices = [Choice.plain()] * len(requests)
        if self._is_crowded(len(requests)):
            return choices
        for i, seat in enumerate(seats):
            if seat.mode == "on" and seat.method != "none":
                depth = min(seat.most, requests[i].max_useful_depth)
                if depth:
                    choices[i] = Choice(seat.method, depth, ask=DraftAsk(requests[i], depth))
        return choices

    def _weigh(self, step: Step, choices: list[Choice]) -> None:
        assert self._parts is not None
        books = self._parts.books
        with_model = NEURAL in self._proposers and not books.forbid_drafts
        if with_model and self.ledger.is_in_debt:
            with_model = self.acceptance.is_known(NEURAL)
        guessable = step.weighed
        if books.forbid_guesses:
            guessable = [i for i in step.weighed if is_proven(step.seats[i])]
        if not with_model and not guessable:
            step.reason = "the ledger is below the allowed loss"
        elif self._steps_without_plain >= self._plain_after:
            step.reason, step.measures = "a plain step, to measure it", True
            self._plain_after = min(_PLAIN_EVERY, 2 * self._plain_after)
            self._steps_without_plain = 0  # also where another request drafts in any case, and it is none
            return
        else:
            best = self._parts.weigher.best_plan(
                step,
                choices,
                self.ledger.headroom(step.plain_seconds),
                guessable=guessable,
                with_model=with_model,
            )
            if best is not None:
                step.reason = f"expected {best.plan.speed * step.plain_seconds / step.rows:.2f} of plain"
                self._parts.weigher.take(step, choices, best)
                if self._parts.probes.is_over:
                    return
        self._parts.probes.probe(step, choices, thrift=books.thrift)

    # ---- learning

    def observe_drafting(self, timing: DraftTiming, *, is_typical: bool = True) -> None:
        """What the draft model's passes took; where that is not typical of them, it is only divided up."""
        if self.costs is not None and self.costs.draft is not None:
            first_seconds = timing.divide(self.costs.draft.seconds)
            if not is_typical:
                return
            for rows, tokens, context, seconds in timing.forwards:
                self.costs.draft.observe(rows, tokens, context, seconds)
            if timing.num_read and self.costs.reading is not None:
                self.costs.reading.observe(1, timing.num_read, 0.0, timing.reading_seconds + first_seconds)
            if timing.num_drawn:
                self.costs.observe_draws(timing.num_drawn, timing.draw_seconds)

    def observe(self, outcomes: Sequence[Outcome], step: Step | None = None) -> None:
        """What the target said in a step, to the drafts that were verified and to the guesses that were not."""
        if self.trace:
            self.trace[-1].add_outcomes([outcome.verdict for outcome in outcomes])
        step = step or self._step
        if step is None or self._parts is None or self._parts.resting.is_now:
            return
        every = 1 + len(step.guesses) // _MOST_LEARNED
        every_draft = 1 + len(outcomes) // (_MOST_DRAFTS if self._parts.probes.is_over else _MOST_LEARNED)
        for row, outcome in enumerate(outcomes):
            seat = self._seats.get(outcome.request.id)
            if seat is None or seat.mode == "off":
                continue
            guesses = step.guesses.get(outcome.request.id)
            if guesses:
                if (row + step.number) % every == 0:
                    learn_from_guesses(self.acceptance, seat, outcome, guesses)
                self._parts.asking.learn(step, seat, outcome, guesses)
            elif seat.unused:
                self._parts.asking.compare(seat, outcome.request)
            if outcome.choice.ask is not None and (row + step.number) % every_draft == 0:
                learn_from_draft(self.acceptance, seat, outcome)

    def account(
        self, outcomes: Sequence[Outcome], stats: StepStats, reading_seconds: float, step: Step | None = None
    ) -> None:
        """Book a step. `reading_seconds`: what of drafting was catching up with texts."""
        if self._parts is None:
            return
        step = step or self._step
        if self._parts.resting.is_now:
            self._parts.books.rest(stats)
        elif step is not None:
            num_guesses = sum([len(drafts) for drafts in step.guesses.values()])
            if num_guesses:
                self._parts.costs.observe_weighing(num_guesses, stats.policy_seconds)
            saved = self._parts.books.add(step, outcomes, stats, reading_seconds)
            self._parts.probes.share_in(saved)
            if step.weighed and not step.measures:
                has_drafts = any(outcome.choice.depth for outcome in outcomes)
                own = stats.deciding_seconds
                brought = saved + own + reading_seconds if has_drafts else 0.0  # reading serves later steps
                if own:
                    own -= stats.booking_seconds  # of the step before, whatever is decided in this one
                self._parts.resting.begin(step, own, brought, has_drafts=has_drafts)
        if self.trace:
            self.trace[-1].seconds = stats.total_seconds

    def release(self, request: Request) -> None:
        """The request is over, or has lost its place."""
        if self._parts is not None and request.id in self._seats:
            self._parts.resting.end()
        seat = self._seats.pop(request.id, None)
        if seat is not None and self._parts is not None:
            self._parts.books.close(request, seat)
            self.acceptance.end(seat.prospects)

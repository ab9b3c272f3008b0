"""Whether to speculate, for whom, with which proposer and how deep; depth 0 is an ordinary answer.

`on` drafts to the depth asked for, `off` never. `auto` weighs, each step, for the whole batch. Proposers that guess
from text alone are asked first: their guess, and how sure they are of it, is part of the decision. A draft model is
weighed by what its drafts have come to lately, before it is run. Every possible draft token then has a chance of
surviving, and the most likely are taken, as many as make expected tokens per second largest by the measured costs.

Three things keep a wrong belief from costing much. The ledger: where speculation has lost more than is allowed, there
is only plain decoding and rare probes until that is made good. Fairness: a step is not stretched for the sake of some
requests at the expense of another that gains nothing by it, beyond what that one is allowed to lose. And a plain step
now and then, so that what plain decoding costs is always known from the present.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import ceil

from outpace.config import MAX_DEPTH, WORKLOADS, ResolvedConfig, SpeculationMode
from outpace.core import Draft, Request, StepStats
from outpace.speculation.acceptance_model import AcceptanceModel, Prospects, temperature_class
from outpace.speculation.base import DraftAsk, DraftTiming, Proposer
from outpace.speculation.costs import Costs
from outpace.speculation.ledger import Ledger
from outpace.speculation.seats import NEURAL, Choice, Outcome, Seat, Step
from outpace.speculation.sweep import Plan
from outpace.speculation.trace import StepTrace
from outpace.speculation.weighing import Weigher

_PLAIN_EVERY = 128  # steps with drafts after which one is plain, to measure it
_PROBE_SHARE = 0.004  # of the time spent decoding plainly, for finding out whether a draft model would pay,
_PROBE_GAIN = 0.1  # and of what speculation has saved
_MOST_PROBES = 20.0  # plain steps that can be saved up for that
_PROBE_DEPTH = 2
_GUESS_SHARE = 0.006  # of a plain step, for guesses about requests that nothing came of lately
_MOST_PATIENCE = 256  # steps between such guesses, at most
_START_VALUE = 3.0  # of a guess, before anything is known: so many times what it costs
_VALUE_RATE = 0.2
_CONVINCING = 2  # tokens of an unused guess that were right: reason to ask again at once
_FIRST_GUESSES = 4  # that a request is given at its start, one a step, where
_FIRST_SHARE = 0.06  # of a plain step pays for all of them together
_COMPARE_EVERY = 8  # guesses, of which one is asked of every guesser
_GAIN_RATE = 0.05
_LOST = 1.04  # a request that took so much longer than plain decoding has lost by speculation


class Policy:
    def __init__(
        self,
        config: ResolvedConfig,
        costs: Costs | None,
        proposers: Mapping[str, Proposer],
        *,
        can_speculate: bool,
        trace_steps: int = 0,
    ) -> None:
        self._config = config
        self._proposers = proposers
        self._can_speculate = can_speculate
        self.acceptance = AcceptanceModel(list(proposers))
        self.ledger = Ledger(config.allowed_loss)
        self.trace: deque[StepTrace] = deque(maxlen=trace_steps)
        self._seats: dict[int, Seat] = {}
        self._step: Step | None = None  # the latest in which something could be decided
        self._steps_without_plain = 0
        self._probe_seconds = 0.0  # saved up for probing
        self._guess_value: float | None = None  # seconds that guesses have saved lately, each
        self._mean_gain = 1.0  # of requests in steps with drafts, lately
        self.use_costs(costs)

    def use_costs(self, costs: Costs | None) -> None:
        """Without costs there is nothing to weigh with: `auto` decodes plainly."""
        self.costs = costs
        self._weigher: Weigher | None = None
        if costs is not None:
            self._weigher = Weigher(costs, self.acceptance, self._proposers, self._config.max_step_tokens)

    def keep_trace(self, num_steps: int) -> None:
        """From now on, remember why the latest steps did what they did."""
        self.trace = deque(maxlen=num_steps)

    # ---- deciding

    def wanted_guesses(self, requests: Sequence[Request]) -> dict[str, list[DraftAsk]]:
        """Which proposers to ask before deciding. Requests that nothing came of lately are asked about less often."""
        asks: dict[str, list[DraftAsk]] = {}
        if self.costs is None or self._is_crowded(len(requests)):
            return asks
        for request in requests:
            seat = self._seat(request)
            if seat.mode != "auto" or not seat.guessers:
                continue
            seat.wait -= 1
            depth = min(seat.most, request.max_useful_depth)
            if seat.wait <= 0 and depth > 0:
                seat.wait = seat.patience
                for name in self._whom_to_ask(seat):
                    asks.setdefault(name, []).append(DraftAsk(request, depth))
        return asks

    def _whom_to_ask(self, seat: Seat) -> Sequence[str]:
        """The guesser that has been right most; now and then all of them, to compare."""
        seat.num_asked += 1
        if len(seat.guessers) == 1 or seat.num_asked % _COMPARE_EVERY == 1:
            return seat.guessers
        return [max(seat.guessers, key=lambda name: seat.hits.get(name, 0.0))]

    def decide(
        self, requests: Sequence[Request], guesses: Mapping[int, Sequence[Draft]], num_prefill: int = 0
    ) -> list[Choice]:
        """One choice per decoding request; `guesses` are by request id, as `wanted_guesses` asked for them."""
        seats = [self._seat(request) for request in requests]
        choices = [self._fixed(request, seat, len(requests)) for request, seat in zip(requests, seats, strict=True)]
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
        rows = len(requests)
        context = sum([len(request.tokens) for request in requests]) / rows
        target, price = self.costs.target, self.costs.guess_seconds
        plain_forward = target.seconds(rows, rows, context)
        # The price of one slot over a token for every row, because costs have steps in them.
        slot = max(0.0, target.seconds(rows, 2 * rows, context) - plain_forward) / rows
        step = Step(
            requests,
            seats,
            guesses,
            num_prefill,
            context,
            plain_seconds=plain_forward + self.costs.schedule_seconds + rows * self.costs.judge_seconds,
            slot_seconds=slot,
            guess_seconds=sum(
                [price.get(d.proposer, 0.0) + self.costs.weigh_seconds for drafts in guesses.values() for d in drafts]
            ),
        )
        if not self._is_crowded(rows):
            step.weighed = [i for i, seat in enumerate(seats) if seat.mode == "auto" and seat.most]
        for seat in seats:
            seat.prospects.step += 1
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
        wishes, config = request.params.speculation, self._config
        mode: SpeculationMode = (wishes.mode or config.speculation) if self._can_speculate else "off"
        methods = config.methods if wishes.method is None else (wishes.method,)
        loaded = [name for name in methods if name in self._proposers and name != "none"]
        default = config.auto_depth if mode == "auto" else config.depth
        shift = WORKLOADS[wishes.workload].log_odds if wishes.workload is not None else 0.0
        seat = Seat(
            prospects=Prospects(temperature_class(request.params.temperature), shift),
            mode=mode,
            method=wishes.method or config.method,
            guessers=tuple(name for name in loaded if self._proposers[name].guesses_from_text),
            may_draft=NEURAL in loaded,
            most=min(default if wishes.max_depth is None else wishes.max_depth, MAX_DEPTH),
            gain=self._mean_gain,
        )
        if self.costs is not None:
            # Of the first requests nothing is known: they get a few guesses to show what those are worth.
            known = self._guess_value
            seat.guess_value = known if known is not None else _START_VALUE * self._guess_price(seat)
        return seat

    def _fixed(self, request: Request, seat: Seat, num_running: int) -> Choice:
        """What is done without weighing: the depth asked for, or nothing."""
        if seat.mode != "on" or seat.method == "none" or self._is_crowded(num_running):
            return Choice.plain()
        depth = min(seat.most, request.max_useful_depth)
        return Choice(seat.method, depth, ask=DraftAsk(request, depth)) if depth else Choice.plain()

    def _weigh(self, step: Step, choices: list[Choice]) -> None:
        assert self._weigher is not None
        if self.ledger.is_in_debt:
            step.reason = "the ledger is below the allowed loss"
        elif self._steps_without_plain >= _PLAIN_EVERY:
            step.reason = "a plain step, to measure it"
            self._steps_without_plain = 0  # also where another request drafts in any case, and it is none
            return
        else:
            plan, guesses = self._weigher.best_plan(step, choices, self.ledger.headroom)
            if plan is not None:
                step.reason = f"expected {plan.speed * step.plain_seconds / step.rows:.2f} of plain"
                self._take(step, choices, plan, guesses)
                return
        self._probe(step, choices)

    def _take(self, step: Step, choices: list[Choice], plan: Plan, guesses: Sequence[Draft | None]) -> None:
        assert self._weigher is not None
        for row, i in enumerate(step.weighed):
            depth, expected = plan.depths[row], 1.0 + plan.gains[row]
            if not depth:
                continue
            guess = guesses[row]
            if plan.drafted is not None and plan.drafted[row]:
                stop = _Stop(self.acceptance, step.seats[i], plan, self._weigher.draft_token_seconds(step, plan))
                ask = DraftAsk(step.requests[i], depth, stop)
                choices[i] = Choice(NEURAL, depth, ask=ask, expected=expected)
            elif guess is not None:
                choices[i] = Choice(guess.proposer, depth, draft=guess, expected=expected)

    def _probe(self, step: Step, choices: list[Choice]) -> None:
        """Draft for one request all the same, where enough was saved up to pay for finding out."""
        if self.costs is None or self.costs.draft is None or self._weigher is None:
            return
        most_saved = _MOST_PROBES * step.plain_seconds
        self._probe_seconds = min(self._probe_seconds + _PROBE_SHARE * step.plain_seconds, most_saved)
        able = [i for i in step.weighed if self._weigher.may_draft(step, i) and self._weigher.room(step, i)]
        if not able:
            return
        i = min(able, key=lambda row: self._proposers[NEURAL].num_unread(step.requests[row]))
        request, depth = step.requests[i], min(_PROBE_DEPTH, self._weigher.room(step, i))
        unread = self._proposers[NEURAL].num_unread(request)
        price = self.costs.draft_seconds(1, unread, depth, step.context) + depth * step.slot_seconds
        if price <= self._probe_seconds:
            self._probe_seconds -= price
            step.reason += "; a probe of the draft model"
            choices[i] = Choice(NEURAL, depth, ask=DraftAsk(request, depth))

    # ---- learning

    def observe_drafting(self, timing: DraftTiming) -> None:
        """What the draft model's passes took."""
        if self.costs is not None and self.costs.draft is not None:
            for rows, tokens, context, seconds in timing.forwards:
                self.costs.draft.observe(rows, tokens, context, seconds)
            if timing.num_drawn:
                self.costs.observe_draws(timing.num_drawn, timing.draw_seconds)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """What the target said in a step, to the drafts that were verified and to the guesses that were not."""
        step = self._step
        for outcome in outcomes:
            request = outcome.request
            seat = self._seats.get(request.id)
            if seat is not None and step is not None and seat.mode != "off":
                guesses = step.guesses.get(request.id, ())
                self._learn(seat, outcome, guesses)
                if guesses:
                    self._be_patient(step, seat, outcome, guesses)
                elif seat.unused:
                    self._compare(seat, outcome.verdict.tokens)
        if self.trace and step is not None:
            self.trace[-1].add_outcomes([outcome.verdict for outcome in outcomes])

    def _learn(self, seat: Seat, outcome: Outcome, guesses: Sequence[Draft]) -> None:
        said = outcome.verdict.tokens
        for draft in guesses:
            if draft.tokens:
                hits = _common_length(draft.tokens, said)
                tried = min(hits + 1, len(draft.tokens), len(said))
                self.acceptance.observe(draft.proposer, seat.prospects, draft.confidence, hits, tried)
                known = seat.hits.get(draft.proposer, 0.0)
                seat.hits[draft.proposer] = known + _VALUE_RATE * (hits / len(said) - known)
        drafted = outcome.choice.draft
        if drafted is not None and outcome.choice.ask is not None:
            hits, num_drafted = outcome.verdict.num_accepted, len(drafted.tokens)
            tried = min(hits + 1, num_drafted)
            self.acceptance.observe(drafted.proposer, seat.prospects, drafted.confidence, hits, tried)
            if hits == num_drafted < len(drafted.confidence):
                self.acceptance.observe_unsaid(drafted.proposer, seat.prospects, drafted.confidence[-1], num_drafted)

    def _be_patient(self, step: Step, seat: Seat, outcome: Outcome, guesses: Sequence[Draft]) -> None:
        """Guesses that bring more than they cost are asked for again at once; others only now and then."""
        used, hits = outcome.verdict.num_drafted, outcome.verdict.num_accepted
        if not used and not step.was_unfair:  # what one token of the best guess would have brought
            used, hits = 1, any(draft.tokens and draft.tokens[0] == outcome.verdict.tokens[0] for draft in guesses)
        brought = max(0.0, hits * step.plain_seconds / step.rows - used * step.slot_seconds)
        seat.guess_value += _VALUE_RATE * (brought - seat.guess_value)
        known = self._guess_value if self._guess_value is not None else seat.guess_value
        self._guess_value = known + _VALUE_RATE / step.rows * (brought - known)
        seat.unused, seat.num_right = (), 0
        if not outcome.verdict.num_drafted:
            right = [draft.tokens for draft in guesses if draft.tokens[:1] == outcome.verdict.tokens]
            if right:
                seat.unused, seat.num_right = right[0][1:], 1
        price = self._guess_price(seat)
        seat.patience = 1
        is_new = seat.num_asked < _FIRST_GUESSES and step.rows * price < _FIRST_SHARE * step.plain_seconds
        if (seat.guess_value < price and not is_new) or self.ledger.is_in_debt:
            seat.patience = min(_MOST_PATIENCE, ceil(price * step.rows / (_GUESS_SHARE * step.plain_seconds)))
        seat.wait = seat.patience

    def _compare(self, seat: Seat, said: Sequence[int]) -> None:
        """A guess that was not used and turns out right, token after token, says that it is time to ask again."""
        if list(seat.unused[: len(said)]) != list(said):
            seat.unused = ()
            return
        seat.unused = seat.unused[len(said) :]
        seat.num_right += len(said)
        if seat.num_right >= _CONVINCING:
            seat.wait = 0

    def _guess_price(self, seat: Seat) -> float:
        assert self.costs is not None
        each = [self.costs.guess_seconds.get(name, 0.0) for name in seat.guessers]
        return self.costs.weigh_seconds + (sum(each) / len(each) if each else 0.0)

    def account(self, outcomes: Sequence[Outcome], stats: StepStats, reading_seconds: float) -> None:
        """Book a step of pure decoding. `reading_seconds`: what of drafting was catching up with texts."""
        step = self._step
        if step is None or self.costs is None:
            return
        num_guesses = sum(map(len, step.guesses.values()))
        if num_guesses:
            self.costs.observe_weighing(num_guesses, stats.policy_seconds)
        spent, rows = stats.total_seconds, len(outcomes)
        has_drafts = any(outcome.choice.depth for outcome in outcomes)
        plain_step = step.plain_seconds if has_drafts else spent - stats.policy_seconds - stats.guess_seconds
        num_readers = sum(outcome.choice.method == NEURAL for outcome in outcomes)
        paid = 0.0
        for outcome in outcomes:
            request, num_said = outcome.request, len(outcome.verdict.tokens)
            request.spec.decode_seconds += spent
            request.spec.plain_seconds += plain_step * num_said
            seat = self._seats.get(request.id)
            if seat is None:
                continue
            if has_drafts:
                gain = num_said * plain_step / spent
                seat.gain += _GAIN_RATE * (gain - seat.gain)
                self._mean_gain += _GAIN_RATE / rows * (gain - self._mean_gain)
            else:  # what was seen of it gets old
                seat.gain += _GAIN_RATE / 4 * (self._mean_gain - seat.gain)
            if num_readers or seat.has_read:
                reads = reading_seconds / num_readers if outcome.choice.method == NEURAL else 0.0
                paid += self._pay(request, seat, num_said, reads, drafted=outcome.choice.method == NEURAL)
        if not (has_drafts and any(seat.mode == "on" for seat in step.seats)):  # that was not weighed: no one's fault
            plain = plain_step * stats.num_emitted / rows
            if has_drafts:
                self._probe_seconds += _PROBE_GAIN * max(0.0, plain - spent)
            self.ledger.add(spent, plain, step.plain_seconds, invested=reading_seconds, paid=paid)
        if self.trace:
            self.trace[-1].seconds = spent

    def _pay(self, request: Request, seat: Seat, num_said: int, reads: float, *, drafted: bool) -> float:
        """A request's share of what reading its text cost, for the tokens it said now."""
        assert self._weigher is not None
        if reads:
            if not seat.has_read:
                seat.has_read = True
                seat.staked_seconds = reads
                self._weigher.readings.begin(reads)
            seat.unpaid_seconds += reads
            seat.unpaid_tokens = int(self._weigher.still_to_say(request))
        seat.num_said += num_said
        seat.num_said_drafting += num_said if drafted else 0
        if not seat.unpaid_seconds:
            return 0.0
        share = min(1.0, num_said / max(seat.unpaid_tokens, 1))
        paid = share * seat.unpaid_seconds
        seat.unpaid_seconds -= paid
        seat.unpaid_tokens -= num_said
        return paid

    def release(self, request: Request) -> None:
        """The request is over, or has lost its place."""
        seat = self._seats.pop(request.id, None)
        if seat is not None and self._weigher is not None:
            if seat.mode != "on":
                self.ledger.write_off(seat.unpaid_seconds)
            self._weigher.ended(request, seat, request.spec.decode_seconds > _LOST * request.spec.plain_seconds)


class _Stop:
    """Whether a draft goes on with its next token, decided on the distribution it will be drawn from.

    The token costs a slot in the verification, and drafting the one after it a pass of the draft model; both are
    weighed at the speed the whole batch is expected to run at.
    """

    def __init__(self, acceptance: AcceptanceModel, seat: Seat, plan: Plan, draft_token_seconds: float) -> None:
        self._acceptance = acceptance
        self._prospects = seat.prospects
        self._least = plan.speed * plan.slot_seconds
        self._least_to_go_on = plan.speed * (plan.slot_seconds + draft_token_seconds)
        self._survival = 1.0
        self._ended = False

    def __call__(self, confidence: float) -> bool:
        if self._ended:
            return False
        [chance] = self._acceptance.given_confidence(NEURAL, self._prospects, [confidence])
        self._survival *= chance
        self._ended = self._survival < self._least_to_go_on
        return self._survival >= self._least


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    for mine, theirs in zip(a, b, strict=False):
        if mine != theirs:
            break
        length += 1
    return length

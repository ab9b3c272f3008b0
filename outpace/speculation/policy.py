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

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outpace.config import MAX_DEPTH, WORKLOADS, ResolvedConfig, SpeculationMode
from outpace.core import Draft, Request, StepStats, Verdict
from outpace.speculation.acceptance_model import AcceptanceModel, temperature_class
from outpace.speculation.base import DraftAsk, DraftTiming, Proposer
from outpace.speculation.costs import Costs
from outpace.speculation.ledger import Ledger, ReadingRecord
from outpace.speculation.sweep import Plan, Table, sweep
from outpace.speculation.trace import StepTrace

NEURAL = "draft"

_MARGIN = 1.01  # a gain smaller than this is within what measured costs can be wrong by
_DRAFT_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # tried for a draft model
_START_OUTPUT = 64.0  # tokens a request is expected to say, until some have
_OUTPUT_RATE = 0.05
_GAIN_RATE = 0.05
_PLAIN_EVERY = 128  # steps with drafts after which one is plain, to measure it
_PROBE_SHARE = 0.004  # of the time spent decoding plainly, for finding out whether a draft model would pay,
_PROBE_GAIN = 0.1  # and of what speculation has saved
_PROBE_DEPTH = 2
_MOST_PROBES = 20.0  # plain steps that can be saved up for that
_READING_LOSS = 0.012  # of the time a request is expected to take: reading that costs no more is always allowed
_GUESS_SHARE = 0.004  # of a plain step, for guesses about a request that nothing came of lately
_MOST_PATIENCE = 256  # steps between such guesses, at most
_VALUE_RATE = 0.2
_START_VALUE = 3.0  # times what a guess costs
_REQUEST_LOSS = 0.02  # what one request may lose to the gain of others, of its own time,
_READING_LOST = 1.04  # a request that took so much longer than plain decoding has lost by it
_FAIR_ROUNDS = 3
_BEAR_STEPS = 1.0
_REQUEST_STEPS = 0.4  # and in plain steps, so that a request that has just begun forbids nothing


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
class _Seat:
    """What the policy keeps of a request: its wishes, settled once, and how it has fared."""

    slot: int
    mode: SpeculationMode
    temperature: int  # class
    method: str  # of drafts made in any case
    guessers: tuple[str, ...]
    may_draft: bool  # by a model
    most: int  # depth
    patience: int = 1  # steps between guesses
    wait: int = 0  # until the next
    guess_value: float = 0.0  # seconds that guesses have saved lately, each
    gain: float = 1.0  # over plain decoding, in its latest steps with drafts in them
    has_read: bool = False  # the draft model has read its text
    num_said: int = 0  # since then,
    num_said_drafting: int = 0  # and of them, in steps with a draft of that model
    unpaid_seconds: float = 0.0  # of reading this request's text with the draft model
    unpaid_tokens: int = 0


@dataclass(slots=True)
class _Step:
    """The step being decided."""

    requests: Sequence[Request]
    seats: list[_Seat]
    guesses: Mapping[int, Sequence[Draft]]
    rows: int
    num_prefill: int
    context: float
    plain_seconds: float
    slot_seconds: float  # one draft token more
    guess_seconds: float  # spent already
    was_unfair: bool = False  # what would have paid for the batch was left undone for a request's sake
    weighed: list[int] = field(default_factory=list)  # rows that are in `auto`
    reason: str = "nothing to weigh"


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
        self.costs = costs
        self._proposers = proposers
        self._can_speculate = can_speculate
        self.acceptance = AcceptanceModel(list(proposers))
        self.ledger = Ledger(config.allowed_loss)
        self.trace: deque[StepTrace] = deque(maxlen=trace_steps)
        self._seats: dict[int, _Seat] = {}
        self._step: _Step | None = None
        self._steps_without_plain = 0
        self._probe_seconds = 0.0  # saved up for probing
        self._guess_value: float | None = None  # seconds that guesses have saved lately, each
        self.readings = ReadingRecord()
        self._drafted_share = 1.0  # of the tokens said after reading, those a draft was made for, lately
        self._mean_gain = 1.0  # of requests in steps with drafts, lately
        self._mean_output = _START_OUTPUT  # tokens that requests say, lately

    # ---- deciding

    def wanted_guesses(self, requests: Sequence[Request]) -> dict[str, list[DraftAsk]]:
        """Which proposers to ask before deciding. Requests that nothing came of lately are asked about less often."""
        asks: dict[str, list[DraftAsk]] = {}
        if not self._may_weigh(len(requests)):
            return asks
        for request in requests:
            seat = self._seat(request)
            if seat.mode != "auto" or not seat.guessers:
                continue
            seat.wait -= 1
            depth = min(seat.most, request.max_useful_depth)
            if seat.wait <= 0 and depth > 0:
                seat.wait = seat.patience
                for name in seat.guessers:
                    asks.setdefault(name, []).append(DraftAsk(request, depth))
        return asks

    def decide(
        self, requests: Sequence[Request], guesses: Mapping[int, Sequence[Draft]], num_prefill: int = 0
    ) -> list[Choice]:
        """One choice per decoding request; `guesses` are by request id, as `wanted_guesses` asked for them."""
        step = self._begin(requests, guesses, num_prefill)
        choices = [self._fixed(request, seat) for request, seat in zip(requests, step.seats, strict=True)]
        if self._may_weigh(step.rows):
            step.weighed = [i for i, seat in enumerate(step.seats) if seat.mode == "auto" and seat.most]
        if step.weighed:
            self._weigh(step, choices)
        if any(choice.depth for choice in choices):
            self._steps_without_plain += 1
        elif step.rows:
            self._steps_without_plain = 0
        if self.trace.maxlen:
            self.trace.append(StepTrace.of(step.requests, choices, step.plain_seconds, step.reason))
        return choices

    def _begin(self, requests: Sequence[Request], guesses: Mapping[int, Sequence[Draft]], num_prefill: int) -> _Step:
        rows = len(requests)
        seats = [self._seat(request) for request in requests]
        context = sum(len(request.tokens) for request in requests) / max(rows, 1)
        plain = self.costs.plain_seconds(rows, context) if self.costs is not None and rows else 0.0
        slot = guessing = 0.0
        if self.costs is not None and rows:
            target = self.costs.target
            # Over one token for every row, because costs have steps in them.
            slot = max(0.0, target.seconds(rows, 2 * rows, context) - target.seconds(rows, rows, context)) / rows
            guessing = sum(self.costs.guess_seconds.get(d.proposer, 0.0) for drafts in guesses.values() for d in drafts)
        self._step = _Step(requests, seats, guesses, rows, num_prefill, context, plain, slot, guessing)
        return self._step

    def _may_weigh(self, num_running: int) -> bool:
        limit = self._config.disable_by_batch_size
        return self._can_speculate and self.costs is not None and not (limit is not None and num_running >= limit)

    def _seat(self, request: Request) -> _Seat:
        seat = self._seats.get(request.id)
        if seat is None:
            seat = self._seats[request.id] = self._new_seat(request)
        return seat

    def _new_seat(self, request: Request) -> _Seat:
        wishes, config = request.params.speculation, self._config
        mode: SpeculationMode = (wishes.mode or config.speculation) if self._can_speculate else "off"
        methods = config.methods if wishes.method is None else (wishes.method,)
        loaded = [name for name in methods if name in self._proposers and name != "none"]
        default = config.auto_depth if mode == "auto" else config.depth
        shift = WORKLOADS[wishes.workload].log_odds if wishes.workload is not None else 0.0
        seat = _Seat(
            slot=self.acceptance.open(shift),
            mode=mode,
            temperature=temperature_class(request.params.temperature),
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

    def _fixed(self, request: Request, seat: _Seat) -> Choice:
        """What is done without weighing: the depth asked for, or nothing."""
        limit = self._config.disable_by_batch_size
        crowded = limit is not None and self._step is not None and self._step.rows >= limit
        if seat.mode != "on" or seat.method == "none" or crowded:
            return Choice.plain()
        depth = min(seat.most, request.max_useful_depth)
        return Choice(seat.method, depth, ask=DraftAsk(request, depth)) if depth else Choice.plain()

    def _weigh(self, step: _Step, choices: list[Choice]) -> None:
        if self.ledger.is_in_debt:
            step.reason = "the ledger is below the allowed loss"
        elif self._steps_without_plain >= _PLAIN_EVERY:
            step.reason = "a plain step, to measure it"
            self._steps_without_plain = 0  # also where another request drafts in any case, and it is none
            return
        else:
            plan = self._best_plan(step, choices)
            if plan is not None:
                step.reason = f"expected {plan.speed * step.plain_seconds / step.rows:.2f} of plain"
                self._take(step, choices, plan)
                return
        self._probe(step, choices)

    def _best_plan(self, step: _Step, choices: Sequence[Choice]) -> Plan | None:
        """The draft tokens worth taking; None: nothing beats plain decoding."""
        assert self.costs is not None
        guessed = self._survival_of_guesses(step)
        has_guesses = bool(guessed.any())
        may_draft = self.costs.draft is not None and any(step.seats[i].may_draft for i in step.weighed)
        step.reason = "no guess" if not has_guesses and not may_draft else "nothing beats plain decoding"
        if not has_guesses and not may_draft:
            return None
        most_depth = max(step.seats[i].most for i in step.weighed) if may_draft else guessed.shape[1]
        table = self._table(step, choices, most_depth)
        best = sweep(table, guessed)
        if may_draft:
            best = self._with_draft_model(step, table, guessed, best)
        would_pay = best.count > 0 and best.speed >= table.plain_speed * _MARGIN
        best = self._fair(step, best)
        step.was_unfair = would_pay and not best.count
        return best if best.count and best.speed >= table.plain_speed * _MARGIN else None

    def _table(self, step: _Step, choices: Sequence[Choice], most_depth: int) -> Table:
        """What steps of every size cost, given what happens in any case."""
        assert self.costs is not None
        fixed = sum(choice.depth for choice in choices)
        least = step.rows + step.num_prefill + fixed
        room = max(0, self._config.max_step_tokens - least)
        most = least + min(room, len(step.weighed) * most_depth)
        forward = self.costs.target.by_tokens(step.rows, least, most, step.context)
        return Table(
            seconds=forward + self.costs.schedule_seconds + step.guess_seconds,
            expected=float(step.rows + self._expected_of_fixed(step, choices)),
            token_seconds=self.costs.judge_seconds,
        )

    def _expected_of_fixed(self, step: _Step, choices: Sequence[Choice]) -> float:
        total = 0.0
        for seat, choice in zip(step.seats, choices, strict=True):
            if choice.depth:
                slots, classes = _ints([seat.slot]), _ints([seat.temperature])
                chances = self.acceptance.forecast(choice.method, slots, classes, choice.depth)
                choice.expected = 1.0 + float(np.cumprod(chances).sum())
                total += choice.expected - 1.0
        return total

    def _survival_of_guesses(self, step: _Step) -> NDArray[np.float64]:
        """[weighed rows, positions]: the chance that the token is reached and accepted; the best guess of each row."""
        guesses = [step.guesses.get(step.requests[i].id, ()) for i in step.weighed]
        longest = max((len(draft.tokens) for drafts in guesses for draft in drafts), default=0)
        best = np.zeros((len(guesses), max(longest, 1)))
        for name in self._proposers if longest else ():
            rows, drafts = _of_proposer(guesses, name)
            if rows:
                slots, classes = self._slots([step.seats[step.weighed[row]] for row in rows])
                confidence = _padded([draft.confidence for draft in drafts], longest)
                chances = self.acceptance.given_confidence(name, slots, classes, confidence)
                chances[confidence == 0.0] = 0.0  # beyond the end of the draft
                survival = np.cumprod(chances, axis=1)
                better = survival.sum(axis=1) > best[rows].sum(axis=1)
                best[np.array(rows)[better]] = survival[better]
        return best

    def _slots(self, seats: Sequence[_Seat]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        return _ints([seat.slot for seat in seats]), _ints([seat.temperature for seat in seats])

    def _with_draft_model(self, step: _Step, table: Table, guessed: NDArray[np.float64], best: Plan) -> Plan:
        """Try the draft model at several depths, for the requests where it promises more than a guess."""
        assert self.costs is not None and self.costs.draft is not None
        seats = [step.seats[i] for i in step.weighed]
        room = np.array([self._room(step, i) if self._may_draft(step, i) else 0 for i in step.weighed])
        deepest = int(room.max(initial=0))
        if not deepest:
            return best
        slots, classes = self._slots(seats)
        survival = np.cumprod(self.acceptance.forecast(NEURAL, slots, classes, deepest), axis=1)
        survival[np.arange(deepest) >= room[:, None]] = 0.0
        promised = guessed.sum(axis=1)
        width = max(guessed.shape[1], deepest)
        wide = np.zeros((len(seats), width))
        wide[:, : guessed.shape[1]] = guessed
        for depth in [d for d in _DRAFT_DEPTHS if d <= deepest]:
            users = survival[:, :depth].sum(axis=1) > promised
            if not users.any():
                continue
            mixed = wide.copy()
            mixed[users] = 0.0
            mixed[users, :depth] = survival[users, :depth]
            plan = sweep(table.after(self._drafting_seconds(step, users, depth)), mixed)
            plan.drafted = users
            if plan.speed > best.speed:
                best = plan
            elif plan.speed < 0.9 * best.speed:
                break  # deeper drafts only cost more
        return best

    def _room(self, step: _Step, i: int) -> int:
        return min(step.seats[i].most, step.requests[i].max_useful_depth, _DRAFT_DEPTHS[-1])

    def _may_draft(self, step: _Step, i: int) -> bool:
        """Whether the draft model may be run for a request: reading its text has to be cheap, or worth it lately."""
        seat, request = step.seats[i], step.requests[i]
        if not seat.may_draft:
            return False
        unread = self._proposers[NEURAL].num_unread(request)
        if unread <= 2:
            return True
        assert self.costs is not None and self.costs.draft is not None
        price = self.costs.draft.seconds(1, unread) - self.costs.draft.seconds(1, 1)
        if price <= _READING_LOSS * step.plain_seconds * (request.num_output + self._still_to_say(request)):
            return True
        return seat.has_read or self.readings.is_worth_trying

    def _drafting_seconds(self, step: _Step, users: NDArray[np.bool_], depth: int) -> float:
        """Drafting for these rows, with what they have to read first spread over the tokens it may serve."""
        assert self.costs is not None and self.costs.draft is not None
        who = [step.requests[step.weighed[row]] for row in np.flatnonzero(users)]
        rows = len(who)
        unread = [self._proposers[NEURAL].num_unread(request) for request in who]
        # Two tokens are unread after a draft that was accepted whole; more is catching up.
        backlog = sum(count for count in unread if count > 2)
        warm = sum(min(count, 2) for count in unread)
        drafting = self.costs.draft_seconds(rows, warm, depth, step.context)
        if backlog:
            reading = self.costs.draft.seconds(rows, warm + backlog, 0.0) - self.costs.draft.seconds(rows, warm, 0.0)
            served = self._drafted_share * sum(self._still_to_say(request) for request in who) / rows
            drafting += reading * min(1.0, (1 + depth) / 2 / max(served, 1.0))
        return drafting

    def _still_to_say(self, request: Request) -> float:
        """Nobody knows when a request will end; that it has gone on for long says little about it."""
        return min(request.max_useful_depth + 1, self._mean_output)

    def _fair(self, step: _Step, plan: Plan) -> Plan:
        """The best plan that costs no request more than it may lose to the others' gain."""
        if step.rows == 1 or not plan.count:
            return plan
        debts = np.array([request.spec.decode_seconds - request.spec.plain_seconds for request in step.requests])
        said = np.array([request.spec.plain_seconds for request in step.requests])
        spare = np.maximum(_REQUEST_LOSS * said + _REQUEST_STEPS * step.plain_seconds - debts, 0.0)
        # A request that usually gains bears with a bad step, up to a point.
        bears = np.array([seat.gain >= 1.0 for seat in step.seats]) & (debts < _BEAR_STEPS * step.plain_seconds)
        weighed = np.zeros(step.rows, bool)
        weighed[step.weighed] = True
        rounds = 0
        while plan.count:
            expected, at_most = np.ones(step.rows), np.ones(step.rows)
            expected[step.weighed] += plan.gains
            at_most[step.weighed] += plan.most_gains
            hurt = plan.seconds - expected * step.plain_seconds > spare + 0.01 * step.plain_seconds
            if not hurt.any():
                break
            lost = hurt & (plan.seconds - at_most * step.plain_seconds > spare) & ~bears
            helped = hurt & weighed & ~lost & (at_most > expected)
            rounds += 1
            if lost.any() or rounds > _FAIR_ROUNDS:
                # The step may last no longer than the request that can spare least allows.
                allowed = float((at_most * step.plain_seconds + spare)[lost if lost.any() else hurt].min())
                plan.within(min(allowed, plan.seconds))
                rounds = 0
            elif not helped.any():
                break
            else:
                # Deeper drafts for those who would fall behind: what they need to keep up with the step.
                needed = (1.03 * plan.seconds - spare) / step.plain_seconds - 1.0
                if not plan.raise_to(helped[step.weighed], needed[step.weighed]):
                    plan.within(plan.seconds * 0.9)
        return plan

    def _take(self, step: _Step, choices: list[Choice], plan: Plan) -> None:
        assert self.costs is not None
        plan_gains = plan.gains
        for row, i in enumerate(step.weighed):
            depth = int(plan.depths[row])
            if not depth:
                continue
            request, seat = step.requests[i], step.seats[i]
            expected = 1.0 + float(plan_gains[row])
            if plan.drafted is not None and plan.drafted[row]:
                goes_on = _Stop(self.acceptance, seat, plan, self._draft_token_seconds(plan, step))
                choices[i] = Choice(NEURAL, depth, ask=DraftAsk(request, depth, goes_on), expected=expected)
            else:
                draft = self._best_guess(step, i)
                choices[i] = Choice(draft.proposer, depth, draft=draft, expected=expected)

    def _draft_token_seconds(self, plan: Plan, step: _Step) -> float:
        """One more token from the draft model, for one of the requests it drafts for."""
        assert self.costs is not None and self.costs.draft is not None and plan.drafted is not None
        rows = int(plan.drafted.sum())
        return self.costs.draft.seconds(rows, rows, step.context) / rows + self.costs.draw_seconds

    def _best_guess(self, step: _Step, i: int) -> Draft:
        def promise(draft: Draft) -> float:
            slots, classes = self._slots([step.seats[i]])
            confidence = np.array([draft.confidence])
            return float(np.cumprod(self.acceptance.given_confidence(draft.proposer, slots, classes, confidence)).sum())

        drafts = [draft for draft in step.guesses[step.requests[i].id] if draft.tokens]
        return drafts[0] if len(drafts) == 1 else max(drafts, key=promise)

    def _probe(self, step: _Step, choices: list[Choice]) -> None:
        """Draft for one request all the same, where enough was saved up to pay for finding out."""
        if self.costs is None or self.costs.draft is None:
            return
        most_saved = _MOST_PROBES * step.plain_seconds
        self._probe_seconds = min(self._probe_seconds + _PROBE_SHARE * step.plain_seconds, most_saved)
        able = [i for i in step.weighed if self._may_draft(step, i) and self._room(step, i)]
        if not able:
            return
        i = min(able, key=lambda row: self._proposers[NEURAL].num_unread(step.requests[row]))
        request, depth = step.requests[i], min(_PROBE_DEPTH, self._room(step, i))
        unread = self._proposers[NEURAL].num_unread(request)
        target = self.costs.target
        price = self.costs.draft_seconds(1, unread, depth, step.context) + (
            target.seconds(step.rows, step.rows + depth, step.context)
            - target.seconds(step.rows, step.rows, step.context)
        )
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
        trials: dict[str, list[tuple[_Seat, Draft, int, int]]] = {}
        unsaid: list[tuple[_Seat, Draft]] = []
        for outcome in outcomes:
            seat = self._seats.get(outcome.request.id)
            if seat is None:
                continue
            said = outcome.verdict.tokens
            guesses = step.guesses.get(outcome.request.id, ()) if step is not None else ()
            for draft in guesses:
                if draft.tokens:
                    hits = _common_length(draft.tokens, said)
                    tried = min(hits + 1, len(draft.tokens), len(said))
                    trials.setdefault(draft.proposer, []).append((seat, draft, hits, tried))
            drafted = outcome.choice.draft
            if drafted is not None and outcome.choice.ask is not None:
                hits, num_drafted = outcome.verdict.num_accepted, len(drafted.tokens)
                if num_drafted:
                    trials.setdefault(drafted.proposer, []).append((seat, drafted, hits, min(hits + 1, num_drafted)))
                if hits == num_drafted < len(drafted.confidence):
                    unsaid.append((seat, drafted))
            self._be_patient(seat, outcome, guesses)
        for name, tried_here in trials.items():
            self._learn(name, tried_here)
        if unsaid:
            slots, classes = self._slots([seat for seat, _ in unsaid])
            confidence = np.array([draft.confidence[-1] for _, draft in unsaid])
            positions = _ints([len(draft.tokens) for _, draft in unsaid])
            self.acceptance.observe_unsaid(NEURAL, slots, classes, confidence, positions)
        seats = [seat for outcome in outcomes if (seat := self._seats.get(outcome.request.id)) is not None]
        if seats:
            self.acceptance.pass_time(self._slots(seats)[0])
        for outcome in outcomes:
            if outcome.request.finish_reason is not None:
                self._mean_output += _OUTPUT_RATE * (outcome.request.num_output - self._mean_output)
                self.release(outcome.request)
        if self.trace and step is not None:
            self.trace[-1].add_outcomes([outcome.verdict for outcome in outcomes])

    def _learn(self, name: str, trials: Sequence[tuple[_Seat, Draft, int, int]]) -> None:
        slots, classes = self._slots([seat for seat, *_ in trials])
        hits = np.array([hits for *_, hits, _ in trials])
        tried = np.array([tried for *_, tried in trials])
        knows = all(len(draft.confidence) >= count for _, draft, _, count in trials)
        depth = int(tried.max())
        confidence = _padded([draft.confidence for _, draft, *_ in trials], depth) if knows else None
        self.acceptance.observe(name, slots, classes, confidence, hits, tried)

    def _be_patient(self, seat: _Seat, outcome: Outcome, guesses: Sequence[Draft]) -> None:
        """Guesses that bring more than they cost are asked for again at once; others only now and then."""
        if not guesses:
            return  # was not asked about
        assert self.costs is not None and self._step is not None
        rows, plain = self._step.rows, self._step.plain_seconds
        used, hits = outcome.verdict.num_drafted, outcome.verdict.num_accepted
        if not used and not self._step.was_unfair:  # what one token of the best guess would have brought
            used, hits = 1, any(draft.tokens and draft.tokens[0] == outcome.verdict.tokens[0] for draft in guesses)
        brought = max(0.0, hits * plain / rows - used * self._step.slot_seconds)
        seat.guess_value += _VALUE_RATE * (brought - seat.guess_value)
        known = self._guess_value if self._guess_value is not None else seat.guess_value
        self._guess_value = known + _VALUE_RATE / rows * (brought - known)
        price = self._guess_price(seat)
        seat.patience = 1
        if seat.guess_value < price or self.ledger.is_in_debt:
            seat.patience = min(_MOST_PATIENCE, math.ceil(price * rows / (_GUESS_SHARE * plain)))
        seat.wait = seat.patience

    def _guess_price(self, seat: _Seat) -> float:
        assert self.costs is not None
        return sum(self.costs.guess_seconds.get(name, 0.0) for name in seat.guessers)

    def account(self, outcomes: Sequence[Outcome], stats: StepStats, reading_seconds: float) -> None:
        """Book a step of pure decoding. `reading_seconds`: what of drafting was catching up with texts."""
        step = self._step
        if step is None or self.costs is None or not outcomes:
            return
        spent, rows = stats.total_seconds, len(outcomes)
        has_drafts = any(outcome.choice.depth for outcome in outcomes)
        plain_step = step.plain_seconds if has_drafts else spent - stats.policy_seconds - stats.guess_seconds
        plain = plain_step * stats.num_emitted / rows
        paid = 0.0
        readers = [outcome for outcome in outcomes if outcome.choice.method == NEURAL]
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
            if reading_seconds and outcome.choice.method == NEURAL:
                if not seat.has_read:
                    seat.has_read = True
                    self.readings.begin()
                seat.unpaid_seconds += reading_seconds / len(readers)
                seat.unpaid_tokens = int(self._still_to_say(request))
            if seat.has_read:
                seat.num_said += num_said
                seat.num_said_drafting += num_said if outcome.choice.method == NEURAL else 0
            if seat.unpaid_seconds:
                share = min(1.0, num_said / max(seat.unpaid_tokens, 1))
                paid += share * seat.unpaid_seconds
                seat.unpaid_seconds *= 1.0 - share
                seat.unpaid_tokens -= num_said
        if has_drafts:
            self._probe_seconds += _PROBE_GAIN * max(0.0, plain - spent)
        self.ledger.add(spent, plain, step.plain_seconds, invested=reading_seconds, paid=paid)
        if self.trace:
            self.trace[-1].seconds = spent

    def release(self, request: Request) -> None:
        seat = self._seats.pop(request.id, None)
        if seat is not None:
            self.ledger.write_off(seat.unpaid_seconds)
            if seat.has_read:
                used = seat.num_said_drafting / max(seat.num_said, 1)
                self._drafted_share = max(0.1, self._drafted_share + _OUTPUT_RATE * (used - self._drafted_share))
                self.readings.end(request.spec.decode_seconds > _READING_LOST * request.spec.plain_seconds)
            else:
                self.readings.pass_time()
            self.acceptance.close(seat.slot)


class _Stop:
    """Whether a draft goes on with its next token, decided on the distribution it will be drawn from.

    The token costs a slot in the verification, and drafting the one after it a pass of the draft model; both are
    weighed at the speed the whole batch is expected to run at.
    """

    def __init__(self, acceptance: AcceptanceModel, seat: _Seat, plan: Plan, draft_token_seconds: float) -> None:
        self._acceptance = acceptance
        self._slots, self._classes = _ints([seat.slot]), _ints([seat.temperature])
        self._least = plan.speed * plan.slot_seconds
        self._least_to_go_on = plan.speed * (plan.slot_seconds + draft_token_seconds)
        self._survival = 1.0
        self._ended = False

    def __call__(self, confidence: float) -> bool:
        if self._ended:
            return False
        known = np.array([[confidence]])
        self._survival *= float(self._acceptance.given_confidence(NEURAL, self._slots, self._classes, known)[0, 0])
        self._ended = self._survival < self._least_to_go_on
        return self._survival >= self._least


def _ints(values: Sequence[int]) -> NDArray[np.intp]:
    return np.array(values, np.intp)


def _padded(rows: Sequence[Sequence[float]], width: int) -> NDArray[np.float64]:
    out = np.zeros((len(rows), width))
    for line, row in zip(out, rows, strict=True):
        count = min(len(row), width)
        line[:count] = row[:count]
    return out


def _of_proposer(guesses: Sequence[Sequence[Draft]], name: str) -> tuple[list[int], list[Draft]]:
    rows, drafts = list[int](), list[Draft]()
    for row, of_row in enumerate(guesses):
        for draft in of_row:
            if draft.proposer == name and draft.tokens:
                rows.append(row)
                drafts.append(draft)
    return rows, drafts


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    for mine, theirs in zip(a, b, strict=False):
        if mine != theirs:
            break
        length += 1
    return length

"""The best plan for a step: which draft tokens to take of which request, given what they cost and how likely they are.

Guesses are there already and cost nothing more. A draft model is priced before it runs: its passes, and what it has to
read first, spread over the tokens that may serve. A plan that would slow down a request that gains nothing by it,
beyond what that one may lose, is made fairer or smaller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outpace.core import Draft, Request
from outpace.speculation.acceptance_model import AcceptanceModel
from outpace.speculation.base import Proposer
from outpace.speculation.costs import Costs
from outpace.speculation.ledger import ReadingRecord
from outpace.speculation.seats import NEURAL, Choice, Seat, Step
from outpace.speculation.sweep import Plan, Table, survival

_MARGIN = 1.01  # a gain smaller than this is within what measured costs can be wrong by
_LEAST_SURVIVAL = 0.05  # a token less likely than this to be reached and right pays nowhere
_DRAFT_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # tried for a draft model
_READING_LOSS = 0.012  # of the time a request is expected to take: reading that costs no more is always allowed
_REQUEST_LOSS = 0.02  # what one request may lose to the gain of others, of its own time,
_REQUEST_STEPS = 0.4  # and in plain steps, so that a request that has just begun forbids nothing
_BEAR_STEPS = 1.0  # plain steps that one which usually gains may be behind
_TOLERANCE = 0.01  # of a plain step
_FAIR_ROUNDS = 3
_START_OUTPUT = 64.0  # tokens a request is expected to say, until some have
_OUTPUT_RATE = 0.05


class Weigher:
    def __init__(
        self, costs: Costs, acceptance: AcceptanceModel, proposers: Mapping[str, Proposer], max_step_tokens: int
    ) -> None:
        self._costs = costs
        self._acceptance = acceptance
        self._proposers = proposers
        self._max_step_tokens = max_step_tokens
        self.readings = ReadingRecord()
        self._mean_output = _START_OUTPUT  # tokens that requests say, lately
        self._drafted_share = 1.0  # of the tokens said after reading, those a draft was made for, lately

    # ---- the plan

    def best_plan(
        self, step: Step, choices: Sequence[Choice], headroom: float
    ) -> tuple[Plan | None, list[Draft | None]]:
        """The draft tokens worth taking, and each weighed row's best guess. None: nothing beats plain decoding.

        Were none of them accepted, the step would be longer than a plain one by no more than `headroom` seconds.
        """
        guesses, guessed = self._best_guesses(step)
        may_draft = self._costs.draft is not None and any(step.seats[i].may_draft for i in step.weighed)
        most_depth = max((len(chances) for chances in guessed), default=0)
        if may_draft:
            most_depth = max(most_depth, *(self.room(step, i) for i in step.weighed))
        if not most_depth:
            step.reason = "no guess"
            return None, guesses
        step.reason = "nothing beats plain decoding"
        table = self._table(step, choices, most_depth)
        best = Plan(table, guessed)
        if may_draft:
            best = self._with_draft_model(step, table, guessed, best)
        least_speed = table.plain_speed * _MARGIN
        would_pay = best.count > 0 and best.speed >= least_speed
        if would_pay and step.rows > 1:
            self._make_fair(step, best)
            step.was_unfair = not best.count
        longest = table.total(0, table.expected) + headroom
        if best.count and best.seconds > longest:
            best.within(longest)
        return (best if best.count and best.speed >= least_speed else None), guesses

    def _best_guesses(self, step: Step) -> tuple[list[Draft | None], list[list[float]]]:
        """Of each weighed row, the guess that promises most, and the chance of each of its tokens to survive."""
        drafts: list[Draft | None] = []
        chances: list[list[float]] = []
        for i in step.weighed:
            best: Draft | None = None
            best_chances: list[float] = []
            for draft in step.guesses.get(step.requests[i].id, ()):
                if draft.tokens:
                    known = self._acceptance.survival(
                        draft.proposer, step.seats[i].prospects, draft.confidence, _LEAST_SURVIVAL
                    )
                    if sum(known) > sum(best_chances):
                        best, best_chances = draft, known
            drafts.append(best)
            chances.append(best_chances)
        return drafts, chances

    def _table(self, step: Step, choices: Sequence[Choice], most_depth: int) -> Table:
        """What steps of every size cost, given what happens in any case."""
        fixed = sum(choice.depth for choice in choices)
        least = step.rows + step.num_prefill + fixed
        most = least + min(max(0, self._max_step_tokens - least), len(step.weighed) * most_depth)
        before = self._costs.schedule_seconds + step.guess_seconds
        forward = self._costs.target.by_tokens(step.rows, least, most, step.context)
        return Table(
            seconds=[before + seconds for seconds in forward],
            expected=step.rows + (self._expected_of_fixed(step, choices) if fixed else 0.0),
            token_seconds=self._costs.judge_seconds,
        )

    def _expected_of_fixed(self, step: Step, choices: Sequence[Choice]) -> float:
        total = 0.0
        for seat, choice in zip(step.seats, choices, strict=True):
            if choice.depth:
                gain = sum(survival(self._acceptance.forecast(choice.method, seat.prospects, choice.depth)))
                choice.expected = 1.0 + gain
                total += gain
        return total

    # ---- a draft model

    def _with_draft_model(self, step: Step, table: Table, guessed: list[list[float]], best: Plan) -> Plan:
        """Try the draft model at several depths, for the requests where it promises more than a guess."""
        forecasts: list[list[float]] = []
        stakes = self.readings.room_for(step.plain_seconds)
        is_first = self.readings.has_none_open  # which may cost what it costs
        for i in step.weighed:
            room = self.room(step, i) if self.may_draft(step, i) else 0
            if room and not step.seats[i].has_read:
                stakes -= self._reading_price(step.requests[i])
                room = room if stakes > 0 or is_first else 0
                is_first = False
            forecasts.append(survival(self._acceptance.forecast(NEURAL, step.seats[i].prospects, room)) if room else [])
        promised = [sum(chances) for chances in guessed]
        deepest = max(map(len, forecasts))
        for depth in _DRAFT_DEPTHS:
            if depth > deepest:
                break
            users = [sum(chances[:depth]) > promise for chances, promise in zip(forecasts, promised, strict=True)]
            if not any(users):
                continue
            mixed = [
                forecast[:depth] if uses else guess
                for forecast, guess, uses in zip(forecasts, guessed, users, strict=True)
            ]
            plan = Plan(table.after(self._drafting_seconds(step, users, depth)), mixed)
            plan.drafted = users
            if plan.speed > best.speed:
                best = plan
            elif plan.speed < 0.9 * best.speed:
                break  # deeper drafts only cost more
        return best

    def room(self, step: Step, i: int) -> int:
        return min(step.seats[i].most, step.requests[i].max_useful_depth, _DRAFT_DEPTHS[-1])

    def may_draft(self, step: Step, i: int) -> bool:
        """Whether the draft model may be run for a request: reading its text has to be cheap, or worth it lately."""
        seat, request = step.seats[i], step.requests[i]
        if not seat.may_draft or self._costs.draft is None:
            return False
        if seat.has_read:
            return True
        cheap = _READING_LOSS * step.plain_seconds * (request.num_output + self.still_to_say(request))
        return self._reading_price(request) <= cheap or self.readings.is_worth_trying

    def _reading_price(self, request: Request) -> float:
        assert self._costs.draft is not None
        unread = self._proposers[NEURAL].num_unread(request)
        return self._costs.draft.seconds(1, unread) - self._costs.draft.seconds(1, 1)

    def _drafting_seconds(self, step: Step, users: Sequence[bool], depth: int) -> float:
        """Drafting for these rows, with what they have to read first spread over the tokens it may serve."""
        assert self._costs.draft is not None
        who = [step.requests[i] for i, uses in zip(step.weighed, users, strict=True) if uses]
        rows = len(who)
        unread = [self._proposers[NEURAL].num_unread(request) for request in who]
        # Two tokens are unread after a draft that was accepted whole; more is catching up.
        backlog = sum(count for count in unread if count > 2)
        warm = sum(min(count, 2) for count in unread)
        drafting = self._costs.draft_seconds(rows, warm, depth, step.context)
        if backlog:
            reading = self._costs.draft.seconds(rows, warm + backlog) - self._costs.draft.seconds(rows, warm)
            served = self._drafted_share * sum(self.still_to_say(request) for request in who) / rows
            drafting += reading * min(1.0, (1 + depth) / 2 / max(served, 1.0))
        return drafting

    def draft_token_seconds(self, step: Step, plan: Plan) -> float:
        """One more token from the draft model, for one of the requests it drafts for."""
        assert self._costs.draft is not None and plan.drafted is not None
        rows = sum(plan.drafted)
        return self._costs.draft.seconds(rows, rows, step.context) / rows + self._costs.draw_seconds

    def still_to_say(self, request: Request) -> float:
        """Nobody knows when a request will end; that it has gone on for long says little about it."""
        return min(request.max_useful_depth + 1, self._mean_output)

    def ended(self, request: Request, seat: Seat, lost: bool) -> None:
        """Learn from a request that is over."""
        self._mean_output += _OUTPUT_RATE * (request.num_output - self._mean_output)
        if seat.has_read:
            used = seat.num_said_drafting / max(seat.num_said, 1)
            self._drafted_share = max(0.1, self._drafted_share + _OUTPUT_RATE * (used - self._drafted_share))
            self.readings.end(seat.staked_seconds, lost)
        else:
            self.readings.pass_time()

    # ---- fairness

    def _make_fair(self, step: Step, plan: Plan) -> None:
        """Keep a step from costing any request more than it may lose to the others' gain."""
        plain = step.plain_seconds
        spare, bears = [], []
        for request, seat in zip(step.requests, step.seats, strict=True):
            debt = request.spec.decode_seconds - request.spec.plain_seconds
            spare.append(max(0.0, _REQUEST_LOSS * request.spec.plain_seconds + _REQUEST_STEPS * plain - debt))
            # A request that usually gains bears with a bad step, up to a point.
            bears.append(seat.gain >= 1.0 and debt < _BEAR_STEPS * plain)
        row_of = {i: row for row, i in enumerate(step.weighed)}
        most = plan.most_gains
        rounds = 0
        while plan.count:
            helped: dict[int, float] = {}
            allowed = hurt_allowed = float("inf")
            for i in range(step.rows):
                row = row_of.get(i)
                gain = plan.gains[row] if row is not None else 0.0
                if plan.seconds - (1.0 + gain) * plain <= spare[i] + _TOLERANCE * plain:
                    continue
                at_most = 1.0 + (most[row] if row is not None else 0.0)
                bearable = at_most * plain + spare[i]
                hurt_allowed = min(hurt_allowed, bearable)
                if plan.seconds > bearable:
                    if not bears[i]:
                        allowed = min(allowed, bearable)
                elif row is not None and at_most > 1.0 + gain:
                    # A deeper draft for one that would fall behind: what it needs to keep up with the step.
                    helped[row] = (1.03 * plan.seconds - spare[i]) / plain - 1.0
            rounds += 1
            if allowed < float("inf"):  # the step may last no longer than the request that can spare least allows
                plan.within(allowed)
                rounds = 0
            elif not helped:
                return
            elif rounds > _FAIR_ROUNDS or not plan.raise_to(helped):
                plan.within(min(hurt_allowed, 0.9 * plan.seconds))
                rounds = 0

"""The books: what each step took, what plain decoding of the same tokens would have taken, and who paid for reading.

A step that reads prompts beside decoding is booked with the share of its time that the cost curve gives to decoding:
the prompts would have been read in any case, and without these steps a busy server would have no books at all.
Steps in which nothing could be decided are booked together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outpace.core import Request, StepStats
from outpace.speculation.costs import Costs
from outpace.speculation.ledger import Ledger
from outpace.speculation.reading import Reading
from outpace.speculation.seats import NEURAL, Outcome, Seat, Step

_GAIN_RATE = 0.05
_SAVED_RATE = 0.1
_LEAST_SAVED = 0.03  # plain steps that each step with drafts or guesses has lately saved, to go on with them in debt;
_HOPED_SAVED = 0.1  # of a draft model that is believed before any
_DISTURBED = 2.0  # times what a pass should have taken
_THRIFT = 0.25
_PLAIN_RATE = 0.05
_CALIBRATED = 2  # what calibration said of a plain step counts as so many
_MOST_SURPRISE = 1.2  # what one that was disturbed says at most


@dataclass(slots=True)
class _Rest:
    """Steps without a decision, not yet booked."""

    num_steps: int = 0
    spent: float = 0.0
    policy_seconds: float = 0.0
    num_begun: int = 0  # of them, those that a device began ahead,
    begun_seconds: float = 0.0  # and what they took


class Books:
    def __init__(
        self, costs: Costs, ledger: Ledger, reading: Reading, seats: Mapping[int, Seat], *, begins_ahead: bool = False
    ) -> None:
        self._costs = costs
        self._ledger = ledger
        self._reading = reading
        self._seats = seats
        self._rest = _Rest()
        self._plain = dict[
            int, tuple[float, int]
        ]()  # by rows: plain steps as they were over what costs say, and how many
        self._begins_ahead = begins_ahead  # plain steps on end, before each is asked for: a lone one takes longer
        self.mean_gain = 1.0  # of requests in steps with drafts, lately
        # Plain steps that those with guesses, and with drafts of a model, have saved lately, texts they read aside.
        self._saved_by_guesses = 0.0
        self._saved_by_model = _HOPED_SAVED

    @property
    def forbid_guesses(self) -> bool:
        """More was lost than is allowed, and guesses are not what makes it good."""
        return self._ledger.is_in_debt and self._saved_by_guesses <= _LEAST_SAVED

    @property
    def forbid_drafts(self) -> bool:
        """The same of a draft model: what probes have shown of it may be tried also in debt."""
        return self._ledger.is_in_debt and self._saved_by_model <= _LEAST_SAVED

    @property
    def thrift(self) -> float:
        """The share of what is otherwise spent on finding out: in debt little, or the debt would never be made good."""
        return _THRIFT if self._ledger.is_in_debt else 1.0

    def add(self, step: Step, outcomes: Sequence[Outcome], stats: StepStats, reading_seconds: float) -> float:
        """Book a step; returns the seconds it has saved, less than zero where it has lost some."""
        spent = stats.speculation_seconds + stats.draft_seconds + self._decoding_seconds(step, outcomes, stats)
        own = stats.deciding_seconds  # of it, what plain decoding does not wait for
        rows = len(outcomes)
        has_drafts = any(outcome.choice.depth for outcome in outcomes)
        plain_step = step.plain_seconds if has_drafts else spent - own
        num_readers = sum([outcome.choice.method == NEURAL for outcome in outcomes])
        paid, num_emitted = 0.0, 0
        for outcome in outcomes:
            request, num_said = outcome.request, len(outcome.verdict.tokens)
            num_emitted += num_said
            spec, seat = request.spec, self._seats.get(request.id)
            lead = spec.plain_seconds - spec.decode_seconds
            spec.decode_seconds += spent
            spec.plain_seconds += plain_step * num_said
            if seat is None or seat.mode == "on":
                continue  # it was not weighed: what it wins or loses is no one's merit or fault
            seat.reading_seconds += reading_seconds
            if outcome.choice.depth and outcome.choice.method != NEURAL:
                seat.num_guessed += num_said
            if has_drafts:
                gain = num_said * plain_step / spent
                seat.gain += _GAIN_RATE * (gain - seat.gain)
                self.mean_gain += _GAIN_RATE / rows * (gain - self.mean_gain)
            else:  # what was seen of it gets old
                seat.gain += _GAIN_RATE / 4 * (self.mean_gain - seat.gain)
            if num_readers or seat.has_read:
                reads = reading_seconds / num_readers if outcome.choice.method == NEURAL else 0.0
                if reads and not seat.has_read:
                    self._stake(request, seat, lead)
                elif seat.has_read and not seat.has_won and lead > seat.lead_seconds:
                    seat.has_won = True
                    self._reading.record.end(0.0)
                paid += self._pay(request, seat, num_said, reads, drafted=outcome.choice.method == NEURAL)
        if has_drafts and any(seat.mode == "on" for seat in step.seats):
            return 0.0
        if not stats.num_prefill_tokens:
            num_emitted = stats.num_emitted  # less, where a request ended in the midst of what was accepted
            if not has_drafts:
                surprise = plain_step / step.plain_seconds
                is_lone = self._begins_ahead and not stats.hidden_seconds
                self._measure(rows, min(1.0, surprise) if is_lone else surprise)
        plain = plain_step * num_emitted / rows
        excused = self._disturbance(step, outcomes, stats) if has_drafts else 0.0
        self._ledger.add(spent, plain, step.plain_seconds, invested=reading_seconds, paid=paid, excused=excused)
        saved = (plain - spent + reading_seconds) / step.plain_seconds
        if num_readers:
            if not step.is_probe:
                self._reading.returns.add(step.number, rows, spent - reading_seconds + paid, plain)
                self._saved_by_model += _SAVED_RATE * (saved - self._saved_by_model)
        else:
            self._reading.returns.charge(rows, paid)
            if has_drafts or step.guesses:  # guesses that were not used have cost their time all the same
                self._saved_by_guesses += _SAVED_RATE * (saved - self._saved_by_guesses)
        return plain - spent if has_drafts else 0.0

    def plain_seconds(self, requests: Sequence[Request]) -> tuple[float, float]:
        """What a plain step of these requests takes, and their mean context.

        By what plain steps of so many rows took lately: every gain and loss is measured by them, and the cost curve
        follows slowly what is seen of one size.
        """
        rows = len(requests)
        context = sum([len(request.tokens) for request in requests]) / rows
        ratio, _ = self._plain.get(rows, (1.0, 0))
        return self._costs.plain_seconds(rows, context) * ratio, context

    def _measure(self, rows: int, surprise: float) -> None:
        ratio, num_seen = self._plain.get(rows, (1.0, 0))
        rate = max(_PLAIN_RATE, 1.0 / (_CALIBRATED + num_seen))
        surprise = max(1.0 / _MOST_SURPRISE, min(_MOST_SURPRISE, surprise))
        self._plain[rows] = ratio * surprise**rate, num_seen + 1

    def _decoding_seconds(self, step: Step, outcomes: Sequence[Outcome], stats: StepStats) -> float:
        """What a step took beside drafting, less the share of it that the cost curve gives to prompts."""
        seconds = stats.schedule_seconds + stats.forward_seconds + stats.verify_seconds
        if not stats.num_prefill_tokens:
            return seconds
        rows, target = step.rows, self._costs.target
        decoding = rows + _num_drafted(outcomes)
        whole = target.seconds(rows, decoding + stats.num_prefill_tokens, step.context)
        return seconds * target.seconds(rows, decoding, step.context) / whole

    def _disturbance(self, step: Step, outcomes: Sequence[Outcome], stats: StepStats) -> float:
        """What a pass took beyond anything that passes of its size take: something else was done in that time."""
        tokens = step.rows + _num_drafted(outcomes) + stats.num_prefill_tokens
        usual = self._costs.target.seconds(step.rows, tokens, step.context)
        return max(0.0, stats.forward_seconds - _DISTURBED * usual)

    def rest(self, stats: StepStats) -> None:
        """A plain step in which nothing could be decided."""
        if stats.num_prefill_tokens:
            return  # mostly of prompts, and as it would have been in any case
        rest = self._rest
        rest.num_steps += 1
        rest.spent += stats.total_seconds
        rest.policy_seconds += stats.deciding_seconds
        if stats.hidden_seconds:
            rest.num_begun += 1
            rest.begun_seconds += stats.total_seconds

    def end_rest(self, requests: Sequence[Request]) -> tuple[int, float]:
        """Book what has gathered, for these requests; returns how many steps that was, and what one took."""
        rest = self._rest
        if not rest.num_steps:
            return 0, 0.0
        plain, paid = rest.spent - rest.policy_seconds, 0.0
        for request in requests:
            request.spec.decode_seconds += rest.spent
            request.spec.plain_seconds += plain
            seat = self._seats.get(request.id)
            if seat is None:
                continue
            seat.gain += (1.0 - (1.0 - _GAIN_RATE / 4) ** rest.num_steps) * (self.mean_gain - seat.gain)
            if seat.has_read:
                paid += self._pay(request, seat, rest.num_steps, 0.0, drafted=False)
        if rest.num_begun:
            self._measure(len(requests), rest.begun_seconds / rest.num_begun / self.plain_seconds(requests)[0])
        self._reading.returns.charge(len(requests), paid)
        step_seconds = plain / rest.num_steps
        self._ledger.add(rest.spent, plain, step_seconds, paid=paid, num_steps=rest.num_steps)
        self._rest = _Rest()
        return rest.num_steps, step_seconds

    def _stake(self, request: Request, seat: Seat, lead: float) -> None:
        """The draft model has read a request's text; that is won once the request is as far ahead as it was."""
        seat.has_read = True
        seat.expected_output = self._reading.expected_output(request)
        seat.lead_seconds = lead
        self._reading.record.begin()

    def _pay(self, request: Request, seat: Seat, num_said: int, reads: float, *, drafted: bool) -> float:
        """A request's share of what reading its text cost, for the tokens it said now."""
        if reads:
            seat.unpaid_seconds += reads
            seat.unpaid_tokens = int(self._reading.still_to_say(request))
        seat.num_said += num_said
        seat.num_said_drafting += num_said if drafted else 0
        if not seat.unpaid_seconds:
            return 0.0
        share = min(1.0, num_said / max(seat.unpaid_tokens, 1))
        paid = share * seat.unpaid_seconds
        seat.unpaid_seconds -= paid
        seat.unpaid_tokens -= num_said
        return paid

    def close(self, request: Request, seat: Seat) -> None:
        """The request is over."""
        self._ledger.write_off(seat.unpaid_seconds)
        self._reading.returns.charge(self._ledger.num_running, seat.unpaid_seconds)
        plain = request.spec.plain_seconds
        self._reading.ended(request, seat, request.spec.decode_seconds / plain - 1.0 if plain else 0.0)


def _num_drafted(outcomes: Sequence[Outcome]) -> int:
    return sum([outcome.verdict.num_drafted for outcome in outcomes])

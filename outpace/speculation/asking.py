"""About whom to ask which guesser, and when: a guess costs little, but not nothing.

A request whose guesses lately saved more than they cost is asked about at every step. What is spent on the others, to
find out, comes out of one purse that a small share of the time fills: however many requests run, and whether anything
is known yet or not, looking for something to copy costs no more than that share and what the purse held at first; where
not even a good guess would save much beside what asking costs, as in a batch that fills the machine, it is a smaller
one. Those asked about longest ago come first, new ones before all others; and as a step in which anybody is asked about
costs something whoever that is, it is put off until there is enough for several.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from heapq import nsmallest
from math import ceil

from outpace.core import Draft, Request
from outpace.speculation.base import DraftAsk
from outpace.speculation.costs import Costs
from outpace.speculation.seats import Outcome, Seat, Step
from outpace.speculation.sweep import GOOD_DRAFT

_SHARE = 0.004  # of a plain step that goes into the purse with each
_START = 0.5  # plain steps that are in it at first, and
_MOST = 0.5  # that it can hold
_NEWCOMER = 24  # times that asking about a new request is paid for, its text may be of another kind: alone; else
_LEAST_NEWCOMER = 2  # that shared by all who have to wait for it, no less than this, where they are
_FEW = 16  # at most
_TOGETHER = 8  # requests that are asked about in one step, where nobody else is, or all if they are fewer
_WORTH = 5.0  # times its price, and what a good guess saves is worth looking for; where it is less, one looks less,
_LEAST_WORTH = 0.1  # down to this part, because costs may be wrong
_HOPE_AGAIN = 64  # steps after which that is reckoned again
_VALUE_RATE = 0.2
_UNUSED_RATE = 0.02  # of guesses that were right, and not worth using
_CONVINCING = 2  # tokens of an unused guess that were right: reason to ask again at once
_PROVEN = 4  # and to use the next one even in debt;
_LONGEST_WAIT = 64  # steps, where such were asked for in debt and not used: each time twice as long as before
_COMPARE_EVERY = 8  # guesses, of which one is asked of every guesser


class Asking:
    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._purse: float | None = None  # seconds,
        self._most = 0.0  # of them, that it can hold
        self.worth = 1.0  # of looking for something to copy, at most this
        self._worth_of = 0  # rows that it was reckoned for,
        self._worth_until = 0  # and the step in which it is again
        self._value = 0.0  # seconds that guesses have saved lately, each
        self._proven_from = 0  # the step from which on, in debt, those who have proven right are asked about,
        self._wait = 1  # and how long that is put off after the next time

    def begin(self, seat: Seat, num_running: int) -> None:
        """A new request is taken for one like the others; among a few it brings something to find out whether it is."""
        seat.guess_value = self._value
        if self._purse is not None and seat.guessers and num_running <= _FEW:
            self._purse += self.worth * max(_LEAST_NEWCOMER, _NEWCOMER / num_running) * self.price(seat)

    def reckon(self, rows: int, context: float, plain_seconds: float, number: int) -> None:
        """What looking is worth in a batch of so many, where a plain step takes so long."""
        if rows == self._worth_of and number < self._worth_until:
            return
        self._worth_of, self._worth_until = rows, number + _HOPE_AGAIN
        price = self._price(self._costs.guess_seconds) if self._costs.guess_seconds else 0.0
        if price:
            self.worth = max(_LEAST_WORTH, min(1.0, self._hope(rows, context, plain_seconds) / (_WORTH * price)))

    def _hope(self, rows: int, context: float, plain_seconds: float) -> float:
        """Seconds that a good guess would save, for one request alone or for each of all, whichever is more."""
        longer = self._costs.target.by_tokens(rows, rows, rows * (1 + max(GOOD_DRAFT)), context)
        token_seconds = plain_seconds / rows - self._costs.judge_seconds
        best = 0.0
        for depth, accepted in GOOD_DRAFT.items():
            slots = min(longer[depth] - longer[0], (longer[rows * depth] - longer[0]) / rows)
            best = max(best, accepted * token_seconds - slots)
        return best

    def save(self, plain_seconds: float, num_steps: int = 1, *, thrift: float) -> None:
        """Time has passed."""
        known = self._purse if self._purse is not None else _START * plain_seconds
        self._most = _MOST * plain_seconds
        self._purse = min(known + num_steps * self._income(plain_seconds, thrift), self._most)

    def _income(self, plain_seconds: float, thrift: float) -> float:
        """What goes into the purse with each plain step."""
        return thrift * self.worth * _SHARE * plain_seconds

    def wanted(
        self, requests: Sequence[Request], seats: Sequence[Seat], number: int, *, in_debt: bool
    ) -> dict[str, list[DraftAsk]]:
        """Whom to ask for what, by guesser. In debt, for all but those who have proven right only the purse pays."""
        assert self._purse is not None
        asked: list[int] = []
        curious: list[int] = []
        price_of: dict[tuple[str, ...], float] = {}
        dearest = 0.0
        with_proven = in_debt and number >= self._proven_from
        for i, seat in enumerate(seats):
            guessers = seat.guessers
            if not guessers or seat.mode != "auto":
                continue
            price = price_of.get(guessers)
            if price is None:
                price = price_of[guessers] = self.price(seat)
                dearest = max(dearest, price)
            if with_proven and is_proven(seat) if in_debt else seat.is_eager or seat.guess_value >= price:
                asked.append(i)
            else:
                curious.append(i)
        if with_proven and asked:
            self._proven_from, self._wait = number + self._wait, min(2 * self._wait, _LONGEST_WAIT)
        num_affordable = len(curious) if not dearest else int(self._purse / dearest)
        is_enough = bool(asked) or self._purse >= self._needed(len(curious), dearest)
        if curious and num_affordable > 0 and is_enough:
            if num_affordable < len(curious):
                curious = nsmallest(num_affordable, curious, key=lambda i: seats[i].asked_at)
            self._purse -= len(curious) * dearest
            asked += curious
        asks: dict[str, list[DraftAsk]] = {}
        for i in asked:
            request, seat = requests[i], seats[i]
            depth = min(seat.most, request.max_useful_depth)
            if depth > 0:
                seat.asked_at, seat.is_eager = number, False
                for name in _whom(seat):
                    asks.setdefault(name, []).append(DraftAsk(request, depth))
        return asks

    def steps_until_next(
        self, seats: Sequence[Seat], number: int, plain_seconds: float, *, in_debt: bool, thrift: float
    ) -> int:
        """For so many steps nobody will be asked about, nor, out of debt, a guess be compared with what is said."""
        assert self._purse is not None
        dearest, num_curious = 0.0, 0
        num_steps = 1 << 30
        for seat in seats:
            if seat.guessers and seat.mode == "auto":
                price = self.price(seat)
                if in_debt:
                    if is_proven(seat):
                        num_steps = max(0, self._proven_from - number - 1)
                elif seat.is_eager or seat.unused or seat.guess_value >= price:
                    return 0
                dearest, num_curious = max(dearest, price), num_curious + 1
        if not num_curious:
            return num_steps
        missing = self._needed(num_curious, dearest) - self._purse
        return max(0, min(num_steps, ceil(missing / self._income(plain_seconds, thrift)) - 1))

    def _needed(self, num_curious: int, price: float) -> float:
        """What has to be in the purse for a step in which only the curious are asked about."""
        return min(min(num_curious, _TOGETHER) * price, self._most)

    def learn(self, step: Step, seat: Seat, outcome: Outcome, guesses: Sequence[Draft]) -> None:
        """What guesses brought, in the time they saved.

        One that was not worth using brought nothing; but where it was right, the next may be used: that counts little.
        """
        num_right, seat.unused, seat.num_right = seat.num_right, (), 0
        brought, rate = 0.0, _VALUE_RATE
        if outcome.choice.depth and outcome.choice.ask is None:
            used, hits = outcome.verdict.num_drafted, outcome.verdict.num_accepted
            token_seconds = step.plain_seconds / step.rows - self._costs.judge_seconds  # judged it is in any case
            brought = max(0.0, hits * token_seconds - used * step.slot_seconds)
            self._proven_from, self._wait = 0, 1
            if brought:
                seat.num_right = num_right + hits
        elif not any(draft.tokens for draft in guesses):
            seat.num_right = num_right // 2
        else:
            said = outcome.verdict.tokens
            right = [draft.tokens for draft in guesses if draft.tokens[: len(said)] == said]
            if right:
                rate = _UNUSED_RATE
                seat.unused, seat.num_right = right[0][len(said) :], num_right + len(said)
                seat.unused_from = len(outcome.request.tokens)
        seat.guess_value += rate * (brought - seat.guess_value)
        self._value += rate / step.rows * (brought - self._value)

    @staticmethod
    def compare(seat: Seat, request: Request) -> None:
        """A guess that was not used and turns out right, token after token, says that it is time to ask again."""
        said = request.tokens[seat.unused_from :]
        if list(seat.unused[: len(said)]) != said:
            seat.unused = ()
            return
        seat.unused, seat.unused_from = seat.unused[len(said) :], len(request.tokens)
        seat.num_right += len(said)
        seat.is_eager = seat.num_right >= _CONVINCING

    def price(self, seat: Seat) -> float:
        """Of asking about a request once: the guesser's part and the policy's."""
        return self._price(seat.guessers)

    def _price(self, guessers: Collection[str]) -> float:
        """The same, where any of these guessers is asked."""
        each = [self._costs.guess_seconds.get(name, 0.0) for name in guessers]
        return self._costs.weigh_seconds + sum(each) / len(each)


def is_proven(seat: Seat) -> bool:
    """What was guessed for a request has lately been what it said, for several tokens on end."""
    return seat.num_right >= _PROVEN


def guess_seconds(costs: Costs, guesses: Mapping[int, Sequence[Draft]]) -> float:
    """What the guesses of a step have cost, and weighing them will."""
    price = costs.guess_seconds
    return sum(
        [price.get(draft.proposer, 0.0) + costs.weigh_seconds for drafts in guesses.values() for draft in drafts]
    )


def _whom(seat: Seat) -> Sequence[str]:
    """The guesser that has been right most; now and then all of them, to compare."""
    seat.num_asked += 1
    if len(seat.guessers) == 1 or seat.num_asked % _COMPARE_EVERY == 1:
        return seat.guessers
    return [max(seat.guessers, key=lambda name: seat.hits.get(name, 0.0))]

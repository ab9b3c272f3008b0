"""Whether a draft model is to read a text it has not followed.

Reading is a stake put down before much is known of the request, and while it is done the whole batch waits. It has to
be made good soon by what drafts are sure to save, and everybody who waits has to bear it; where it is not cheap beside
what the request will take, it is made only as long as earlier stakes were won.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outpace.core import Request
from outpace.speculation.acceptance_model import AcceptanceModel
from outpace.speculation.base import Proposer
from outpace.speculation.costs import Costs
from outpace.speculation.seats import NEURAL, Seat, Step
from outpace.speculation.sweep import Plan, Table

_CHEAP = 0.03  # of the time a request is expected to take: reading that costs no more is always allowed
_SMALL = 0.3  # plain steps: nobody minds, where it is what was said since a text was last drafted for
_STAKE_STEPS = 2.0  # plain steps that reading may cost for each bit of evidence that is enough to believe anything:
_QUICK_STEPS = 12.0  # what costs more has to be made good so soon;
_MADE_GOOD_STEPS = 30.0  # the rest, in so many steps; each by what drafts are sure to save, before the request ends,
_WON_BACK_STEPS = 18.0  # and for each request in so many, beside
_READING_SHARE, _READING_STEPS = 0.02, 0.4  # what it can bear to lose: of what it is expected to take, and plain steps
_LOOK_AGAIN = 8  # steps after which a text that was too dear to read is looked at again
_START_OUTPUT = 64.0  # tokens a request is expected to say, until some have
_RATE = 0.05
_GUESSED_SHARE, _GUESSED_WEIGHT = 0.3, 8.0  # of tokens said by guesses, until some have been; as of so many tokens
_FIRST_READING = 10.0  # plain steps that the very first text may cost,
_FIRST_SHARE = 0.08  # and of the time that anybody who waits for it is expected to take


@dataclass(slots=True)
class Prospect:
    """What the draft model promises for one request."""

    row: int  # of the step
    survival: list[float]  # of each token it would draft
    num_unread: int
    is_staked: bool  # what is known of drafts is enough to have this text read as well


class Reading:
    def __init__(self, costs: Costs, acceptance: AcceptanceModel, proposer: Proposer | None) -> None:
        self._costs = costs
        self._acceptance = acceptance
        self._proposer = proposer
        self.record = Record()
        self.returns = Returns()
        self._mean_output = _START_OUTPUT  # tokens that requests say, lately
        self._guessed_share = _GUESSED_SHARE  # of the tokens said, those in steps with a guess, lately
        self.drafted_share = 1.0  # of the tokens said after reading, those a draft was made for, lately

    def _seconds(self, num_unread: int) -> float:
        return self._costs.reading_seconds(num_unread - 1)

    def still_to_say(self, request: Request) -> float:
        """Nobody knows when a request will end; that it has gone on for long says little about it."""
        return min(request.max_useful_depth + 1, self._mean_output)

    def expected_output(self, request: Request) -> float:
        """Tokens, when all is said."""
        return request.num_output + self.still_to_say(request)

    # ---- whose

    def may_read(self, step: Step, i: int) -> bool:
        """Reading a request's text has to be cheap, or worth it lately; in a batch all of it, what it took."""
        assert self._proposer is not None
        if step.rows > 1 and not self.returns.is_worth_it(step.number):
            return False
        if self.record.is_worth_trying:
            return True
        seat, request = step.seats[i], step.requests[i]
        if step.number < seat.too_dear_until:
            return False
        cheap = _CHEAP * step.plain_seconds * self.expected_output(request)
        if self._seconds(self._proposer.num_unread(request)) <= cheap:
            return True
        seat.too_dear_until = step.number + _LOOK_AGAIN + request.id % _LOOK_AGAIN  # not all in the same step
        return False

    def is_thinkable(self, step: Step) -> bool:
        """A request alone may be the first whose text is read; in a batch, that is for a probe to find out."""
        return step.rows == 1 or self._acceptance.evidence(NEURAL) >= 1.0

    def staked(self, step: Step, unread: Sequence[tuple[int, int]]) -> set[int]:
        """Of texts, given with what is unread of them, the shortest, as many as may be staked on what is known."""
        room = self._stake(step)
        found: set[int] = set()
        for num_unread, i in sorted(unread):
            room -= self._seconds(num_unread)
            if room < 0 and (found or step.rows > 1):
                break
            found.add(i)
        return found

    def _stake(self, step: Step) -> float:
        """Seconds that reading may cost, without having to be made good at once."""
        return _STAKE_STEPS * step.plain_seconds * self._acceptance.evidence(NEURAL)

    def most_at_first(self, step: Step) -> float:
        """Seconds that all may wait, while nothing is known of drafts, for something to be."""
        shortest = min([self.expected_output(request) for request in step.requests])
        return min(_FIRST_READING, _FIRST_SHARE * shortest) * step.plain_seconds

    # ---- whether it is worth it

    def is_made_good(
        self,
        step: Step,
        table: Table,
        plan: Plan,
        rows: Sequence[int],
        prospects: Sequence[Prospect],
        *,
        in_debt: bool,
    ) -> bool:
        """Whether what a plan saves pays soon for what has to be read first, and all can bear that: all have to wait.

        In debt that has to be sooner. The very first is read to find out, where it would be made good by a good draft.
        """
        if plan.drafted is None:
            return True
        drafted = {i for i, is_drafted in zip(rows, plan.drafted, strict=True) if is_drafted}
        behind = [each for each in prospects if each.row in drafted and each.num_unread > 2]
        num_unread = sum([each.num_unread for each in behind])
        reading = self._costs.reading_seconds(num_unread - len(behind), len(drafted))
        small = _SMALL * step.plain_seconds
        if not behind or (reading <= small and all(step.seats[each.row].has_read for each in behind)):
            return True
        is_first = not self._acceptance.is_known(NEURAL)
        kinds = {seat.prospects.temperature for seat in step.seats}
        if is_first or (step.rows == 1 and self.record.num_won):
            # It is read to find out; or nobody else waits, and it was worth it the last time.
            counted_on = dict.fromkeys(kinds, 1.0)
        else:
            counted_on = {kind: self._acceptance.cautious_share(NEURAL, kind, plan.num_passes) for kind in kinds}
        gains = [0.0] * step.rows
        for i, gain in zip(rows, plan.gains, strict=True):
            gains[i] = counted_on[step.seats[i].prospects.temperature] * gain
        left = [self._steps_left(step, i, gains[i]) for i in range(step.rows)]
        seconds = plan.seconds - plan.reading_seconds  # of the steps after this one
        saved = (table.expected + sum(gains)) / table.plain_speed - seconds
        served = sum([left[each.row] for each in behind]) / len(behind)
        if is_first:
            return reading <= min(self.most_at_first(step), served * saved)
        steps = _QUICK_STEPS if in_debt or reading > self._stake(step) else _MADE_GOOD_STEPS
        if reading > min(steps, served) * saved:
            return False
        for i in range(step.rows):
            saved_each = max(0.0, (1.0 + gains[i]) * step.plain_seconds - seconds)
            if not self._bears(step, i, reading - min(_WON_BACK_STEPS, left[i]) * saved_each):
                return False
        return True

    def _steps_left(self, step: Step, i: int, gain: float) -> float:
        """The steps in which a request is expected to be drafted for; each says 1 + `gain` tokens."""
        request, seat = step.requests[i], step.seats[i]
        num_guessed = _GUESSED_WEIGHT * self._guessed_share + seat.num_guessed
        unguessed = 1.0 - num_guessed / (_GUESSED_WEIGHT + request.num_output)
        return max(0.0, unguessed) * self.still_to_say(request) / (1.0 + gain)

    def _bears(self, step: Step, i: int, loss: float) -> bool:
        """Whether a request can bear to lose so much by reading texts, beside what it has lost."""
        if loss <= 0.0:
            return True  # it gains by it: only so is made good what it has lost
        request = step.requests[i]
        lost = request.spec.decode_seconds - request.spec.plain_seconds
        return lost + loss <= (_READING_SHARE * self.expected_output(request) + _READING_STEPS) * step.plain_seconds

    # ---- learning

    def ended(self, request: Request, seat: Seat, lost: float) -> None:
        """A request is over, and took that much longer than plain decoding, of its time."""
        self._mean_output += _RATE * (request.num_output - self._mean_output)
        if seat.mode != "auto":
            return  # nothing was weighed
        guessed = seat.num_guessed / max(request.num_output, 1)
        self._guessed_share += _RATE * (guessed - self._guessed_share)
        if not seat.has_read:
            self.record.pass_time()
            return
        used = seat.num_said_drafting / max(seat.num_said, 1)
        self.drafted_share = max(0.1, self.drafted_share + _RATE * (used - self.drafted_share))
        if not seat.has_won:
            # Of one that ended sooner than anybody could expect, it says little that reading was not made good.
            self.record.end(lost * min(1.0, request.num_output / max(seat.expected_output, 1.0)))


class Record:
    """Whether having a draft model read a whole text has been worth it lately, for requests where that is not cheap.

    It is a stake put down before anything is known of the request. As long as nobody lost by it, it is tried; what one
    request loses keeps others from trying, until a few have won or some forty have come and gone, so that losers stay
    rare. At first one tries at a time.
    """

    _LOSS = 0.15  # added to the risk by one that has lost
    _MUCH = 0.2  # of its time, less by those that lost less,
    _NOT_LOST = 0.04  # nothing by those that lost this at most
    _WON = 0.4  # of the risk taken away by a winner
    _FADE = 0.97  # per request that ends
    _MOST = 0.05  # risk at which it is still tried

    def __init__(self) -> None:
        self._risk = 0.0
        self._num_open = 0
        self.num_won = 0

    @property
    def is_worth_trying(self) -> bool:
        return self._risk <= self._MOST and self._num_open <= self.num_won

    def begin(self) -> None:
        self._num_open += 1

    def end(self, lost: float) -> None:
        self._num_open -= 1
        self.pass_time()
        if lost > self._NOT_LOST:
            self._risk += self._LOSS * min(1.0, lost / self._MUCH) * (1.0 - self._risk)
            self.num_won = 0
        else:
            self._risk *= 1.0 - self._WON
            self.num_won += 1

    def pass_time(self) -> None:
        self._risk *= self._FADE


class Returns:
    """What steps with drafts of a model have brought of late, with what was read for them, whoever it was for.

    What one request wins or loses, alone or not, is for `Record`. This is about all of a batch: where guesses do the
    work, or texts end soon, reading can cost more than drafts bring although each text seemed worth it.
    """

    _MEMORY = 128.0  # steps with drafts of a model
    _ENOUGH = 48.0  # of them, older ones fading, to judge by
    _LEAST = 0.99  # of plain decoding's speed, to go on; a little is forgiven, because texts are read beforehand
    _PAUSE, _LONGEST_PAUSE = 96, 4096  # steps without reading; each time twice as many

    def __init__(self) -> None:
        self._pause = self._PAUSE
        self._until = 0
        self._forget()

    def _forget(self) -> None:
        self._spent = self._plain = self._num_steps = 0.0

    def is_worth_it(self, number: int) -> bool:
        """Whether texts are read in this step."""
        return number >= self._until

    def add(self, number: int, rows: int, spent: float, plain: float) -> None:
        """A step took so long, with its share of what was read, and would have taken so long plainly."""
        if rows == 1:
            return
        fade = 1.0 - 1.0 / self._MEMORY
        self._spent = self._spent * fade + spent
        self._plain = self._plain * fade + plain
        self._num_steps = self._num_steps * fade + 1.0
        if self._num_steps < self._ENOUGH or number < self._until:
            return
        if self._plain >= self._LEAST * self._spent:
            self._pause = self._PAUSE
            return
        self._until = number + self._pause
        self._pause = min(2 * self._pause, self._LONGEST_PAUSE)
        self._forget()

    def charge(self, rows: int, seconds: float) -> None:
        """So much of what was read served nobody."""
        if rows > 1:
            self._spent += seconds

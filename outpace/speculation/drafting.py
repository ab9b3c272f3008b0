"""A draft model, priced before it runs: its passes, and what it has to read first, spread over what that may serve.

Reading a text is a stake put down before anything is known of the request. Where it is not cheap beside what the
request will take, it is made only as long as earlier ones were won.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from outpace.core import Request
from outpace.speculation.acceptance_model import AcceptanceModel
from outpace.speculation.base import Proposer
from outpace.speculation.costs import Costs
from outpace.speculation.ledger import ReadingRecord
from outpace.speculation.seats import NEURAL, Seat, Step
from outpace.speculation.sweep import Plan, Table

_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # tried for a draft model
_READING_LOSS = 0.03  # of the time a request is expected to take: reading that costs no more is always allowed
_SMALL_READING = 0.3  # plain steps: nobody minds, where it is what was said since a text was last drafted for
_MADE_GOOD_STEPS = 30.0  # within so many steps more has to be made good by what drafts are sure to save,
_WON_BACK_STEPS = 18.0  # and for each request in so many,
_OF_STEPS_LEFT = 0.6  # in both cases of those it is expected to draft in, at most; beside
_READING_SHARE, _READING_STEPS = 0.03, 0.4  # what it can bear to lose: of what it is expected to take, and plain steps
_COUNTED_ON = 0.95  # of the gain expected, at most
_LOOK_AGAIN = 8  # steps after which a text that was too dear to read is looked at again
_START_OUTPUT = 64.0  # tokens a request is expected to say, until some have
_OUTPUT_RATE = 0.05
_GUESSED_SHARE, _GUESSED_WEIGHT = 0.3, 8.0  # of tokens said by guesses, until some have been; as of so many tokens
_FIRST_READING = 6.0  # plain steps that the very first text may cost


@dataclass(slots=True)
class Prospect:
    """What the draft model promises for one request."""

    row: int  # of the step
    survival: list[float]  # of each token it would draft
    num_unread: int


@dataclass(slots=True)
class _Load:
    """What drafting for some requests comes to."""

    rows: int
    num_warm: int  # tokens to be read in any case: two after a draft that was accepted whole
    num_behind: int  # and those of texts that were not followed
    served: float  # tokens that reading them may serve, for each request


class DraftWeigher:
    def __init__(self, costs: Costs, acceptance: AcceptanceModel, proposers: Mapping[str, Proposer]) -> None:
        self._costs = costs
        self._acceptance = acceptance
        self._proposer = proposers.get(NEURAL)
        self.readings = ReadingRecord()
        self._mean_output = _START_OUTPUT  # tokens that requests say, lately
        self._guessed_share = _GUESSED_SHARE  # of the tokens said, those in steps with a guess, lately
        self._drafted_share = 1.0  # of the tokens said after reading, those a draft was made for, lately

    # ---- for whom

    def room(self, step: Step, i: int) -> int:
        return min(step.seats[i].most, step.requests[i].max_useful_depth, _DEPTHS[-1])

    def prospects(self, step: Step, least: float) -> list[Prospect]:
        """Of every request it may be run for. No token is looked at that is less likely than `least` to survive."""
        if self._costs.draft is None or self._proposer is None:
            return []
        read: list[tuple[int, int]] = []  # tokens still to read, row
        unread: list[tuple[int, int]] = []
        for i in step.weighed:
            seat = step.seats[i]
            if seat.may_draft and (seat.has_read or self._may_read(step, i)):
                (read if seat.has_read else unread).append((self._proposer.num_unread(step.requests[i]), i))
        rows = read + self._to_read(step, unread)
        found: list[Prospect] = []
        for num_unread, i in rows:
            room = self.room(step, i)
            if room:
                survival = self._acceptance.forecast_survival(NEURAL, step.seats[i].prospects, room, least)
                if survival:
                    found.append(Prospect(i, survival, num_unread))
        return found

    def _to_read(self, step: Step, unread: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The shortest texts, as many as can be staked on what is known; while they are read, all others wait."""
        if not unread:
            return []
        unread.sort()
        evidence = self._acceptance.evidence(NEURAL)
        if evidence < 1.0:  # a request alone may be the first; in a batch, that is for a probe to find out
            return unread if step.rows == 1 else []
        room = step.plain_seconds * evidence
        num_taken = 0
        for num_unread, _ in unread:
            room -= self._reading_seconds(num_unread)
            if room < 0 and (num_taken or step.rows > 1):
                break
            num_taken += 1
        return unread[:num_taken]

    def able(self, step: Step) -> list[int]:
        """The rows for which it may be run at all, for a probe."""
        if self._costs.draft is None:
            return []
        return [
            i
            for i in step.weighed
            if step.seats[i].may_draft and (step.seats[i].has_read or self._may_read(step, i)) and self.room(step, i)
        ]

    def _may_read(self, step: Step, i: int) -> bool:
        """Reading a request's text has to be cheap, or worth it lately."""
        assert self._proposer is not None
        if self.readings.is_worth_trying:
            return True
        seat, request = step.seats[i], step.requests[i]
        if step.number < seat.too_dear_until:
            return False
        cheap = _READING_LOSS * step.plain_seconds * self.expected_output(request)
        if self._reading_seconds(self._proposer.num_unread(request)) <= cheap:
            return True
        seat.too_dear_until = step.number + _LOOK_AGAIN + request.id % _LOOK_AGAIN  # not all in the same step
        return False

    # ---- at what price

    def _reading_seconds(self, num_unread: int) -> float:
        return self._costs.reading_seconds(num_unread - 1)

    def _load(self, step: Step, users: Sequence[Prospect]) -> _Load:
        num_warm = num_behind = 0
        for user in users:
            if user.num_unread > 2:
                num_behind += user.num_unread
                num_warm += 2
            else:
                num_warm += user.num_unread
        served = 0.0
        if num_behind:
            served = self._drafted_share * sum([self.still_to_say(step.requests[user.row]) for user in users])
        return _Load(len(users), num_warm, num_behind, served / len(users))

    def _seconds(self, step: Step, load: _Load, depth: int) -> float:
        """Drafting so deep, with what has to be read first spread over the tokens it may serve."""
        rows, warm = load.rows, load.num_warm
        drafting = self._costs.draft_seconds(rows, warm, depth, step.context)
        if load.num_behind:
            reading = self._costs.reading_seconds(load.num_behind, warm)
            drafting += reading * min(1.0, (1 + depth) / 2 / max(load.served, 1.0))
        return drafting

    def token_seconds(self, step: Step, plan: Plan) -> float:
        """One more token from the draft model, for one of the requests it drafts for."""
        assert self._costs.draft is not None and plan.drafted is not None
        rows = sum(plan.drafted)
        return self._costs.draft.seconds(rows, rows, step.context) / rows + self._costs.draw_seconds

    def still_to_say(self, request: Request) -> float:
        """Nobody knows when a request will end; that it has gone on for long says little about it."""
        return min(request.max_useful_depth + 1, self._mean_output)

    def expected_output(self, request: Request) -> float:
        """Tokens, when all is said."""
        return request.num_output + self.still_to_say(request)

    # ---- how deep

    def is_made_good(
        self, step: Step, table: Table, plan: Plan, rows: Sequence[int], prospects: Sequence[Prospect]
    ) -> bool:
        """Whether what a plan saves pays soon for what has to be read first, and all can bear that: all have to wait.

        The very first is read to find out.
        """
        if plan.drafted is None:
            return True
        drafted = {i for i, is_drafted in zip(rows, plan.drafted, strict=True) if is_drafted}
        behind = [each for each in prospects if each.row in drafted and each.num_unread > 2]
        reading = sum([self._reading_seconds(each.num_unread) for each in behind])
        small = _SMALL_READING * step.plain_seconds
        if not behind or (reading <= small and all(step.seats[each.row].has_read for each in behind)):
            return True
        if not self._acceptance.is_known(NEURAL):
            return reading <= _FIRST_READING * step.plain_seconds
        counted_on = self._acceptance.certainty([NEURAL], most=_COUNTED_ON)
        gains = [0.0] * step.rows
        for i, gain in zip(rows, plan.gains, strict=True):
            gains[i] = counted_on * gain
        left = [self._steps_left(step, i, gains[i]) for i in range(step.rows)]
        saved = (table.expected + sum(gains)) / table.plain_speed - plan.seconds
        served = sum([left[each.row] for each in behind]) / len(behind)
        if reading > min(_MADE_GOOD_STEPS, served) * saved:
            return False
        for i in range(step.rows):
            saved_each = max(0.0, (1.0 + gains[i]) * step.plain_seconds - plan.seconds)
            if not self._bears(step, i, reading - min(_WON_BACK_STEPS, left[i]) * saved_each):
                return False
        return True

    def _steps_left(self, step: Step, i: int, gain: float) -> float:
        """A part of the steps in which a request is expected to be drafted for; each says 1 + `gain` tokens."""
        request, seat = step.requests[i], step.seats[i]
        num_guessed = _GUESSED_WEIGHT * self._guessed_share + seat.num_guessed
        unguessed = 1.0 - num_guessed / (_GUESSED_WEIGHT + request.num_output)
        return _OF_STEPS_LEFT * max(0.0, unguessed) * self.still_to_say(request) / (1.0 + gain)

    def _bears(self, step: Step, i: int, loss: float) -> bool:
        """Whether a request can bear to lose so much by reading texts, beside what it has lost."""
        request = step.requests[i]
        lost = request.spec.decode_seconds - request.spec.plain_seconds
        return lost + loss <= (_READING_SHARE * self.expected_output(request) + _READING_STEPS) * step.plain_seconds

    def best(
        self,
        step: Step,
        table: Table,
        rows: Sequence[int],
        guessed: Sequence[list[float]],
        prospects: list[Prospect],
        deepest: int,
    ) -> Plan | None:
        """The plan with the draft model at the depth that promises most, for the requests where it beats a guess.

        Depths are compared with all their tokens taken; only of the best is it asked which of them to leave.
        """
        by_row = {prospect.row: prospect for prospect in prospects}
        promised = {i: (sum(chances), len(chances)) for i, chances in zip(rows, guessed, strict=True) if chances}
        best_speed, best_depth, best_users = 0.0, 0, list[Prospect]()
        users, load = list[Prospect](), _Load(0, 0, 0, 0.0)
        # Requests of which the same is known share a list: what it sums to is found once.
        sums = {id(each.survival): list(accumulate(each.survival)) for each in prospects}
        deepest = min(deepest, max([len(totals) for totals in sums.values()]))
        for depth in _DEPTHS:
            if depth > deepest:
                break
            at_depth = {key: totals[min(depth, len(totals)) - 1] for key, totals in sums.items()}
            before = users
            users, gain, tokens = _users([at_depth[id(each.survival)] for each in prospects], prospects, promised)
            if not users:
                continue
            if len(users) != len(before):  # the deeper, the more
                load = self._load(step, users)
            expected = table.expected + gain
            tokens = min(tokens + sum([min(depth, len(user.survival)) for user in users]), len(table.seconds) - 1)
            taken = table.total(tokens, expected) + self._seconds(step, load, depth)
            if expected > best_speed * taken:
                best_speed, best_depth, best_users = expected / taken, depth, users
            elif expected < 0.9 * best_speed * taken:
                break  # deeper drafts only cost more
        if not best_depth:
            return None
        drafted = {user.row for user in best_users}
        mixed = [
            by_row[i].survival[:best_depth] if i in drafted else guess for i, guess in zip(rows, guessed, strict=True)
        ]
        plan = Plan(table.after(self._seconds(step, self._load(step, best_users), best_depth)), mixed)
        plan.drafted, plan.num_passes = [i in drafted for i in rows], best_depth
        return plan

    def ended(self, request: Request, seat: Seat, lost: bool) -> None:
        """Learn from a request that is over."""
        self._mean_output += _OUTPUT_RATE * (request.num_output - self._mean_output)
        guessed = seat.num_guessed / max(request.num_output, 1)
        self._guessed_share += _OUTPUT_RATE * (guessed - self._guessed_share)
        if seat.has_read:
            used = seat.num_said_drafting / max(seat.num_said, 1)
            self._drafted_share = max(0.1, self._drafted_share + _OUTPUT_RATE * (used - self._drafted_share))
            if not seat.has_won:
                self.readings.end(lost=lost)
        else:
            self.readings.pass_time()


def _users(
    totals: Sequence[float], prospects: list[Prospect], promised: Mapping[int, tuple[float, int]]
) -> tuple[list[Prospect], float, int]:
    """Those for whom the draft model beats a guess; accepted tokens to expect in all, and the tokens of the others."""
    if not promised:
        return prospects, sum(totals), 0
    users, gain = list[Prospect](), 0.0
    rest = dict(promised)
    for total, prospect in zip(totals, prospects, strict=True):
        if total > promised.get(prospect.row, (0.0, 0))[0]:
            users.append(prospect)
            gain += total
            rest.pop(prospect.row, None)
    return users, gain + sum([each for each, _ in rest.values()]), sum([num for _, num in rest.values()])


class Stop:
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

"""A draft model, priced before it runs: its passes, and what it has to read first, spread over what that may serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from outpace.speculation.acceptance_model import AcceptanceModel
from outpace.speculation.base import Proposer
from outpace.speculation.costs import Costs
from outpace.speculation.reading import Prospect, Reading
from outpace.speculation.seats import NEURAL, Seat, Step
from outpace.speculation.sweep import Plan, Table

_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # tried for a draft model
_LEAST_DEEP = 4


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
        self.reading = Reading(costs, acceptance, self._proposer)
        self._deepest = _DEPTHS[-1]  # looked at: twice what was best the last time

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
            if self._may_draft(step, i):
                has_read = step.seats[i].has_read
                (read if has_read else unread).append((self._proposer.num_unread(step.requests[i]), i))
        if not self.reading.is_thinkable(step):
            unread = []
        staked = self.reading.staked(step, unread) if unread else set()
        found: list[Prospect] = []
        for num_unread, i in read + unread:
            room = min(self.room(step, i), self._deepest)
            if room:
                survival = self._acceptance.forecast_survival(NEURAL, step.seats[i].prospects, room, least)
                if survival:
                    found.append(Prospect(i, survival, num_unread, i in staked or step.seats[i].has_read))
        return found

    def able(self, step: Step) -> list[int]:
        """The rows for which it may be run at all, for a probe."""
        if self._costs.draft is None:
            return []
        return [i for i in step.weighed if self._may_draft(step, i) and self.room(step, i)]

    def _may_draft(self, step: Step, i: int) -> bool:
        seat = step.seats[i]
        return seat.may_draft and (seat.has_read or self.reading.may_read(step, i))

    @staticmethod
    def _lives_by_guesses(step: Step, i: int) -> bool:
        """What is guessed for a request now says little of whether it will need a draft model; what was said does."""
        return 2 * step.seats[i].num_guessed > step.requests[i].num_output

    # ---- at what price

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
            served = self.reading.drafted_share * sum(
                [self.reading.still_to_say(step.requests[user.row]) for user in users]
            )
        return _Load(len(users), num_warm, num_behind, served / len(users))

    def _seconds(self, step: Step, load: _Load, depth: int) -> float:
        """Drafting so deep, with this step's share of what has to be read first."""
        drafting = self._costs.draft_seconds(load.rows, load.num_warm, depth, step.context)
        return drafting + self._reading_share(load, depth)

    def _reading_share(self, load: _Load, depth: int) -> float:
        """What has to be read first, spread over the tokens it may serve."""
        if not load.num_behind:
            return 0.0
        reading = self._costs.reading_seconds(load.num_behind, load.num_warm)
        return reading * min(1.0, (1 + depth) / 2 / max(load.served, 1.0))

    def token_seconds(self, step: Step, plan: Plan) -> float:
        """One more token from the draft model, for one of the requests it drafts for."""
        assert self._costs.draft is not None and plan.drafted is not None
        rows = sum(plan.drafted)
        return self._costs.draft.seconds(rows, rows, step.context) / rows + self._costs.draw_seconds

    # ---- how deep

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
        to_read = {each.row for each in prospects if not step.seats[each.row].has_read}
        promised = {
            i: (sum(chances), len(chances))
            for i, chances in zip(rows, guessed, strict=True)
            if chances and (i not in to_read or self._lives_by_guesses(step, i))
        }
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
        self._deepest = max(_LEAST_DEEP, 2 * best_depth)
        drafted = {user.row for user in best_users}
        mixed = [
            by_row[i].survival[:best_depth] if i in drafted else guess for i, guess in zip(rows, guessed, strict=True)
        ]
        load = self._load(step, best_users)
        plan = Plan(table.after(self._seconds(step, load, best_depth)), mixed)
        plan.drafted, plan.num_passes = [i in drafted for i in rows], best_depth
        plan.reading_seconds = self._reading_share(load, best_depth)
        return plan


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
    weighed at the speed the whole batch is expected to run at: so likely is it to survive `at_least`, or `to_go_on`.
    """

    def __init__(self, acceptance: AcceptanceModel, seat: Seat, at_least: float, to_go_on: float) -> None:
        self._acceptance = acceptance
        self._prospects = seat.prospects
        self._least = at_least
        self._least_to_go_on = to_go_on
        self._survival = 1.0
        self._ended = False

    def __call__(self, confidence: float) -> bool:
        if self._ended:
            return False
        [chance] = self._acceptance.given_confidence(NEURAL, self._prospects, [confidence])
        self._survival *= chance
        self._ended = self._survival < self._least_to_go_on
        return self._survival >= self._least
